"""What fits, how fast it is and which layout is best, before any GPU is taken; only tracing imports torch."""
