"""The drill: the user's own job with faults, and whether it ends with the same weights."""
