"""Folder on ``sys.path`` of a script's child processes, which find ``horovod`` here."""
