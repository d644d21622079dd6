"""Checkpoints of a run: saved as a transaction of all ranks, and read back under any layout."""
