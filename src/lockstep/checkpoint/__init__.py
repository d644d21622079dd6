"""What a run writes to come back from."""
