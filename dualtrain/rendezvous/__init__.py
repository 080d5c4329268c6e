"""How the processes of a job find and authenticate each other, before any tensor library connects. Imports no torch."""
