"""Keep torch from importing its compiler. Python runs this file at startup if the file's folder is in PYTHONPATH."""

import sys
from types import SimpleNamespace

config = SimpleNamespace()
unused = SimpleNamespace(disable=lambda function, *_, **__: function, graph_break=lambda: None, config=config)
sys.modules |= {"torch._dynamo": unused, "torch._inductor": unused, "torch._inductor.config": config}
