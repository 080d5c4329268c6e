"""Before the story: whether a run would work here, and what to mend if not. Nothing else depends on it."""
