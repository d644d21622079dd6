"""What fits, how fast it is and which layout is best, before any GPU is taken. Nothing here imports torch but trace.py."""
