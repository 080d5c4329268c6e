"""Start of programs that train without torch's compiler, whose import takes as long as all other imports."""

from __future__ import annotations

#: Optimizers import torch._dynamo to exclude their functions from compilation, and torch.use_deterministic_algorithms
#: imports torch._inductor to set an option. A program that compiles a model fails after these statements.
NO_COMPILER = """
import sys
from types import SimpleNamespace

config = SimpleNamespace()
unused = SimpleNamespace(disable=lambda function, *_, **__: function, graph_break=lambda: None, config=config)
sys.modules |= {"torch._dynamo": unused, "torch._inductor": unused, "torch._inductor.config": config}
"""
