"""A training run: the loop, evaluation, checkpoints, and records."""
