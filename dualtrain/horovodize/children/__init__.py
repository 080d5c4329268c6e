"""Folder on ``sys.path``, in which a script's child processes find the module ``horovod``."""
