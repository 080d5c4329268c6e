"""Keep test programs from importing torch's compiler, because this import takes as long as all other imports."""

from __future__ import annotations

from pathlib import Path

#: Programs with this folder in PYTHONPATH import no compiler.
FOLDER = Path(__file__).resolve().parent
#: Optimizers import torch._dynamo to exclude their functions from compilation, and torch.use_deterministic_algorithms
#: imports torch._inductor to set an option. A program that begins with NO_COMPILER replaces both
#: modules, and fails if it compiles a model.
NO_COMPILER = (FOLDER / "sitecustomize.py").read_text()
