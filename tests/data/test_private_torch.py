"""Private attributes of torch's DataLoader, with which dualtrain stops the loader's workers.

The message of a failed test names the missing attribute.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader


def test_a_loader_has_the_private_attributes_that_stop_its_workers():
    cure = f"torch {torch.__version__}: DataLoader has no {{}}: stop the workers another way in dualtrain/data/loader.py"
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    next(iter(loader))
    iterator = getattr(loader, "_iterator", None)
    assert iterator is not None, cure.format("_iterator")
    workers = getattr(iterator, "_workers", [])
    assert len(workers) == 1, cure.format("_iterator._workers")
    assert hasattr(iterator, "_shutdown_workers"), cure.format("_iterator._shutdown_workers")
    iterator._shutdown_workers()
    workers[0].join(60)
    assert not workers[0].is_alive()
