"""A forward that is followed: a model's blocks, the values between them, and what its code reads and carries."""
