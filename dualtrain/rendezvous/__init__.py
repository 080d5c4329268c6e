"""Rendezvous: the processes of a job find and authenticate each other before a library connects. Imports no torch."""
