"""Folder that is put on ``sys.path``, so that a script's child processes find the module ``horovod`` here."""
