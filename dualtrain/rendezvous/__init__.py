"""Rendezvous: the processes of a job find and authenticate each other, before torch.distributed or Horovod connects them.

Imports no torch.
"""
