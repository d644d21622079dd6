"""What a script sees and does between steps, as if it had one device."""
