"""Diagnosis of the machine: would a run work here, and if not, what to fix. No other package imports it."""
