"""What to change, with the numbers that say so."""
