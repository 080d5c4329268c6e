"""Diagnosis of the machine: whether a run would work here, and what to fix if not. No other package imports it."""
