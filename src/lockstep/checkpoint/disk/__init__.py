"""A checkpoint on disk: its format, its files, and who may write them. Needs no process group."""
