"""A folder for ``sys.path``: child processes of a script inherit that, and find ``horovod`` here."""
