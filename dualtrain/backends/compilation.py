"""Mark functions that ``torch.compile`` must not compile: they communicate, and read state that changes in every step."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Make a compiled program run ``function``, and all functions that it calls, without compiling them.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes seconds, and makes each call slower.
    """
    # The names of both attributes are private in torch 2.5 to 2.15.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "dualtrain communicates here"  # type: ignore[attr-defined]
    code: CodeType = function.__code__
    # Private in torch 2.5 to 2.15. Versions without ``set_code_exec_strategy`` compile parts of the function.
    engine = torch._C._dynamo.eval_frame
    if hasattr(engine, "set_code_exec_strategy"):
        skip = engine._FrameAction.SKIP
        engine.set_code_exec_strategy(code, engine._FrameExecStrategy(skip, skip))
    return function
