"""Whether a layout gives the numbers of one process, and if not, why."""
