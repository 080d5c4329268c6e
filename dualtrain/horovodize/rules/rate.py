"""The rule on learning rates that are scaled by the number of ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import argument_at, given_values, keyword, last_name, names_of_target
from dualtrain.horovodize.source import Finding, Function, Scope, Source

_SIZES = ("size", "local_size", "cross_size")
_RATE = re.compile(r"(^|_)(lr|learning_?rate)(_|$)|^(init|base|max|start)lr$", re.IGNORECASE)
_NO_RATE = re.compile(r"adj|factor|scale|mult|decay|warm|sched|step|epoch", re.IGNORECASE)
#: Schedules whose own rates replace the optimizer's rate.
_CYCLIC = ("torch.optim.lr_scheduler.CyclicLR", "torch.optim.lr_scheduler.OneCycleLR")
#: Functions that do not change the power of the number of ranks (see ``_Powers``).
_SAME_POWER = ("abs", "float", "int", "round", "math.ceil", "math.floor", "numpy.float32")
_MESSAGE = (
    "the learning rate grows with the number of ranks, on Horovod too; this is usual for averaged gradients with a "
    "warm-up, but the trained model then depends on the number of ranks"
)
#: Messages for factors that are not the number of all ranks.
_OF_HOSTS = {
    "local_size": (
        "the learning rate grows with the number of ranks per host, on Horovod too, although gradients are averaged over "
        "all ranks; if it should grow with the number of averaged gradients, use hvd.size()"
    ),
    "cross_size": (
        "the learning rate grows with the number of hosts, on Horovod too, although gradients are averaged over all "
        "ranks; if it should grow with the number of averaged gradients, use hvd.size()"
    ),
}


def rate_times_size(source: Source) -> Iterator[Finding]:
    """A learning rate that grows with the number of ranks."""
    if _warms_up(source) or _is_adjusted_elsewhere(source):
        return  # a script with a warm-up needs no message, and a function of another file may replace the rate
    powers = _Powers(source)
    cyclic_schedules = [call for call in source.calls if source.name(call.func) in _CYCLIC]
    growing = [value for value in _rates(source, cyclic_schedules) if powers.of(value) > 0]
    yield from (Finding(value.lineno, "trap", _message(source, value)) for value in growing)
    if cyclic_schedules:
        return  # a variable may hold a rate that the schedule replaces
    names = {last_name(node) for value in growing for node in ast.walk(value)}
    for target, value, statement in source.assignments:
        name = re.sub(r"^.*[\['.\"]([\w-]+)['\"\]]*$", r"\1", target)
        no_rate = _NO_RATE.search(name) and name not in ("scaled_lr", "lr_scaled", "scaled_learning_rate")
        if name in names or not _RATE.search(name) or no_rate or any(value is one for one in growing):
            continue
        times = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult)
        given = (last_name(node) for node in ast.walk(value))  # all names in the value: one may be a rate
        of_rate = any(_RATE.search(one) and not _NO_RATE.search(one) for one in given)
        if (times or of_rate or ast.unparse(value).startswith(target)) and powers.of(value) > 0:
            names.add(name)
            yield Finding(statement.lineno, "trap", _message(source, value))


def _warms_up(source: Source) -> bool:
    """Return whether the name of a called function, an argument or a variable says that the rate warms up.

    These do not count:

    - a keyword argument that is zero, False or None;
    - the warm-up of a time measurement;
    - options that are only declared;
    - torch's CosineAnnealingWarmRestarts.

    Also return True for a schedule of torch that may start with a lower rate.
    """
    for node in source.nodes:
        if isinstance(node, ast.Call):
            if _starts_lower(source, node):
                return True
            words = [word for word in node.keywords if word.arg and _WARM_UP.search(word.arg)]
            steps = [word for word in words if not (isinstance(word.value, ast.Constant) and not word.value.value)]
            timed = all(_is_timed(node, word.arg) for word in steps)
            names = [node.func, *(node.args if last_name(node.func) not in ("print", "range") else ())]
            named = not words and any(_WARM_UP.search(last_name(part)) for part in names)
            if not timed or (named and not _is_of_measurement(source, node)):
                return True
        elif isinstance(node, ast.BinOp | ast.Compare):
            parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.left, *node.comparators]
            if any(_WARM_UP.search(last_name(part)) for part in parts) and not _is_of_measurement(source, node):
                return True
    called = ((target, value) for target, value, _ in source.assignments if isinstance(value, ast.Call))
    return any(_WARM_UP.search(target) and not _is_timed(value, target) for target, value in called)


def _starts_lower(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` makes a schedule of torch that starts with a lower rate, or may do so.

    LinearLR and ConstantLR do, unless their first factor is 1. A LambdaLR may do so if one of its functions treats some
    epochs differently, as in ``lambda epoch: min(1, epoch / 5)``.
    """
    kind = source.name(call.func).removeprefix("torch.optim.lr_scheduler.")
    if kind in ("LinearLR", "ConstantLR"):
        first = argument_at(call, 1, "start_factor" if kind == "LinearLR" else "factor")
        return not (isinstance(first, ast.Constant) and first.value == 1)
    given = argument_at(call, 1, "lr_lambda") if kind == "LambdaLR" else None
    functions = given.elts if isinstance(given, ast.List | ast.Tuple) else [given] if given is not None else []
    return any(_distinguishes(source, function) for function in functions)


