"""``--prove``: record, compare and time a script's first steps on Horovod and on dualtrain."""
