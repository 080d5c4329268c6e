"""Attributes that a wrapper inherits from the wrapped optimizer's class, but reads from the wrapped optimizer."""

from __future__ import annotations

from typing import Any

import torch


class _WrappedValue:
    """Descriptor in a wrapper's class. It reads, sets and deletes an attribute of the wrapped optimizer.

    ``default`` is the attribute's value in the wrapped optimizer's class. The optimizer object may have a different value.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, wrapper: Any, cls: type) -> Any:
        return self._default if wrapper is None else getattr(wrapper._wrapped, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper._wrapped, self._name, value)

    def __delete__(self, wrapper: Any) -> None:
        delattr(wrapper._wrapped, self._name)


def values_of(optimizer: torch.optim.Optimizer, base: type) -> dict[str, Any]:
    """Return a ``_WrappedValue`` by name for each attribute of ``optimizer``'s class that must be read from ``optimizer``.

    These are plain values, such as defaults of attributes, and methods that an instance attribute of ``optimizer``
    overrides. All other methods and properties run with the wrapper as ``self``, so that ``self.step()`` in them calls the
    wrapper's ``step``. Names that ``base``, the other base class of the wrapper's class, defines or inherits are left
    out, and so are names that begin with ``__``.
    """
    kind, of_instance = type(optimizer), vars(optimizer)
    attributes = {name: getattr(kind, name) for name in dir(kind) if not (name.startswith("__") or hasattr(base, name))}
    forwarded = {name: value for name, value in attributes.items() if name in of_instance or not hasattr(value, "__get__")}
    return {name: _WrappedValue(name, value) for name, value in forwarded.items()}
