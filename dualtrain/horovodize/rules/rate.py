"""The rule on learning rates that are scaled by the number of ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from dualtrain.horovodize.source import Finding, Source, keyword

_SIZES = ("size", "local_size", "cross_size")


def rate_times_size(source: Source) -> Iterator[Finding]:
    """A learning rate that grows with the number of ranks."""
    sizes = _Sizes(source)
    for value in _rates(source):
        if sizes.grows(value):
            message = (
                "the learning rate is multiplied by the number of ranks, here as on Horovod; that suits averaged gradients "
                "with a warm-up, but the training then depends on the number of ranks"
            )
            yield Finding(value.lineno, "trap", message)


def _rates(source: Source) -> Iterator[ast.expr]:
    """Yield all expressions that are used as a learning rate."""
    for call in source.calls:
        rate = keyword(call, "lr")
        if rate is None and source.name(call.func).startswith("torch.optim.") and len(call.args) > 1:
            rate = call.args[1]
        if rate is not None:
            yield rate
    for target, value, _ in source.assignments:
        if target.endswith("['lr']"):
            yield value


class _Sizes:
    """Finder of expressions that grow with the number of ranks; follows assignments and the script's functions."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.growing: set[str] = set()
        for _ in range(4):  # chains of assignments, four levels deep
            self.growing |= {target for target, value, _ in source.assignments if self.grows(value)}
            self.growing |= {
                f"{name}()"
                for name, function in source.functions.items()
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None and self.grows(node.value)
            }

    def grows(self, value: ast.expr) -> bool:
        """Return whether ``value`` grows with the number of ranks."""
        if isinstance(value, ast.Name | ast.Attribute):
            return ast.unparse(value) in self.growing
        if isinstance(value, ast.Call):
            own = isinstance(value.func, ast.Name) and f"{value.func.id}()" in self.growing
            return own or self.source.hvd(value.func) in _SIZES or any(self.grows(given) for given in value.args)
        if isinstance(value, ast.BinOp):
            right = isinstance(value.op, ast.Mult | ast.Add) and self.grows(value.right)
            return right or self.grows(value.left)
        if isinstance(value, ast.IfExp):
            return self.grows(value.body) or self.grows(value.orelse)
        return False
