"""The drill: run the user's own job without and with faults, and check that both runs end with the same weights."""
