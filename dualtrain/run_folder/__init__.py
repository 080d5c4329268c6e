"""The folder of a run: its lock, its checkpoints, and the record of its attempts."""
