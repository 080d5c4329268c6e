"""Beside the story: what a step costs with each library, measured on the machine at hand, and what a move would win."""