def _distinguishes(source: Source, value: ast.expr, depth: int = 0) -> bool:
    """Return whether the function ``value``, or a script's function that it calls, treats some arguments differently."""
    function = source.functions.get(last_name(value), value)
    if not isinstance(function, ast.Lambda | Function):
        return False
    parts = list(ast.walk(function))
    called = (part.func for part in parts if isinstance(part, ast.Call) and depth < 2)
    return any(isinstance(part, ast.Compare) or last_name(part) == "min" for part in parts) or any(
        _distinguishes(source, one, depth + 1) for one in called
    )


def _is_adjusted_elsewhere(source: Source) -> bool:
    """Return whether a function of another file sets the optimizer's rate: ``adjust_learning_rate(optimizer, epoch)``."""
    for call in source.calls:
        name = last_name(call.func)
        given = map(last_name, given_values(call))
        if _ADJUSTS.search(name) and name not in source.functions and any("optim" in one.lower() for one in given):
            return True
    return False


_ADJUSTS = re.compile(r"(adjust|set|update|change)_?(the_?)?(lr|learning_?rate)", re.IGNORECASE)
#: Names of a learning rate's warm-up.
_WARM_UP = re.compile(r"warm_?up|(^|_)wu(_|$)|gradual", re.IGNORECASE)


def _is_of_measurement(source: Source, node: ast.AST) -> bool:
    """Return whether the warm-up belongs to a time measurement: its iterations run before the timer starts."""
    text = ast.unparse(source.statement(node))
    return re.search(r"bench|timeit|num_warmup_(batches|iters)", text) is not None and not re.search(
        r"\blr\b|learning_?rate", text
    )


def _is_timed(call: ast.Call, name: str | None) -> bool:
    """Return whether ``call`` measures time, or ``name`` (its keyword, or the variable of its result) says that it does.

    ``name`` does not count if ``call`` seems to make a schedule: the name of its function or of an argument contains
    "sched", "optim" or "lr". Return False if the name of its function says that the rate warms up.
    """
    called, given = ast.unparse(call.func), " ".join(map(last_name, given_values(call)))
    if _WARM_UP.search(last_name(call.func)):
        return False
    if re.search("bench|timeit", called):
        return True
    makes_schedule = re.search("sched|optim|lr", f"{called} {given}", re.IGNORECASE)
    return not makes_schedule and re.search("bench|timeit|num_warmup_batches", name or "") is not None


def _message(source: Source, value: ast.expr) -> str:
    """Return the message about the rate ``value``. It depends on which of ``_SIZES`` the rate grows with."""
    kinds = [size for size in _SIZES if _Powers(source, (size,)).of(value) > 0]
    return _OF_HOSTS.get(kinds[0], _MESSAGE) if len(kinds) == 1 else _MESSAGE


