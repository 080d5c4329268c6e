"""Execution of matched calls, in the engine's thread, in the same order on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dualtrain.backends import Backend
from dualtrain.hvd.arithmetic import Sum, identity_element
from dualtrain.hvd.channels import Channels
from dualtrain.hvd.disagreement import Message, line_of
from dualtrain.hvd.operations import RUN, Task
from dualtrain.hvd.pending import Pending
from dualtrain.hvd.timeline import Timeline


class Executor:
    """Executes matched calls.

    Args:
        backend: the backend of all ranks.
        channels: this rank's channels.
        timeline: records the start and end of each call, except calls that open channels or change process sets.

    Attributes:
        gpu: the GPU of the script's tensors; ``None`` while it is not known.
    """

    def __init__(self, backend: Backend, channels: Channels, timeline: Timeline) -> None:
        self._backend, self._channels, self._timeline = backend, channels, timeline
        self.gpu: torch.device | None = backend.device if backend.device.type == "cuda" else None

    def run(self, message: Message, pending: Pending | None) -> Any:
        """Execute the call of ``message``, and return its result.

        ``pending`` is ``None`` if this rank did not make the call: it has joined, or is outside the process set.
        """
        with self._on_gpu(message):
            return self._dispatch(message, pending)

    def _dispatch(self, message: Message, pending: Pending | None) -> Any:
        kind = message["kind"]
        if kind == "channel":
            return self._open_channel(message, pending)
        if kind == "add_process_set":
            group = self._backend.group(message["ranks"])
            if group is not None:
                self._channels.sets[message["new_set"]] = group
            return message["new_set"]
        if kind == "remove_process_set":
            [number] = message["ranks"]  # in this kind of call, the number of the process set
            group = self._channels.sets.pop(number, None)
            if group is not None:
                group.close()
            return True
        return self._communicate(message, pending)

    def _open_channel(self, message: Message, pending: Pending | None) -> tuple[Backend, list[list[int]]] | None:
        # This rank has the channel already if the other ranks opened it while this rank waited in ``join``.
        if message["name"] not in self._channels.gradients:
            self._channels.close_released()
            channel = self._backend.group(message["members"])
            if channel is None:
                return None
            channel = self._channels.with_shared_memory(channel, message["transport"], message["buffers"])
            self._channels.gradients[message["name"]] = channel, message["sparse"]
        opened = self._channels.gradients[message["name"]]
        if pending is not None and pending.on_open is not None:
            pending.on_open(*opened)
        return opened

    def _communicate(self, message: Message, pending: Pending | None) -> list[torch.Tensor]:
        if pending is None:
            tensors = [
                identity_element(getattr(torch, dtype), shape, self._device(device), message.get("op", Sum))
                for dtype, shape, device in message["tensors"]
            ]
            task = Task({**message, "pre": 1.0}, self._channels.sets[message["set"]], tensors)
        else:
            pending.facts = message
            task = Task(message, self._channels.sets[message["set"]], pending.tensors, pending.outputs)
            for event in pending.events:
                torch.cuda.current_stream().wait_event(event)
        what = line_of((message["set"], message["kind"], message["name"] or None))
        activity = message["kind"].upper()
        self._timeline.begin(what, activity)
        try:
            with torch.no_grad():
                result = RUN[message["kind"]](task)
        finally:
            self._timeline.end(what, activity)
        if pending is not None and pending.events:
            pending.events = [torch.cuda.current_stream().record_event()]
        return result

    def _device(self, device_type: str) -> torch.device:
        return self.gpu if device_type == "cuda" and self.gpu is not None else torch.device(device_type)

    def _on_gpu(self, message: Message) -> AbstractContextManager[Any]:
        """For a call with GPU tensors, make the script's GPU this thread's current device."""
        gpu = any(device == "cuda" for _, _, device in message.get("tensors", ()))
        return torch.cuda.device(self.gpu) if gpu and self.gpu is not None else nullcontext()
