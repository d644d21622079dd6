"""Readers of the event log: the console and TensorBoard."""
