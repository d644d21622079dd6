"""What fits, how fast it is and which layout is best, before any GPU is taken; without torch, except for tracing."""
