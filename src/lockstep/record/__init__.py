"""What a run leaves behind, and how it is read again: its folder, its event log, its failures."""