def _rates(source: Source, cyclic_schedules: Sequence[ast.Call]) -> Iterator[ast.expr]:
    """Yield the expressions that are used as a learning rate; if there are ``cyclic_schedules``, only their rates."""
    if cyclic_schedules:
        yield from (word.value for call in cyclic_schedules for word in call.keywords if word.arg in ("base_lr", "max_lr"))
        yield from (
            value for call in cyclic_schedules for value in call.args[1 : 3 if "Cyclic" in last_name(call.func) else 2]
        )
        return
    for call in source.calls:
        rate = keyword(call, "lr") or keyword(call, "max_lr")
        if rate is None and source.makes_optimizer(call) and len(call.args) > 1:
            rate = call.args[1]
        if rate is not None:
            yield rate
    for node in source.nodes:
        if isinstance(node, ast.Dict) and not _is_reported(source, node):
            yield from (value for key, value in zip(node.keys, node.values, strict=True) if _is_lr(key))
    for target, value, statement in source.assignments:
        if target.endswith("['lr']") and not isinstance(statement, ast.AugAssign):
            yield value
        if target.endswith(".base_lrs"):  # of a schedule
            yield value.elt if isinstance(value, ast.ListComp) else value


def _is_reported(source: Source, values: ast.Dict) -> bool:
    """Return whether ``values`` is in a call that reports or records values, such as ``print``, ``log`` or ``append``."""
    calls = list(source.around(values, ast.Call))
    adds = any(last_name(call.func) in ("append", "extend") for call in calls)
    if adds and any(isinstance(key, ast.Constant) and key.value == "params" for key in values.keys):
        return False  # a parameter group of an optimizer
    return any(_REPORTS.search(last_name(call.func)) for call in calls)


_REPORTS = re.compile(r"log|postfix|print|scalar|write|info|dump|record|metric|report|append", re.IGNORECASE)


