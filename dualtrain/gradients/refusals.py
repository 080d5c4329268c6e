"""Find out why a rank can no longer average its gradients, and raise the same error on all ranks.

After the buckets were made, a parameter or the optimizer may change on one rank, and only that rank can detect the change.
That rank sends a flag after the gradients, in the last bucket, and completes the exchange; all ranks then compare their
reasons and raise the same error. So no rank enters a collective alone. With gradients on a GPU, the errors may differ: see
:meth:`Refusals.flagged`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import NoReturn

import torch

from dualtrain.backends import Backend
from dualtrain.backends.agreement import Call, agree
from dualtrain.errors import BackendError
from dualtrain.gradients.buckets import Bucket
from dualtrain.gradients.changed_parameters import ChangedParameters
from dualtrain.gradients.drift import Drift
from dualtrain.gradients.hooks import ModuleAttribute, ParameterHooks
from dualtrain.gradients.late_flag import LateFlag
from dualtrain.gradients.parameters import Forms
from dualtrain.gradients.refused_slots import RefusedSlots
from dualtrain.gradients.sparse import has_values

Named = Sequence[tuple[str, torch.nn.Parameter]]
_NEW_LAYOUT = (
    "parameters were unfrozen, or added to the optimizer, which changes the layout of the gradients: do so on every rank "
    "before the same backward"
)
_AFTER_REPLACEMENT = "make and wrap the optimizer after the replacement, or call add_param_group on every rank"
SENT_DROPPED = (
    "an earlier backward pass failed after some of its gradients had been sent, and zero_grad() was called before their "
    "exchange had ended: call zero_grad() on every rank, and run backward again before step()"
)
_SAME_STEPS = "step or skip on all ranks, and call optimizer.zero_grad() after a backward whose step is skipped"


class Refusals:
    """The checks of a reducer in every exchange.

    Each rank sends a flag in the last bucket:

    - NaN if it has a reason to refuse. Also NaN if it averages its gradients only in an optimizer's step, if a hook has
      changed a parameter in backward, or if the ranks compare their weights, see :class:`Drift` (with gradients on a GPU,
      only if the CPU waits for the exchange).
    - Otherwise infinity after an odd number of optimizer steps, and minus infinity after an even number.

    The sum of the flags is NaN if a rank has sent NaN, or if the number of steps is odd on some ranks and even on others:
    their weights then differ. This holds for any dtype and number of ranks. If the sum is NaN, the ranks compare in another
    call whether they have reasons, whether their numbers of steps are odd, whether they are in a step, and a checksum of
    the weights. If a hook has changed a parameter on a rank, or the checksums differ, they compare parameters in further
    calls. A rank without shards sends no flag. If there is such a rank, the ranks compare reasons and steps in every
    exchange.

    Attributes:
        flag: a tensor of one number, sent with the last bucket.
        optimizer: the optimizer whose param_groups must not contain parameters with ``requires_grad`` that are not in
            ``hooks.known``; ``None`` for no check.
        allows_copies: True if the param_groups may contain such parameters, as long as backward computes no gradients for
            them. Examples are the float32 copies of float16 parameters that apex makes.
        hooks: the reducer's parameters and their hooks.
        steps: the number of steps that the optimizer has taken on this rank, with the current backend.
        has_idle_ranks: True if some ranks have no shards (parts of the global batch).
        in_step: True while an optimizer's step averages the gradients, because nothing before it has done so.
        ranks_in_step: the ranks on which the last exchange was part of a step, while it was part of backward or
            ``synchronize()`` on this rank. Those ranks use the averages unchanged, so this rank must not change them either
            (``step_check.py``). Empty with gradients on a GPU, unless the CPU waits for the exchange or some ranks have no
            shards.
        dropped: True after :meth:`drop_gradients`, until the program calls ``zero_grad`` or a parameter has a gradient.
        changed: the parameters that hooks of the program have changed in backward.
        drift: the comparison of the parameters after some steps.
        sent_dropped: True during an optimizer step that ends an exchange of which a part was sent before the program called
            ``zero_grad``.
    """

    def __init__(self, hooks: ParameterHooks) -> None:
        self.steps = 0
        self.dropped = self.sent_dropped = False
        self._drop_cause = ""  # why ``dropped`` is true, for the error's message
        self.optimizer: torch.optim.Optimizer | None = None
        self.allows_copies = self.has_idle_ranks = self.in_step = False
        self.ranks_in_step: list[int] = []
        self.hooks = hooks
        self.changed, self.drift = ChangedParameters(), Drift()
        self._forms = Forms([])
        #: The optimizer's parameters, by group, at the last check that found only known parameters and copies.
        self._in_groups: list[list[torch.Tensor]] = []
        #: Parameters that are not in ``hooks.known``, by id. They had no nonzero gradient when they were found in a group.
        self._copies: dict[int, torch.Tensor] = {}
        self._trained_copies: set[int] = set()  # ids of the copies for which backward has computed a gradient since then
        #: (module id, key) → attribute with a new parameter or module, and the name of a replaced parameter.
        self._replaced: dict[tuple[int, str], tuple[ModuleAttribute, str]] = {}
        self.flag = torch.zeros(1, device="cpu")
        self._late: LateFlag | None = None
        #: The ranks' states in this round, kept once the ranks have compared them. After an interrupt such as Ctrl-C, a
        #: rank calls ``flagged`` again, but the other ranks may have ended the round, and then do not compare again.
        self._states: list[int] | None = None

    def record_parameters(self, named: Named) -> None:
        """Record the ``named`` parameters, whose dtypes, devices and shapes must not change from now on."""
        self._forms, self._late = Forms(named), None

    def record_replacement(self, attribute: ModuleAttribute, name: str) -> None:
        """Record that parameter ``name``, or a module that has it, was replaced in ``attribute``."""
        self._replaced[id(attribute.owner()), attribute.key] = attribute, name

    def reason(self, buckets: Sequence[Bucket]) -> str | None:
        """Return the reason why this rank must refuse the exchange; ``None`` if it has none."""
        refused = (bucket.refused.reason() for bucket in buckets)
        found = self._forms.difference() or next(filter(None, refused), None)
        found = found or self._unknown_reason() or self._unaveraged_reason() or self._lost_reason()
        return found or self._dropped_reason() or self.changed.reason or self.drift.reason

    def drop_gradients(self, cause: str = "when their exchange failed") -> None:
        """Set all gradients to ``None``, because some may be sums, and others this rank's own gradients.

        Further exchanges are refused until the program calls ``zero_grad`` or a parameter has a gradient. Their error
        contains ``cause``.
        """
        for slot in self.hooks.slots:
            slot.param.grad = None
        self.dropped, self.sent_dropped, self._drop_cause = bool(self.hooks.slots), False, cause

    def _unaveraged_reason(self) -> str | None:
        # Attributes are checked here, and not in ``record_replacement``: the program may call add_param_group later.
        for key, (attribute, name) in list(self._replaced.items()):
            found = attribute.unaveraged(self.hooks.known)
            if found is None:
                if not attribute.is_empty:
                    del self._replaced[key]
            elif found == ("parameter", True):
                return (
                    f"parameter {name!r} was replaced in its module by a new one (load_state_dict(assign=True), or an "
                    f"assignment), which the optimizer does not have: {_AFTER_REPLACEMENT}"
                )
            elif found[1]:
                return (
                    f"the module of parameter {name!r} was replaced by one with parameters that the optimizer does not "
                    f"have: {_AFTER_REPLACEMENT}"
                )
        return None

    def _dropped_reason(self) -> str | None:
        if self.dropped:
            self.dropped = all(slot.param.grad is None for slot in self.hooks.slots)
        if not self.dropped:
            return SENT_DROPPED if self.sent_dropped else None
        return f"the gradients were dropped {self._drop_cause}: call optimizer.zero_grad(), and run backward again"

    def _lost_reason(self) -> str | None:
        lost = self.hooks.lost()
        if lost is None:
            return None
        return (
            f"the gradient of {lost.name!r} was not averaged in backward, since the hooks of its parameter were dropped "
            "(by torch.utils.swap_tensors, or by to() or load_state_dict() after "
            "torch.__future__.set_swap_module_params_on_conversion(True)): call optimizer.zero_grad() after the change and "
            "before the next backward"
        )

    def _unknown_reason(self) -> str | None:
        if self.optimizer is None:
            return None
        groups = self.optimizer.param_groups
        in_groups = [group["params"] for group in groups]
        # This runs twice in every step, so the comparison runs in C. It uses ``is``: == would compare tensors' values.
        same_lengths = list(map(len, in_groups)) == list(map(len, self._in_groups))
        same = same_lengths and all(map(is_, chain(*in_groups), chain(*self._in_groups)))
        if same and not self._trained_copies:
            return None
        for number, group in enumerate(groups):
            for i, p in enumerate(group["params"]):
                if p.requires_grad and id(p) not in self.hooks.known and not self._is_copy(p):
                    return (
                        f"group {number} parameter {i} {tuple(p.shape)} was added to the optimizer's param_groups after "
                        "the optimizer was wrapped: use add_param_group on every rank"
                    )
        # Skip later checks only if all parameters are known or copies: others that are frozen now may be unfrozen later.
        if (self.hooks.known | self._copies.keys()).issuperset(map(id, chain(*in_groups))):
            self._in_groups = [list(params) for params in in_groups]
        return None

    def _is_copy(self, p: torch.Tensor) -> bool:
        """Return whether ``p``, which is not in ``hooks.known``, is allowed: backward has computed no gradient for it."""
        if not self.allows_copies:
            return False
        if id(p) not in self._copies:
            if not p.is_leaf or has_values(p.grad):
                return False
            trained, key = self._trained_copies, id(p)
            p.register_post_accumulate_grad_hook(lambda _: trained.add(key))
            self._copies[key] = p
        return id(p) not in self._trained_copies

    def check_groups(self, backend: Backend) -> None:
        """Raise BackendError, on this rank, if backward does not average the gradient of a parameter in the optimizer."""
        reason = self._lost_reason() or self._unknown_reason()
        if reason is not None:
            raise BackendError(f"rank {backend.job_rank}: {reason}")

    # -- over all ranks -------------------------------------------------------------------------------------------

    def set_flag(self, buckets: Sequence[Bucket], cpu_waits: bool) -> None:
        """Set the flag that is about to be sent; for ``cpu_waits``, see :meth:`flagged`."""
        self.changed.reason = self.drift.reason = None
        compares = (self.flag.is_cpu or cpu_waits) and (
            self.in_step or self.drift.checksum is not None or self.changed.has_changes()
        )
        nan = compares or self.reason(buckets) is not None
        self.flag.fill_(math.nan if nan else math.inf if self.steps % 2 else -math.inf)
        self._states = None

    def clear_flag(self) -> None:
        """Set the flag to 0, for a shard that is not this rank's last in a step. :meth:`set_flag` is for the last shard."""
        self.flag.zero_()

    def flagged(self, backend: Backend, buckets: Sequence[Bucket], cpu_waits: bool) -> bool:
        """Return, on every rank, whether the ranks must refuse the exchange that has ended. Also sets ``ranks_in_step``.

        They must if a rank has a reason, or if their number of steps is odd on some ranks and even on others: see
        :class:`Refusals`. Collective, and blocks, if the sum of the flags is NaN or some ranks have no shards.
        With gradients on a GPU, the CPU reads the flag only if it waits for the exchange anyway. If it does not, and all
        ranks have shards, a refusal raises BackendError instead: at once on the rank that has the reason, one step later
        on the others.
        """
        self.ranks_in_step = []
        if not buckets:
            return False
        if self.has_idle_ranks or self.flag.is_cpu or cpu_waits:
            differ = self.has_idle_ranks or math.isnan(self.flag.item())
            return differ and self._compare(backend, refuses=self.reason(buckets) is not None)
        mine, earlier = self.reason(buckets), self._late is not None and self._late.raised()
        self._late = self._late or LateFlag(self.flag)
        self._late.copy(self.flag)
        if mine is not None:
            raise BackendError(f"rank {backend.job_rank}: {mine}")
        if earlier:
            raise BackendError(
                "another rank cannot average its gradients (its own error says why), or has not taken the same optimizer "
                f"steps: {_SAME_STEPS}"
            )
        return False

    def _compare(self, backend: Backend, *, refuses: bool) -> bool:
        """Compare reasons and steps without the flag; return the result of :meth:`flagged`. Collective; blocks."""
        if self._states is None:
            backend.drain()
            mine = 2 if refuses else self.steps % 2
            mine += 16 * (self.drift.checksum or 0) + 8 * self.changed.has_changes() + 4 * self.in_step
            states = agree(backend, Call("refusals of gradients"), mine)
            if any(state & 8 for state in states):
                self.changed.compare(backend, self.hooks.slots)
            if len({state // 16 for state in states}) > 1 and len({state % 4 for state in states}) == 1:
                self.drift.compare(backend, self.steps)
            self._states = states
        if not self.in_step:
            by_rank = zip(backend.members, self._states, strict=True)
            self.ranks_in_step = [rank for rank, state in by_rank if state & 4 and rank != backend.job_rank]
        outcomes = {state % 4 for state in self._states}
        return 2 in outcomes or len(outcomes) > 1 or bool(self.changed.reason or self.drift.reason)

    def leave_layout(self, backend: Backend, buckets: Sequence[Bucket], sent: int, cpu_waits: bool) -> None:
        """Send zeros in the remaining buckets of the old layout, before this rank makes a new one. Collective; blocks.

        Ranks that keep the layout wait for these buckets. The flag reports that this rank leaves the layout. The first
        ``sent`` buckets were sent already.

        With gradients on a GPU, does nothing if all ranks have shards and the CPU does not wait for the exchange: the other
        ranks then do not compare reasons.

        Raises:
            BackendError: on every rank, if some ranks keep the layout, or if a gradient was replaced by its sum on some
                ranks only. These ranks no longer have their own gradient, so they cannot send it in the new layout.
        """
        if not buckets or not (self.flag.is_cpu or cpu_waits or self.has_idle_ranks):
            return
        replaced = [slot.name for bucket in buckets[:sent] for slot in bucket.memory.slots_inside()]
        for bucket in buckets[sent:]:
            bucket.clear()
        self.flag.fill_(math.nan)
        self._states = None
        backend.drain()
        for bucket in buckets[sent:]:
            bucket.start()
        for bucket in buckets:
            bucket.finish()
        self._compare(backend, refuses=True)
        states = self._exchange_reasons(backend, _NEW_LAYOUT)
        if not all(reason == _NEW_LAYOUT for reason, _ in states):
            _raise_first(states, backend.members)
        of_ranks = backend.allgather_object(replaced, name="gradients that were replaced by sums")
        for rank, names in zip(backend.members, of_ranks, strict=True):
            if names != replaced:
                name = next(each for each in (*names, *replaced) if (each in names) != (each in replaced))
                raise BackendError(
                    f"parameters were added or unfrozen during backward, when one of the ranks {rank} and "
                    f"{backend.job_rank} had sent the gradient of {name!r}, and the other had not: add and unfreeze "
                    "parameters between two backward passes"
                )

    def refuse(self, backend: Backend, buckets: Sequence[Bucket]) -> NoReturn:
        """Raise BackendError, on every rank, with the message of :func:`_raise_first`. Collective; blocks."""
        mine = self.reason(buckets)
        for bucket in buckets:
            bucket.refused = RefusedSlots()
        _raise_first(self._exchange_reasons(backend, mine), backend.members)

    def _exchange_reasons(self, backend: Backend, mine: str | None) -> list[tuple[str | None, int]]:
        """Return every rank's reason and number of optimizer steps. Collective; blocks."""
        return backend.allgather_object((mine, self.steps), name="reasons for a refusal")


def _raise_first(states: Sequence[tuple[str | None, int]], members: Sequence[int]) -> NoReturn:
    """Raise BackendError with the reason of the first rank that has one, or else with two ranks' different step counts.

    If there are neither, say that the reason no longer exists. ``members`` are the ranks' numbers in the job.
    """
    for rank, (reason, _) in zip(members, states, strict=True):
        if reason is not None:
            raise BackendError(f"rank {rank}: {reason}")
    first = states[0][1]
    for rank, (_, steps) in zip(members, states, strict=True):
        if steps != first:
            raise BackendError(
                f"rank {members[0]} has taken {first} steps of an optimizer, and rank {rank} has taken {steps}: their "
                "weights differ; " + _SAME_STEPS
            )
    raise BackendError("a rank could not average its gradients, for a reason that no longer exists")
