"""Readers of the event log: the console, what `lockstep watch` shows, TensorBoard, W&B and MLflow."""
