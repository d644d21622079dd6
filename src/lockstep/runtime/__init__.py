"""Where am I: ranks, device, mesh, seeds and output of this process."""
