"""Tensor and context parallelism: tensors that are cut over ranks, and what torch functions do with them."""
