"""Values of options that are written as text: ``--optimizer-options nesterov=true,eps=1e-8``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "none": None}
_WORDS |= {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS |= {".nan": math.nan, ".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}


def split_options(text: str | None) -> list[tuple[str, str | None]]:
    """Split ``name=value,…`` into names and values, both as text. The value is ``None`` where there is no ``=``."""
    parts = [part.strip().partition("=") for part in text.split(",")] if text else []
    return [(name, value if sign else None) for name, sign, value in parts]


def option_value(text: str) -> Any:
    """Return the value that ``text`` represents.

    The first of these formats that fits is used: JSON; true, false, none, infinity and NaN as Python and YAML write them;
    a Python integer or float; numbers joined by colons, as a tuple (``0.9:0.999``); text in single quotes. Other text
    stays text.
    """
    text = text.strip()
    readers: tuple[Callable[[str], Any], ...] = (json.loads, _word, _integer, float, _numbers, _quoted)
    for read in readers:
        with suppress(ValueError, KeyError, RecursionError):  # RecursionError: JSON that is nested thousands of levels deep
            return read(text)
    return text


def _word(text: str) -> Any:
    return _WORDS[text.lower()]


def _integer(text: str) -> int:
    return int(text, base=0)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(":"))


def _quoted(text: str) -> str:
    if len(text) < 2 or not text.startswith("'") or not text.endswith("'"):
        raise ValueError("not in single quotes")
    return text[1:-1]
