"""What stops a run, and what it does then."""
