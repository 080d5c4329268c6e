"""A rank's part in matching calls by name: send requests to rank 0, and execute the calls that rank 0 has matched.

A call becomes a message to rank 0's coordinator. The coordinator's answers arrive in the same order on every rank. One
thread executes the matched calls, on channels that nothing else uses. The caller gets a handle, for poll() and
synchronize(). Gradients of optimizers have separate channels (``channel_reducer.py``).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.errors import BackendError, PeerFailure
from dualtrain.horovod_variables import Settings, log
from dualtrain.hvd.channels import Channels, Exchanger, Reducers
from dualtrain.hvd.control import control
from dualtrain.hvd.coordinator import ENDED
from dualtrain.hvd.disagreement import Message
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.execution import Executor
from dualtrain.hvd.pending import SLICE_SECONDS, Pending, slice_seconds
from dualtrain.hvd.timeline import Timeline
from dualtrain.processes import start_thread

_LEAVING_SECONDS = 10.0
_PROGRESS_SECONDS = 1.0  # after this wait, ask the other ranks' engines to advance operations in shared memory
_CHECKS: float = 20  # stop advancing operations in shared memory if none ends in this many consecutive checks


class Engine:
    """Matches calls by name over the ranks of a backend. While the engine exists, nothing else may use the backend.

    Making an engine is collective.

    Args:
        backend: the world.
        settings: the settings in Horovod's environment variables.
        address: rank 0's address on the interface through which the ranks reach it.
        reducers: the reducers of this process's optimizers.
    """

    def __init__(self, backend: Backend, settings: Settings, address: str, reducers: Reducers) -> None:
        self.backend = backend
        self.reducers = reducers
        reducers.enter_world()
        self.settings = settings
        self.timeline = Timeline()
        self.down: str | None = None  # why the world has ended
        self._unexplained = False  # True while ``down`` says only that a rank has ended: its error may still arrive
        self.channels = Channels(backend)
        self._executor = Executor(backend, self.channels, self.timeline)
        self.joined_ranks: list[int] = []  # ranks that have called join()
        #: Operation → the time at which this rank last reported to rank 0 that it waits for the operation.
        self._reported_waits: dict[str, float] = {}
        #: Operation → the time at which rank 0 last asked for a report by each rank that waits for the operation.
        self._requested_reports: dict[str, float] = {}
        self._requested_progress = 0.0  # the time at which this rank last requested progress from the other ranks
        self._zeros_requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the join has ended or failed
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}
        self._named: set[tuple[int, str, str]] = set()
        self._several_threads = False  # whether the program has made calls outside of the main thread
        if settings.timeline is not None and backend.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)
        try:
            self._control = control(backend, address, settings, self._note, self.timeline.cycle)
        except BaseException:
            self.timeline.stop()
            raise
        if backend.watch is not None:
            backend.watch.add_callback(self._on_peer_failure)
        backend.on_wait = self.while_waiting
        self._worker = start_thread(self._work, "dualtrain-hvd")

    # -- calls ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        kind: str,
        name: str | None = None,
        set_id: int = 0,
        tensors: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
        on_open: Callable[[Any, Any], None] | None = None,
        **entries: Any,
    ) -> Pending:
        """Request a call; do not block. But if a rank has failed, this may wait up to 0.5 s for the report on its error.

        ``entries`` are further entries of the request. For ``on_open``, see :class:`Pending`.

        Raises:
            ValueError: this rank has an unfinished call of the same kind, name and process set, or ``name`` is neither
                a string nor ``None``.
            HorovodInternalError: the world has ended, or this process was forked from a rank.
        """
        check_name(name)
        self.check_process()
        # Don't count autograd's threads (dummy threads for ``threading``): the main thread waits while they run backward.
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
            self._several_threads = True
        tensors = [tensor.detach() for tensor in tensors or []]
        metas = [[str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type] for t in tensors]
        name = name or None  # as on Horovod, a call with an empty name has no name
        message = {"kind": kind, "name": name, "set": set_id, "id": next(self._numbers), "tensors": metas, **entries}
        pending = Pending(
            message, tensors, outputs, on_open=on_open, on_blocked=self._report_blocked, progress=self.channels.progress
        )
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is not None:
            self._executor.gpu = gpu
            pending.events = [torch.cuda.current_stream(gpu).record_event()]
        self._explain()
        with self._lock:
            if self.down is not None:
                raise HorovodInternalError(self.down)
            if name is not None:
                if (set_id, kind, name) in self._named:
                    raise ValueError(
                        f"a tensor named {kind}.{name} is still being processed on rank {self.backend.rank}: "
                        "synchronize its handle first, or use another name"
                    )
                self._named.add((set_id, kind, name))
            self._pending[message["id"]] = pending
        self.send(message)
        return pending

    def check_process(self) -> None:
        """Raise HorovodInternalError if this process was forked from a rank."""
        try:
            self.backend.check_process()
        except BackendError as error:
            raise HorovodInternalError(str(error)) from error

    def join(self, divide_by: str) -> int:
        """Contribute zeros to gradient exchanges until all ranks have joined; return the rank that joined last. Blocks."""
        if self._executor.gpu is None and torch.cuda.is_initialized():
            self._executor.gpu = torch.device("cuda", torch.cuda.current_device())
        while not self._zeros_requests.empty():  # left by a join that an exception such as KeyboardInterrupt has stopped
            self._zeros_requests.get()
        pending = self.submit("join", divide_by=divide_by)
        begun: dict[str, Exchanger] = {}  # channel → the reducer whose exchange this rank takes part in
        while (request := self._next_zeros_request(begun)) is not None:
            channel, number = request["channel"], request["exchange"]
            if self.reducers.done.get(channel, 0) >= number:
                continue  # this rank took part before it joined; a slower rank is still in that step
            exchanger = begun.get(channel) or self.reducers.find(self.reducers.exchangers, channel, request["position"])
            if exchanger is None:
                self._end_unknown(channel)
                continue
            if exchanger.exchanging and exchanger.exchanges < number:
                exchanger.finish_exchange()
            exchanger.adopt(request["added"])
            exchanger.take_part(divide_by)
            begun[channel] = exchanger
        for _, exchanger in sorted(begun.items()) if self.down is None else ():
            exchanger.finish_exchange()
        return int(pending.wait())

    def _next_zeros_request(self, begun: dict[str, Exchanger]) -> Message | None:
        """Wait for a request, and return it; return ``None`` when the join has ended or failed.

        Until then, end the exchanges of ``begun`` whose sums are known, and remove them from ``begun``. The other ranks may
        end the exchanges of several optimizers in any order. So never block in one exchange.
        """
        while True:
            seconds = slice_seconds(self.channels.progress)
            with suppress(queue.Empty):
                return self._zeros_requests.get(timeout=SLICE_SECONDS if begun else seconds)
            for channel in [channel for channel, exchanger in begun.items() if exchanger.can_finish]:
                begun.pop(channel).finish_exchange()

    def send(self, message: Message) -> None:
        """Send a message to the coordinator. If the connection is closed, make all calls on this rank fail."""
        try:
            self._control.send(message)
        except OSError as error:
            self.fail(f"rank {self.backend.rank} has lost its connection to rank 0 ({error})")

    def _report_blocked(self, call: Message) -> None:
        """Report to rank 0 that the main thread waits for ``call``, and so can make no other calls.

        Report nothing if the program makes calls in other threads too.
        """
        if self._several_threads:
            return
        self.send({"kind": "blocked", "call": call["kind"], "name": call["name"], "set": call["set"]})

    def fail(self, why: str) -> None:
        """Make all pending and later calls on this rank fail, with the reason ``why`` or an earlier one."""
        with self._lock:
            self.down = self.down or why
            pending, self._pending = list(self._pending.values()), {}
            self._named.clear()
        for one in pending:
            one.error = HorovodInternalError(self.down)
            one.ended.set()
            if one.message["kind"] == "join":
                self._zeros_requests.put(None)

    def end_world(self, why: str) -> None:
        """Make all pending and later calls fail, on every rank."""
        self.send({"kind": "shutdown", "why": f"rank {self.backend.rank}: {why}"})
        self.fail(why)

    def _end_unknown(self, channel: str) -> None:
        """End the world, because this rank has no optimizer for a channel that other ranks use."""
        self.end_world(
            f"join() was called, but there is no optimizer for the gradients {channel!r} of other ranks: make the same "
            "optimizers on every rank before join()"
        )

    # -- gradients --------------------------------------------------------------------------------------------------

    def open_channel(
        self,
        name: str,
        set_id: int,
        *,
        layout: list[str],
        sparse: list[list[int]],
        buffers: list[int],
        on_open: Callable[[Backend, list[list[int]]], None] | None = None,
    ) -> Pending:
        """Request a backend for the caller's exclusive use, over the ranks of a process set; do not block.

        Collective: every rank of the process set must request the same names, in any order.

        Args:
            name: the channel name, "/", and the number of its gradients.
            set_id: the process set.
            layout: descriptions of what will be sent, the same on every rank.
            sparse: this rank's sparse gradients, as pairs of a parameter's index and the number of sparse dimensions.
            buffers: sizes in bytes of the CPU buffers that the caller will make.
            on_open: called with the two items of the result in the engine's thread, before the call counts as ended.

        Returns:
            A pending call. Its result is a pair: the backend, and the sparse gradients of all ranks.
        """
        entries: dict[str, Any] = {"layout": layout, "sparse": sparse, "buffers": buffers}
        return self.submit("channel", name, set_id, on_open=on_open, transport=self.settings.transport, **entries)

    def announce(self, exchanger: Exchanger) -> None:
        """Request zeros from the ranks that have joined, if any, for the current exchange of ``exchanger``."""
        if self.joined_ranks:
            exchange, channel = exchanger.exchanges, exchanger.channel_name
            exchanger.announced.add(exchange)
            position = self.reducers.exchangers.position(exchanger)
            request = {"channel": channel, "exchange": exchange, "position": position, "added": exchanger.added}
            self.send({"kind": "join_with_zeros", **request, "set": exchanger.set_id})

    def discard(self, channel: str, exchange: int, set_id: int) -> None:
        """Report to all ranks of the process set that this rank discards the result of an exchange of gradients."""
        for exchanges in (self.reducers.unused, self.reducers.discarded):
            exchanges.add((channel, exchange))
        self.send({"kind": "discard", "channel": channel, "exchange": exchange, "set": set_id})

    def require_unused(self, exchange: tuple[str, int]) -> None:
        """End the world if this rank uses the result of an exchange that another rank discards.

        Raises:
            HorovodInternalError: the world was ended.
        """
        if exchange not in self.reducers.unused:
            why = (
                f"rank {self.backend.rank} uses gradients that another rank discarded by load_state_dict() after "
                f"backward: call load_state_dict() on every rank in the same step "
                f"(optimizer with the parameter {exchange[0].rpartition('-')[0]!r})"
            )
            # Do not call end_world(), which would also fail the calls that rank 0 has already matched.
            self.send({"kind": "shutdown", "why": why})
            raise HorovodInternalError(why)

    def while_waiting(self, backend: Backend, what: str, seconds: float) -> None:
        """Report long waits, and waits that rank 0 has asked about, to rank 0; request progress in shared memory.

        Called repeatedly while ``backend`` waits.

        Raises:
            HorovodInternalError: the world has ended.
        """
        if self.down is not None:
            self._explain()
            raise HorovodInternalError(f"{what}: {self.down}")
        now = time.monotonic()
        requested = now - self._requested_reports.get(what, -9) < 9
        long = requested or seconds > (self.settings.stall_check or self.settings.stall_shutdown)
        if long and now - self._reported_waits.get(what, 0) > 1:
            self._reported_waits[what] = now
            self.send({"kind": "waiting", "what": what, "members": list(backend.members), "seconds": seconds})
        if self.channels.share_memory and min(seconds, now - self._requested_progress) > _PROGRESS_SECONDS:
            self._requested_progress = now
            self.send({"kind": "progress"})

    # -- threads ----------------------------------------------------------------------------------------------------

    def _note(self, event: str, what: str, rank: int) -> None:
        activity = f"NEGOTIATE_{what.partition('.')[0].upper()}"
        if event == "negotiate":
            self.timeline.begin(what, activity)
        elif event == "ready":
            self.timeline.mark(what, rank)
        else:
            self.timeline.end(what, activity)

    def _work(self) -> None:
        """Execute the coordinator's messages, in order, until the world ends. Then fail all remaining calls."""
        try:
            for message in self._control.answers():
                if message["do"] == "down":
                    break
                getattr(self, f"_do_{message['do']}")(message)
        except Exception as error:
            log.exception("rank %d cannot carry out calls any more", self.backend.rank)
            message = {"why": f"rank {self.backend.rank}: {type(error).__name__}: {error}"}
        # A call that is made later waits for the failed rank's report, which may arrive after this message.
        self._unexplained = message["why"].endswith(ENDED) and not self._pending
        self.fail(self._reported(0.5 if self._pending else 0.0) or message["why"])
        if self.backend.rank != 0:
            self._control.close()  # rank 0 waits until all ranks have closed their ends

    def _explain(self) -> None:
        """If a rank has ended the world without a reason, wait once, for up to 0.5 s, for the report on its error.

        This report becomes the reason in ``down``.
        """
        if self._unexplained:
            self._unexplained = False
            self.down = self._reported(0.5) or self.down

    def failed_peer(self) -> str | None:
        """Return the text of the report on a failed rank, or ``None`` if no rank has failed. May wait up to 0.5 s."""
        return self._reported(0.5 if self.down is not None else 0.0)

    def _reported(self, seconds: float) -> str | None:
        """Wait up to ``seconds`` for the watch's report on a failed rank; return its text, or ``None`` if there is none."""
        watch = self.backend.watch
        if watch is None:
            return None
        watch.wait_for_report(seconds)
        return None if watch.failure is None or watch.failure.quiet else watch.failure.describe()

    def _do_run(self, message: Message) -> None:
        pending = self._pending.get(message["id"]) if message["id"] is not None else None
        if message["id"] is not None and pending is None:
            return  # fail() has ended all calls
        try:
            result = self._executor.run(message, pending)
        except Exception as error:  # the other ranks may be blocked in this call: end the world
            log.debug("a matched call failed", exc_info=True)
            why = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
            self.end_world(why)
            return
        if pending is not None:
            self._end(message["id"], result)
        elif "added" in message:  # a call of an optimizer, made by the ranks that have not joined
            channel = message["name"].removeprefix("gradients.")
            if not self.reducers.skip(channel, message["position"], message["added"]):
                self._end_unknown(channel)

    def _end(self, number: int, result: Any = None, error: HorovodInternalError | None = None) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
            if pending is None:
                return
            message = pending.message
            if message["name"] is not None:
                self._named.discard((message["set"], message["kind"], message["name"]))
        pending.result, pending.error = result, error
        pending.ended.set()

    def _do_fail(self, message: Message) -> None:
        self._end(message["id"], error=HorovodInternalError(message["why"]))

    def _do_join_ended(self, message: Message) -> None:
        self.joined_ranks = []
        self._end(message["id"], message["last"])
        self._zeros_requests.put(None)

    def _do_joined_ranks(self, message: Message) -> None:
        self.joined_ranks = message["ranks"]
        if self.backend.rank not in self.joined_ranks:
            for exchanger in self.reducers.exchangers.alive():
                if exchanger.needs_zeros:
                    self.announce(exchanger)

    def _do_join_with_zeros(self, message: Message) -> None:
        self._zeros_requests.put(message)

    def _do_discard(self, message: Message) -> None:
        exchange = message["channel"], message["exchange"]
        self.reducers.discarded.add(exchange)
        if self.reducers.done.get(exchange[0], 0) >= exchange[1]:
            with suppress(HorovodInternalError):  # the script's next call raises it
                self.require_unused(exchange)

    def _do_report_wait(self, message: Message) -> None:
        self._requested_reports[message["what"]] = time.monotonic()

    def _do_progress(self, message: Message) -> None:
        """Advance operations in shared memory that another rank waits for, even if this rank's main thread is busy.

        An operation can end only after the waiting rank has done its own part of it. So check repeatedly, until no
        operation is left or none has ended in ``_CHECKS`` consecutive checks.
        """
        left, checks = self.channels.progress(), _CHECKS
        while left and checks > 0:
            time.sleep(SLICE_SECONDS)
            before, left = left, self.channels.progress()
            checks = _CHECKS if left < before else checks - 1

    def _do_report(self, message: Message) -> None:
        log.warning("%s", message["text"])

    def _on_peer_failure(self, failure: PeerFailure) -> None:
        self.fail(failure.describe())

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the world on every rank: finish matched calls, and fail all other calls. Blocks for up to 15 s."""
        self.send({"kind": "shutdown"})
        self._worker.join(_LEAVING_SECONDS)
        self.fail("Horovod was shut down on this rank")
        self._control.close()
        self.timeline.stop()
        self.backend.on_wait = None
        if self.backend.watch is not None:
            self.backend.watch.remove_callback(self._on_peer_failure)
        self.channels.close()


def check_name(name: object) -> None:
    """Raise ValueError if ``name`` is neither a string nor ``None``."""
    if not isinstance(name, str | None):
        raise ValueError(f"name={name!r} is not a string: pass a string, and pass op or process_set by keyword")
