"""Rules of Horovod that hold for every reducer of ``hvd.DistributedOptimizer``, whatever way its gradients are sent."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from dualtrain.errors import BackendError
from dualtrain.gradients.buckets import Slot
from dualtrain.gradients.hooks import ParameterHooks, reducers_of
from dualtrain.gradients.refusals import Refusals
from dualtrain.hvd import basics, compat
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.process_sets import ProcessSet

_REASON_SECONDS = 0.5  # how long a failed rank's own message may take to arrive after its connections have closed
Named = Iterable[tuple[str, torch.nn.Parameter]]


@contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of BackendError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except BackendError as error:
        raise _failure(error) from error


def _failure(error: BackendError) -> HorovodInternalError:
    """Return ``error`` as Horovod's, with the reason if the world has ended: it may arrive a little later."""
    engine, deadline = basics.engine(), time.monotonic() + _REASON_SECONDS
    while engine.down is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if engine.down is None or engine.down in str(error):
        return HorovodInternalError(str(error))
    return HorovodInternalError(f"{engine.down} ({error})")


class HorovodReducer(ABC):
    """Combines the gradients of one optimizer; ``reduce`` waits for them, and backward never does.

    Args:
        base_name: what is optimized, the same on every rank.
        process_set: the ranks.
        passes: backward passes that are summed before the gradients are combined.

    Attributes:
        channel_name: ``base_name`` and a number; empty before the first exchange in a world.
        name: of its operations.
        ready: how many parameters have had all their passes.
        dirty: whether there are gradients that were not synchronized.
    """

    def __init__(self, base_name: str, process_set: ProcessSet, passes: int) -> None:
        self.base_name, self.process_set, self.passes = base_name, process_set, passes
        self.channel_name = self.name = ""
        self.hooks = ParameterHooks()
        self.ready = 0
        self.dirty = False
        self.closed = False
        self._generation = 0

    @property
    def set_id(self) -> int:
        """The number of the process set; 0 is the world."""
        return self.process_set.process_set_id or 0

    @property
    @abstractmethod
    def refusals(self) -> Refusals:
        """The checks before an exchange."""

    @abstractmethod
    def slot_ready(self, slot: Slot) -> None:
        """Handle a gradient after all of its passes; does not block."""

    @abstractmethod
    def layout_changed(self) -> None:
        """Agree on the parameters anew before the next exchange: some were added."""

    @abstractmethod
    def world_changed(self) -> None:
        """Drop everything that belongs to an earlier world: ``init`` was called since."""

    @abstractmethod
    def is_reduced(self) -> bool:
        """Return whether the gradients are the result of the last exchange."""

    @abstractmethod
    def renew(self) -> None:
        """Make the next ``reduce`` read ``param.grad`` again."""

    @abstractmethod
    def reduce(self) -> None:
        """Combine the gradients over the ranks, unless they are already. Collective; blocks.

        Raises:
            HorovodInternalError: a rank failed or has other parameters, or Horovod was shut down.
        """

    def rest(self) -> None:
        """Count backward passes from zero again: the gradients are synchronized."""
        if not self.dirty:
            return  # no backward since the last time
        self.dirty, self.ready = False, 0
        for slot in self.hooks.slots:
            slot.passes = 0

    def drop(self) -> None:
        """Forget what a failed step left behind."""
        self.renew()
        self.rest()

    def add(self, named_parameters: Named) -> None:
        """Combine the gradients of these parameters too, from the next backward on. Every rank adds the same."""
        self.hooks.add(self, named_parameters)
        self.layout_changed()

    def add_unfrozen(self) -> None:
        """Add the parameters that were frozen and are not any more."""
        unfrozen = self.hooks.take_unfrozen()
        if unfrozen and compat.enabled():
            compat.note(compat.UNREDUCED)
        elif unfrozen:
            self.add(unfrozen)

    def fill_frozen(self) -> None:
        """With Horovod's defects reproduced, give parameters that were frozen after the wrapping gradients of zeros."""
        if not compat.enabled():
            return
        for slot in self.hooks.slots:
            if not slot.param.requires_grad and slot.param.grad is None:
                slot.param.grad = torch.zeros_like(slot.param)
                compat.note(compat.FROZEN)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to go on once ``optimizer`` has parameters that were not added here."""
        self.refusals.optimizer = optimizer

    def close(self) -> None:
        """Remove the hooks: gradients of later backward passes stay this rank's own. May be called again."""
        self.closed = True
        self.hooks.remove()

    @staticmethod
    def close_replaced(named: Named, base_name: str, process_set: ProcessSet) -> None:
        """Close the reducers of earlier optimizers of all these parameters: a new one is made in their place.

        Both at once cannot work, as on Horovod, where their calls have the same names. An old one may live on: Lightning
        wraps anew in each ``fit``, and the old optimizer waits for the garbage collector.
        """
        params = {id(p) for _, p in named}
        for old in {reducer for _, p in named for reducer in reducers_of(p) if isinstance(reducer, HorovodReducer)}:
            if (old.base_name, old.process_set, old.hooks.known) == (base_name, process_set, params):
                old.close()

    def enter_world(self) -> None:
        """Take a name in this world, if it is another one than in the last exchange."""
        if self._generation != basics.generation():
            self.world_changed()
            self._generation = basics.generation()
            self.channel_name = f"{self.base_name}.{basics.engine().channels.claim(self.base_name)}"
            self.name = f"gradients.{self.channel_name}"

    def leave_world(self) -> None:
        """Take another name before the next exchange."""
        self._generation = -1

    # -- during backward --------------------------------------------------------------------------------------------

    def parameter_replaced(self, place: tuple[int, str], name: str | None) -> None:
        """Refuse to go on while a module has a new parameter in ``place`` instead of ``name``; ``None`` takes it back."""
        self.refusals.replace(place, name)

    def gradient_ready(self, slot: Slot) -> None:
        """Count a backward pass of a gradient. Raises AssertionError after too many of them, as Horovod does."""
        self.renew()
        self.dirty = True
        slot.passes += 1
        if slot.passes > self.passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if slot.passes == self.passes:
            self.ready += 1
            self.enter_world()
            self.slot_ready(slot)
