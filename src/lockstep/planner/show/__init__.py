"""What `lockstep plan` prints."""