def _is_lr(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "lr"


class _Powers:
    """Computes the power of the number of ranks in an expression: 1 for ``lr * size``, 0 for ``1 + (size - 1) / size``.

    Only the Horovod functions in ``sizes`` count. The class follows assignments and the script's functions. Unknown
    values count as independent of the number of ranks.
    """

    def __init__(self, source: Source, sizes: Sequence[str] = _SIZES) -> None:
        self.source = source
        self._sizes = sizes
        #: Power of each variable by its scope and name; attributes and subscripts have no scope.
        self._names: dict[tuple[Scope | None, str], float] = {}
        self._returned = {
            name: [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
            for name, function in source.functions.items()
        }
        #: Whether the script uses Adasum. If so, a factor of local_size() is correct: Horovod's guide recommends it, since
        #: with NCCL, gradients are averaged over the ranks of each host. Only a factor of size() counts then.
        self._adasum = any(source.hvd(node) == "Adasum" for node in source.nodes)
        self._properties = {
            name
            for name, function in source.functions.items()
            if any(last_name(decorator) in ("property", "cached_property") for decorator in function.decorator_list)
        }
        declared = [node for node in source.nodes if isinstance(node, ast.Global)]
        self._globals = {(source.scope(node), name) for node in declared for name in node.names}
        #: For each assignment: the variable, the value, the statement, and the variable's text. The text is empty if the
        #: value does not use the variable.
        self._assignments = [
            (self._key(text, statement), value, statement, text if _contains(value, text) else "")
            for text, value, statement in source.assignments
        ]
        for text, value, statement in source.assignments:  # rank, size = start()
            for position, name in enumerate(names_of_target(text)):
                if name != text and self._is_size(value, position):
                    self._names[self._key(name, statement)] = 1.0
        for _ in range(4):  # chains of assignments, four levels deep
            self._names = {**self._names, **dict(self._assigned())}

    def of(self, value: ast.expr, parameters: Mapping[str, float] | None = None, depth: int = 0) -> float:
        """Return the power of ``value``; ``parameters`` has the powers of a function's parameters."""
        if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
            name = ast.unparse(value)
            if isinstance(value, ast.Attribute) and value.attr in self._properties and depth < 4:
                return max((self.of(end, None, depth + 1) for end in self._returned[value.attr]), default=0.0)
            if parameters is not None and name in parameters:
                return parameters[name]
            return next((self._names[key] for key in self._keys(value) if key in self._names), 0.0)
        if isinstance(value, ast.Call):
            return self._of_call(value, parameters, depth)
        if isinstance(value, ast.BinOp):
            return self._of_operation(value, parameters, depth)
        if isinstance(value, ast.IfExp):
            return max(self.of(value.body, parameters, depth), self.of(value.orelse, parameters, depth))
        if isinstance(value, ast.UnaryOp):
            return self.of(value.operand, parameters, depth)
        return 0.0

    def _keys(self, value: ast.expr) -> Iterator[tuple[Scope | None, str]]:
        """Yield keys of the variables that ``value`` may name: in its function, a function around it, or the module."""
        name = ast.unparse(value)
        if not isinstance(value, ast.Name):
            yield None, name
            return
        for scope in (above for above in self.source.above(value) if isinstance(above, Scope)):
            yield scope, name
            if isinstance(scope, Function) and name in self.source.parameters(scope.body[0]):
                return

    def _key(self, target: str, statement: ast.AST) -> tuple[Scope | None, str]:
        """Return the key of the variable ``target`` that ``statement`` assigns."""
        scope = self.source.scope(statement)
        if (scope, target) in self._globals:
            return self.source.tree, target
        return scope if target.isidentifier() else None, target

    def _assigned(self) -> Iterator[tuple[tuple[Scope | None, str], float]]:
        found: dict[tuple[Scope | None, str], float] = {}
        for target, value, statement, old in self._assignments:
            power = self.of(value)
            if isinstance(statement, ast.AugAssign):
                sign = {ast.Mult: 1, ast.Div: -1}.get(type(statement.op), 0)
                found[target] = found.get(target, 0.0) + sign * power
            elif not old:
                found[target] = max(found.get(target, power), power)
            else:  # lr = lr * size: the old value counts as a constant
                found[target] = max(found.get(target, 0.0), self.of(value, {old: 0.0}))
        yield from found.items()

    def _of_call(self, call: ast.Call, parameters: Mapping[str, float] | None, depth: int) -> float:
        if self.source.hvd(call.func) in self._sizes:
            return 1.0 if self.source.hvd(call.func) == "size" or not self._adasum else 0.0
        name = self.source.name(call.func) or ast.unparse(call.func)
        powers = [self.of(value, parameters, depth) for value in call.args]
        if name in _SAME_POWER and powers:
            return powers[0]
        if name in ("math.sqrt", "numpy.sqrt") and powers:
            return powers[0] / 2
        if name in ("max", "min") and powers:
            return max(powers) if name == "max" else min(powers)
        function = self.source.functions.get(name) if isinstance(call.func, ast.Name) and depth < 4 else None
        if function is None:
            return float(self._is_size(call))
        bound = {parameter.arg: power for parameter, power in zip(function.args.args, powers, strict=False)}
        bound |= {word.arg: self.of(word.value, parameters, depth) for word in call.keywords if word.arg}
        return max((self.of(end, bound, depth + 1) for end in self._returned[name]), default=0.0)

    def _is_size(self, value: ast.expr, position: int | None = None) -> bool:
        return "size" in self._sizes and Guards.of(self.source).kinds.kind(value, position) == "size"

    def _of_operation(self, value: ast.BinOp, parameters: Mapping[str, float] | None, depth: int) -> float:
        left, right = self.of(value.left, parameters, depth), self.of(value.right, parameters, depth)
        if isinstance(value.op, ast.Mult):
            return left + right
        if isinstance(value.op, ast.Div | ast.FloorDiv):
            return left - right
        if isinstance(value.op, ast.Add | ast.Sub):
            return max(left, right)
        if isinstance(value.op, ast.Pow):
            exponent = value.right.value if isinstance(value.right, ast.Constant) else 0
            return left * exponent if isinstance(exponent, int | float) else 0.0
        return 0.0


def _contains(value: ast.expr, text: str) -> bool:
    variables = (node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute | ast.Subscript))
    return any(ast.unparse(node) == text for node in variables)
