"""Serialize Python objects, and deserialize them without running code from the bytes.

The encoding is torch's file format, read in weights-only mode. Objects may consist of None, bool, numbers, str, bytes,
list, tuple, set, dict and tensors, and of the other classes in ``_PLAIN``: numpy's arrays and scalars, dates, paths and so
on. The sender refuses other classes, unless the user has passed them to ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import threading
import types
import uuid
from typing import Any

import numpy
import torch

from dualtrain.backends.dtensor import is_dtensor
from dualtrain.errors import lacks_memory, one_line


def _numpy_globals() -> list[Any]:
    """Return what pickled arrays and scalars refer to: numpy's own constructors, and the classes of its dtypes."""
    rebuild_array, rebuild_scalar = numpy.zeros(1).__reduce__()[0], numpy.float32(0).__reduce__()[0]
    kinds = {type(numpy.dtype(code)) for code in (*numpy.typecodes["All"], "V")}
    return [numpy.ndarray, numpy.dtype, rebuild_array, rebuild_scalar, *kinds]


def _with_default(factory: Any, items: dict[Any, Any]) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(factory, items)


class _Pickler(pickle.Pickler):
    """Pickler whose output can be read in weights-only mode.

    It writes defaultdict and deque as calls of constructors, since weights-only mode cannot add items to them. If a tensor
    uses only a part of its storage, and the user has set no attributes on it, it is copied, since torch would write the
    whole storage.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is collections.defaultdict:
            return _with_default, (obj.default_factory, dict(obj))
        if type(obj) is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if isinstance(obj, torch.Tensor) and is_dtensor(obj):  # a receiver would use this rank's shard as its own
            raise TypeError("it contains a DTensor, of which each rank has another shard: use to_local() or full_tensor()")
        if type(obj) is torch.Tensor and _uses_a_part(obj):
            return obj.detach().clone().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _uses_a_part(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or vars(tensor):  # a copy would lack attributes that the user has set
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
_PLAIN = [
    _with_default,
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, argparse.Namespace, types.SimpleNamespace),
    *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
    *_numpy_globals(),
]

#: First bytes of the message that is sent instead of an object that cannot be sent. Encoded objects start with "PK".
_REFUSED = b"refused: "

_reading = threading.Lock()  # torch's list of allowed classes is shared by all threads


def encode(obj: Any) -> torch.Tensor:
    """Serialize ``obj`` into a CPU uint8 tensor (n,).

    Raises:
        TypeError: ``obj`` contains an object of a class that is not allowed (see the top of this file), or that cannot be
            serialized; or there is not enough memory.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer, pickle_module=_PICKLE)
        data = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        decode(data)
    except Exception as error:  # pickle and the weights-only reader raise many types
        cure = "send numbers, text, bytes, dates, paths, tensors, numpy arrays, and lists, tuples, sets or dicts of them"
        if lacks_memory(error):
            cure = "there is not enough memory for a copy of it"
        raise TypeError(
            f"an object of type {type(obj).__name__} cannot be sent to other ranks ({_reason(error)}): {cure}"
        ) from error
    return data


def _reason(error: Exception) -> str:
    """Return the part of a message that says what cannot be sent, without torch's advice on loading files."""
    text = one_line(error)
    if isinstance(error, pickle.UnpicklingError):
        text = text.partition("WeightsUnpickler error: ")[2].partition(" Check the documentation")[0] or text
    return text or type(error).__name__


def encode_or_refuse(obj: Any) -> tuple[torch.Tensor, TypeError | None]:
    """Return the encoded ``obj`` and ``None``; if it cannot be sent, return a message to send instead, and the error."""
    try:
        return encode(obj), None
    except TypeError as error:
        return torch.frombuffer(bytearray(_REFUSED + str(error).encode(errors="replace")), dtype=torch.uint8), error


def decode(data: torch.Tensor) -> Any:
    """Deserialize the bytes of :func:`encode`; tensors are on the CPU.

    Raises:
        TypeError: the sender refused the object: see :func:`encode_or_refuse`.
        pickle.UnpicklingError: the user has allowed a class of the object in the sender's process, but not in this one.
    """
    if bytes(data[: len(_REFUSED)].tolist()) == _REFUSED:
        raise TypeError(bytes(data[len(_REFUSED) :].tolist()).decode())
    with _reading:
        # Pass no class that the user has allowed: on exit, ``safe_globals`` removes every class that it was given.
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([one for one in _PLAIN if one not in known]):
            return torch.load(io.BytesIO(bytes(data.cpu().numpy())), map_location="cpu", weights_only=True)
