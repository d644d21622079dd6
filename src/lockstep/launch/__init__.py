"""How the processes of a run are started."""

LAUNCH = "LOCKSTEP_LAUNCH"
"""The variable in which a launcher tells its workers of the run: a JSON object with run_dir, options and more."""

AGREED = "agreed-to-stop"
"""A file that ranks leave in the scratch folder of their node: whatever happens then, they do not start again."""
