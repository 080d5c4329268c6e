"""Benchmark of the libraries' training steps on this machine. Nothing else in the package imports it."""
