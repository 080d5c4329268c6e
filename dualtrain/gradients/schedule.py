"""Order of the buckets: every rank sends them in the order of the layout, even if a later bucket is complete first.

Bucket k is sent when it is complete and the k buckets before it were sent. Buckets that never become complete, because
backward did not reach one of their parameters, are sent at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualtrain.gradients.buckets import Bucket
from dualtrain.gradients.slots import SlotBucket


class Schedule:
    """The buckets of a layout. In each round (one exchange of all gradients), every bucket is sent once.

    This class does not communicate.

    Attributes:
        buckets: the buckets in the order in which they are sent.
        next: the index of the first bucket that was not sent in this round.
        round: the number of this round, from 1.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.next = 0
        self.round = 1

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Replace the buckets. None of the new ones was sent in this round."""
        self.buckets, self.next = list(buckets), 0

    @property
    def has_unsent(self) -> bool:
        """Return whether there is a bucket that is still to be sent in this round."""
        return self.next < len(self.buckets)

    @property
    def next_is_complete(self) -> bool:
        """Return whether there is a next bucket, and all its gradients were marked ready."""
        return self.next < len(self.buckets) and not self.buckets[self.next].pending

    @staticmethod
    def mark_ready(bucket: SlotBucket) -> bool:
        """Count one more gradient of ``bucket`` as ready; return whether it is complete now."""
        bucket.pending -= 1
        return not bucket.pending

    def take_next(self) -> Bucket:
        """Return the next bucket, which the caller sends, and count it as sent."""
        bucket = self.buckets[self.next]
        self.next += 1
        return bucket

    def forget_ready(self) -> None:
        """Begin a new round without ready gradients. Call this only if no bucket was sent in this round."""
        for bucket in self.buckets:
            bucket.forget_ready()
        self.round += 1

    def start_round(self) -> None:
        """Begin the next round, after the sums of all buckets have ended, or after a failed exchange."""
        # Keep this order. If Ctrl-C stops this method between the two lines, ``next`` still equals the number of buckets,
        # so that nothing is sent until this method is called again.
        self.round += 1
        self.next = 0
