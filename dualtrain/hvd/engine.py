"""One rank's part in matching calls by name: what is asked of rank 0, and what is done when it answers.

A call becomes a message to rank 0's coordinator. Its answers come in one order on every rank, and one thread here
carries them out in that order on channels that nothing else uses. The caller holds a handle meanwhile; poll() looks
at it, synchronize() waits for it. Gradients never come this way: they have channels of their own (``optimizer.py``).
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dualtrain.backends import Backend
from dualtrain.errors import BackendError, PeerFailure
from dualtrain.hvd.control import control
from dualtrain.hvd.coordinator import Message
from dualtrain.hvd.exceptions import HorovodInternalError
from dualtrain.hvd.operations import RUN, Task
from dualtrain.hvd.process_sets import ProcessSet
from dualtrain.hvd.reductions import Sum, stand_in
from dualtrain.hvd.settings import Settings, log
from dualtrain.hvd.timeline import Timeline

_LEAVING_SECONDS = 10.0
_MANY_CHANNELS = 16


class Exchanger(Protocol):
    """A reducer that sends gradients without asking rank 0, and so must be informed when a rank has joined."""

    base_name: str
    channel_name: str
    process_set: ProcessSet
    exchanges: int
    exchanging: bool
    announced: set[int]

    def join_with_zeros(self, divide_by: str) -> None:
        """Take part in one exchange with zeros."""


@dataclass
class Pending:
    """A call that this rank has made: what it needs, and what became of it."""

    message: Message
    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    then: Callable[[Any, Any], None] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    facts: Message = field(default_factory=dict)  # what all ranks agreed on
    result: Any = None
    error: HorovodInternalError | None = None
    streams: list[Any] = field(default_factory=list)  # GPU events: inputs are ready, then results are

    def wait(self) -> Any:
        """Blocks until the result can be used on the current stream. Raises HorovodInternalError."""
        self.ended.wait()
        if self.error is not None:
            # A new one each time: it may be raised in several places.
            raise HorovodInternalError(*self.error.args) from self.error
        for event in self.streams:
            torch.cuda.current_stream().wait_event(event)
        return self.result


class Engine:
    """Matches calls by name over the ranks of a backend, which is the engine's alone from now on. Collective.

    Args:
        backend: the world.
        settings: what the environment asks for.
        address: rank 0's address on the interface that the ranks reach it by.
    """

    def __init__(self, backend: Backend, settings: Settings, address: str) -> None:
        self.backend = backend
        self.settings = settings
        self.timeline = Timeline()
        #: The GPU that the script has chosen, as its tensors say.
        self._gpu: torch.device | None = backend.device if backend.device.type == "cuda" else None
        self.down: str | None = None  # why nothing is done any more
        self.channels: dict[int | str, Backend] = {0: backend}
        self._opened: dict[str, list[list[int]]] = {}  # channels for gradients, and which of those are sparse
        self.absent: list[int] = []  # ranks that have joined
        self._released: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._claims: Counter[str] = Counter()
        self._exchangers: list[weakref.ref[Exchanger]] = []  # in the order of their making
        self._told: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._zeros_requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: no more
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}
        self._named: set[tuple[int, str, str]] = set()
        if settings.timeline is not None and backend.rank == 0:
            self.timeline.start(settings.timeline, settings.mark_cycles)
        self._control = control(backend, address, settings, self._note, self.timeline.cycle)
        if backend.watch is not None:
            backend.watch.on_peer_failure = self._on_peer_failure
        backend.on_wait = self.while_waiting
        self._worker = threading.Thread(target=self._work, name="dualtrain-hvd", daemon=True)
        self._worker.start()

    # -- what a caller does -----------------------------------------------------------------------------------------

    def submit(
        self,
        kind: str,
        name: str | None = None,
        set_id: int = 0,
        tensors: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
        then: Callable[[Any, Any], None] | None = None,
        **facts: Any,
    ) -> Pending:
        """Asks for a call; does not block.

        Raises:
            ValueError: a call of this kind and name of this rank is still under way.
            HorovodInternalError: the world has ended.
        """
        tensors = [tensor.detach() for tensor in tensors or []]
        metas = [[str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type] for t in tensors]
        message = {"kind": kind, "name": name, "set": set_id, "id": next(self._numbers), "tensors": metas, **facts}
        pending = Pending(message, tensors, outputs, then=then)
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is not None:
            self._gpu = gpu
            pending.streams = [torch.cuda.current_stream(gpu).record_event()]
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

    def join(self, divide_by: str) -> int:
        """Blocks until every rank has joined, taking part in the others' exchanges of gradients meanwhile."""
        if self._gpu is None and torch.cuda.is_initialized():
            self._gpu = torch.device("cuda", torch.cuda.current_device())
        pending = self.submit("join", divide_by=divide_by)
        while (request := self._zeros_requests.get()) is not None:
            exchanger = self._exchanger(request["channel"])
            if exchanger is not None and exchanger.exchanges < request["exchange"]:
                exchanger.join_with_zeros(divide_by)
        return int(pending.wait())

    def send(self, message: Message) -> None:
        """Brings a message to the coordinator."""
        try:
            self._control.send(message)
        except OSError as error:
            self.fail(f"rank {self.backend.rank} has lost its connection to rank 0 ({error})")

    def fail(self, why: str) -> None:
        """Ends every call under way, and every later one, with ``why``."""
        with self._lock:
            self.down = self.down or why
            pending, self._pending = list(self._pending.values()), {}
            self._named.clear()
        for one in pending:
            one.error = HorovodInternalError(self.down)
            one.ended.set()
            if one.message["kind"] == "join":
                self._zeros_requests.put(None)

    # -- gradients --------------------------------------------------------------------------------------------------

    def open_channel(
        self,
        name: str,
        set_id: int,
        *,
        layout: list[str],
        sparse: list[list[int]],
        then: Callable[[Backend, list[list[int]]], None] | None = None,
    ) -> Pending:
        """Asks for a backend over the ranks of a process set for the use of one caller. Collective by name; does not block.

        Args:
            name: of the channel.
            set_id: the process set.
            layout: what will travel, which must be the same on every rank.
            sparse: what this rank knows of sparse gradients, as pairs of a number and sparse dimensions.
            then: called with the result in the engine's thread, before the call counts as ended.

        Returns:
            A call whose result is the backend, and what all ranks together know of sparse gradients.
        """
        if name in self._opened:  # made while this rank had joined
            pending = Pending({}, result=(self.channels[name], self._opened[name]))
            pending.ended.set()
            return pending
        return self.submit("channel", name, set_id, then=then, layout=layout, sparse=sparse)

    def release_with(self, owner: object, name: str) -> None:
        """Gives a channel up when ``owner`` is gone."""
        # Only noted there: the collector may run in any thread, at any moment.
        weakref.finalize(owner, self._released.put, name)

    def claim(self, base_name: str) -> int:
        """A number for one of several of the same name: how many of them have begun in this world."""
        self._claims[base_name] += 1
        return self._claims[base_name]

    def register(self, exchanger: Exchanger) -> None:
        """Has ``exchanger`` told when a rank has joined; it is not kept alive."""
        self._exchangers = [ref for ref in self._exchangers if ref() is not None]
        self._exchangers.append(weakref.ref(exchanger))

    def _exchanger(self, channel_name: str) -> Exchanger | None:
        """The one of this name, or the first that may become it: it has not exchanged anything yet."""
        alive = [one for ref in self._exchangers if (one := ref()) is not None]
        base = channel_name.rpartition(".")[0]
        known = [one for one in alive if one.channel_name == channel_name]
        return next(iter(known + [one for one in alive if not one.channel_name and one.base_name == base]), None)

    def announce(self, exchanger: Exchanger) -> None:
        """Asks those who joined, if there are any, to take part in the exchange that starts, and notes that in it."""
        if self.absent:
            exchange, number = exchanger.exchanges, exchanger.process_set.process_set_id or 0
            exchanger.announced.add(exchange)
            self.send({"kind": "join_with_zeros", "channel": exchanger.channel_name, "exchange": exchange, "set": number})

    def while_waiting(self, backend: Backend, what: str, seconds: float) -> None:
        """Called now and then while ``backend`` waits: raises where the world has ended, tells rank 0 of long waits."""
        if self.down is not None:
            raise HorovodInternalError(f"{what}: {self.down}")
        now = time.monotonic()
        long = seconds > (self.settings.stall_check or self.settings.stall_shutdown) or now - self._asked.get(what, -9) < 9
        if long and now - self._told.get(what, 0) > 1:
            self._told[what] = now
            self.send({"kind": "waiting", "what": what, "members": list(backend.members), "seconds": seconds})

    # -- threads ----------------------------------------------------------------------------------------------------

    def _note(self, event: str, what: str, rank: int) -> None:
        activity = f"NEGOTIATE_{what.partition('.')[0].upper()}"
        if event == "negotiate":
            self.timeline.begin(what, activity)
        elif event == "ready":
            self.timeline.mark(what, str(rank))
        else:
            self.timeline.end(what, activity)

    def _work(self) -> None:
        """Does what the coordinator says, in its order."""
        try:
            for message in self._control.answers():
                if message["do"] == "down":
                    break
                getattr(self, f"_do_{message['do']}")(message)
        except Exception as error:
            log.exception("rank %d cannot carry out calls any more", self.backend.rank)
            message = {"why": f"rank {self.backend.rank}: {type(error).__name__}: {error}"}
        watch = self.backend.watch
        if watch is not None and self._pending:
            watch.wait_for_report(0.5)  # the reason of a failed rank arrives there
        failure = watch.failure if watch is not None else None
        self.fail(message["why"] if failure is None or failure.quiet else failure.describe())
        if self.backend.rank != 0:
            self._control.close()  # rank 0 waits for this before it ends

    def _do_run(self, message: Message) -> None:
        pending = self._pending.get(message["id"]) if message["id"] is not None else None
        if message["id"] is not None and pending is None:
            return  # everything has failed meanwhile
        try:
            with self._on_gpu(message):
                result = self._run(message, pending)
        except Exception as error:  # whatever it was, the other ranks may wait in it: nothing can be relied on
            log.debug("a matched call failed", exc_info=True)
            why = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
            self.send({"kind": "shutdown", "why": f"rank {self.backend.rank}: {why}"})
            self.fail(why)
            return
        if pending is not None:
            self._end(message["id"], result)

    def _run(self, message: Message, pending: Pending | None) -> Any:
        kind = message["kind"]
        if kind == "channel":
            self._close_released()
            channel = self.backend.group(message["members"])
            if channel is None:
                return None
            self.channels[message["name"]], self._opened[message["name"]] = channel, message["sparse"]
            if pending is not None and pending.then is not None:
                pending.then(channel, message["sparse"])
            return channel, message["sparse"]
        if kind == "add_process_set":
            group = self.backend.group(message["ranks"])
            if group is not None:
                self.channels[message["new_set"]] = group
            return message["new_set"]
        if kind == "remove_process_set":
            group = self.channels.pop(message["ranks"][0], None)
            if group is not None:
                group.close()
            return True
        return self._travel(message, pending)

    def _close_released(self) -> None:
        """Closes the channels of optimizers that are gone: each has sockets and threads."""
        if len(self._opened) % _MANY_CHANNELS == _MANY_CHANNELS - 1:
            gc.collect()  # an optimizer and its hooks are a cycle
        while not self._released.empty():
            name = self._released.get()
            if self._opened.pop(name, None) is not None:
                self.channels.pop(name).close()

    def _travel(self, message: Message, pending: Pending | None) -> list[torch.Tensor]:
        if pending is None:
            tensors = [
                stand_in(getattr(torch, dtype), shape, self._device(device), message.get("op", Sum))
                for dtype, shape, device in message["tensors"]
            ]
            task = Task({**message, "pre": 1.0}, self.channels[message["set"]], tensors)
        else:
            pending.facts = message
            task = Task(message, self.channels[message["set"]], pending.tensors, pending.outputs)
            for event in pending.streams:
                torch.cuda.current_stream().wait_event(event)
        what, activity = f"{message['kind']}.{message['name'] or 'noname'}", message["kind"].upper()
        self.timeline.begin(what, activity)
        try:
            with torch.no_grad():
                result = RUN[message["kind"]](task)
        finally:
            self.timeline.end(what, activity)
        if pending is not None and pending.streams:
            pending.streams = [torch.cuda.current_stream().record_event()]
        return result

    def _device(self, kind: str) -> torch.device:
        return self._gpu if kind == "cuda" and self._gpu is not None else torch.device(kind)

    def _on_gpu(self, message: Message) -> AbstractContextManager[Any]:
        """Makes the script's GPU the current one, which every thread has of its own, for a call on tensors of a GPU."""
        gpu = any(device == "cuda" for _, _, device in message.get("tensors", ()))
        return torch.cuda.device(self._gpu) if gpu and self._gpu is not None else nullcontext()

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

    def _do_joined(self, message: Message) -> None:
        self.absent = []
        self._end(message["id"], message["last"])
        self._zeros_requests.put(None)

    def _do_absent(self, message: Message) -> None:
        self.absent = message["ranks"]
        if self.backend.rank not in self.absent:
            for exchanger in [ref() for ref in self._exchangers]:
                if exchanger is not None and exchanger.exchanging:
                    self.announce(exchanger)

    def _do_join_with_zeros(self, message: Message) -> None:
        self._zeros_requests.put(message)

    def _do_who(self, message: Message) -> None:
        self._asked[message["what"]] = time.monotonic()

    def _do_report(self, message: Message) -> None:
        log.warning("%s", message["text"])

    def _on_peer_failure(self, failure: PeerFailure) -> None:
        self.fail(failure.describe())

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the world on every rank: calls that were matched are finished, all others fail. Blocks for a while."""
        self.send({"kind": "shutdown"})
        self._worker.join(_LEAVING_SECONDS)
        self.fail("Horovod was shut down on this rank")
        self._control.close()
        self.timeline.stop()
        self.backend.on_wait = None
        for name, channel in self.channels.items():
            if name != 0:
                channel.close()
