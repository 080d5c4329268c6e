"""A training run: the loop, evaluation, checkpoints, and what is written down of it."""
