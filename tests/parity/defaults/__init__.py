"""Trainings as people write them, with no option of Lockstep given: the numbers of a plain loop, or a refusal."""
