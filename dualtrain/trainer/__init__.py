"""One optimizer step over all ranks: the trainer, its passes, and all state that the next step depends on."""
