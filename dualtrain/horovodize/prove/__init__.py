"""``--prove``: a script's first steps on Horovod and on dualtrain, recorded, compared and timed."""
