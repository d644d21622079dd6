"""What this host is and does: its CPUs, memory, network and GPUs."""
