"""What is found out about a training before its first step: what couples samples, and how many fit."""
