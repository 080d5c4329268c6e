"""Benchmark of the libraries' training steps on this machine. No other part of the package imports this package."""
