"""The drill: run the user's own job with faults, and check that it ends with the same weights."""
