"""Rules on code that has different effects on Horovod's and on dualtrain's wrapped optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import argument_at, first_argument, is_bool, is_stored, keyword, last_name, variables_in
from dualtrain.horovodize.order import arguments, calls_of, nodes_after
from dualtrain.horovodize.rules.losses import models_of_optimizer
from dualtrain.horovodize.source import Finding, Function, Source


def set_to_none(source: Source) -> Iterator[Finding]:
    """zero_grad with set_to_none: a TypeError on Horovod."""
    for call in _on_wrapped(source, "zero_grad"):
        if (call.args or call.keywords) and not source.is_caught(call, r"\b(TypeError|Exception)\b"):
            message = "zero_grad() accepts set_to_none; on Horovod it raises TypeError; nothing to do"
            yield Finding(call.lineno, "differs", message)


def predivided_groups(source: Source) -> Iterator[Finding]:
    """A gradient_predivide_factor that Horovod ignores, because parameters are in groups."""
    for call in source.hvd_calls("DistributedOptimizer"):
        factor = argument_at(call, 5, "gradient_predivide_factor")
        groups = (argument_at(call, 6, "num_groups"), argument_at(call, 7, "groups"))
        grouped = any(not _is_one_of(source, value, (None, 0)) for value in groups)
        if grouped and not _is_one_of(source, factor, (None, 1)):
            message = (
                "dualtrain divides gradients by gradient_predivide_factor before the sum, but Horovod ignores the factor "
                "for parameters in groups; nothing to do"
            )
            yield Finding(call.lineno, "differs", message)


def _is_one_of(source: Source, value: ast.expr | None, wanted: tuple[int | None, ...]) -> bool:
    """Return whether the argument ``value`` is omitted, or is certainly one of ``wanted``."""
    constant = source.constant(value)
    return value is None or (constant is not None and constant.value in wanted)


def group_after_wrapping(source: Source) -> Iterator[Finding]:
    """Parameter groups that are added to a wrapped optimizer."""
    for call in _on_wrapped(source, "add_param_group"):
        made = [node for node in ast.walk(source.scope(call)) if isinstance(node, ast.Attribute) and is_stored(node)]
        if any(node.attr == "param_groups" for node in made):
            continue  # param_groups is replaced; the new groups may have the same parameters
        wraps = [wrap for _, wrap in source.wraps if source.scope(wrap) is source.scope(call)]
        if not wraps or call.lineno > wraps[0].lineno:
            message = "dualtrain averages the gradients of an added group, but Horovod does not; nothing to do"
            yield Finding(call.lineno, "differs", message)


def checkpoint_before_wrapping(source: Source) -> Iterator[Finding]:
    """State that is loaded into an optimizer before it is wrapped."""
    for _, wrap in source.wraps:
        given = first_argument(wrap, "optimizer")
        inner = last_name(given) if given is not None else ""
        found = dict[int, list[ast.Call]]()
        for load in _methods(source, "load_state_dict"):
            for call, optimizer in ((load, _owner(load)), *_calls_with_optimizer(source, _owner(load))):
                same = inner and last_name(optimizer) == inner and source.scope(call) is source.scope(wrap)
                before = call.lineno < wrap.lineno and not source.exclusive(call, wrap)
                if same and before and not _has_no_state(source, inner):
                    found.setdefault(call.lineno, []).extend([call, load])
        for line, calls in found.items():
            cure = "nothing to do" if all(_is_loaded_by_all(source, call) for call in calls) else _BROADCAST_STATE
            message = f"the state loaded before wrapping is kept; Horovod drops it; {cure}"
            yield Finding(line, "differs", message)


def _calls_with_optimizer(source: Source, optimizer: ast.expr) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, value) for the calls of the function with the parameter ``optimizer``, and the values they may pass."""
    scope = source.scope(optimizer)
    if isinstance(scope, Function) and isinstance(optimizer, ast.Name) and optimizer.id in source.parameters(optimizer):
        for call in calls_of(source, scope):
            yield from ((call, value) for value in arguments(source, scope, call, optimizer.id))


_BROADCAST_STATE = (
    "only some ranks load it: call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after wrapping, since the weights "
    "differ between ranks otherwise"
)


def _is_loaded_by_all(source: Source, load: ast.Call) -> bool:
    """Return whether ``load`` does not look like code of one rank, or the program broadcasts the optimizer's state."""
    broadcasts = any(file.hvd_calls("broadcast_optimizer_state") for file in source.files)
    return broadcasts or not Guards.of(source).looks_like_one_rank(load)


def _has_no_state(source: Source, optimizer: str) -> bool:
    """Return whether the variable ``optimizer`` certainly holds SGD without momentum, which keeps no state."""
    values = source.values.get(optimizer, [])
    plain = [
        isinstance(value, ast.Call)
        and source.name(value.func) == "torch.optim.SGD"
        and len(value.args) < 3
        and all(word.arg not in (None, "momentum") for word in value.keywords)
        for value in values
        if _unwrapped(source, value) is value
    ]
    return bool(plain) and all(plain)


def optimizer_state(source: Source) -> Iterator[Finding]:
    """A call of broadcast_optimizer_state: on Horovod, it steps an optimizer that has no state, with gradients of zeros.

    The first call in which this step may have an effect has a finding; later calls have none. The ``sync`` of an elastic
    state calls broadcast_optimizer_state, too.
    """
    guards = Guards.of(source)
    for call in source.hvd_calls("broadcast_optimizer_state", *_STATES):
        is_state = source.hvd(call.func) in _STATES
        given = argument_at(call, 1 if is_state else 0, "optimizer")
        if is_state and _is_one_of(source, given, (None,)):
            continue
        if guards.is_without_horovod(call) or (given is not None and _ignores_zeros(source, given, call)):
            continue
        changed = "the weights"
        if given is not None and _gets_plain_optimizer(source, call, given):
            if not _shows_decay(source, given):
                continue  # the step changes no weights, and Horovod's wrapper does not take over the state
        elif given is None or not _may_be_wrapped_later(source, call, given):
            changed = "its state or the weights"
        message = (
            f"{'the sync() of this state' if is_state else 'this call'} takes no step; on Horovod it steps an optimizer "
            f"that has no state yet, which may change {changed}; nothing to do"
        )
        yield Finding(call.lineno, "differs", message)
        return


_STATES = ("elastic.TorchState", "elastic.state.TorchState")


def _gets_plain_optimizer(source: Source, call: ast.Call, optimizer: ast.expr) -> bool:
    """Return whether ``call`` gets the plain optimizer, although the function around ``call`` also makes a wrapper of it.

    This is so if the wrapper has a different name, or is made later.
    """
    text, scope = ast.unparse(optimizer), source.scope(call)
    wraps = [wrap for wrap in source.hvd_calls("DistributedOptimizer") if source.scope(wrap) is scope]
    earlier = [wrap for wrap in wraps if wrap.lineno < call.lineno and wrap in source.values.get(text, ())]
    inner = (first_argument(wrap, "optimizer") for wrap in wraps)
    return not earlier and any(one is not None and ast.unparse(one) == text for one in inner)


def _may_be_wrapped_later(source: Source, call: ast.Call, optimizer: ast.expr) -> bool:
    """Return whether no wrapper is assigned to ``optimizer``, and only other functions of the script make wrappers."""
    wraps = source.hvd_calls("DistributedOptimizer")
    earlier = [wrap for name, wrap in source.wraps if name == last_name(optimizer)]
    return bool(wraps) and not earlier and all(source.scope(wrap) is not source.scope(call) for wrap in wraps)


def _values_before(source: Source, variable: ast.expr, node: ast.AST) -> list[ast.expr]:
    """Return the values that ``variable`` may hold at ``node``.

    Assignments below ``node`` in the same function are left out, unless a loop contains both the assignment and ``node``.
    """
    text, scope = ast.unparse(variable), source.scope(node)
    loops = [above for above in source.above(node) if isinstance(above, ast.For | ast.While)]
    found = []
    for target, value, statement in source.assignments:
        later = source.scope(statement) is scope and value.lineno > getattr(node, "lineno", 0)
        if target == text and (not later or any(loop in source.above(statement) for loop in loops)):
            found.append(value)
    return found


def _shows_decay(source: Source, optimizer: ast.expr, depth: int = 0) -> bool:
    """Return whether the script shows that ``optimizer`` may change weights if gradients are 0: it has a weight decay.

    ASGD without ``weight_decay`` counts too, because its ``lambd`` makes weights smaller. If ``optimizer`` is a parameter,
    the arguments of the function's calls count.
    """
    same = [(value, source.scope(at)) for text, value, at in source.assignments if text == ast.unparse(optimizer)]
    made = [value for value, scope in same if scope is source.scope(optimizer)] or [value for value, _ in same]
    calls = [each for each in (optimizer, *made) if isinstance(each, ast.Call) and _unwrapped(source, each) is each]
    passed = [value for _, value in _calls_with_optimizer(source, optimizer)] if depth < 4 else []
    # The AdamW of a different library, such as transformers, may have no weight decay by default.
    by_default = (source.name(call.func) for call in calls if _decay(call) is None)
    decays = any(name.startswith("torch.optim.") and name.endswith((".AdamW", ".ASGD", ".Muon")) for name in by_default)
    decays = decays or any(not _is_zero(source, _decay(call)) for call in calls)
    return decays or any(_shows_decay(source, value, depth + 1) for value in passed)


def _decay(call: ast.Call) -> ast.expr | None:
    """Return the argument ``weight_decay`` of ``call``, which makes an optimizer; None if it is omitted."""
    positions = {"Adagrad": 3, "ASGD": 5, "Adafactor": 5, "Muon": 2}
    return argument_at(call, positions.get(last_name(call.func), 4), "weight_decay")


def _is_zero(source: Source, decay: ast.expr | None) -> bool:
    constant = source.constant(decay)
    return decay is None or (constant is not None and constant.value == 0)


def _ignores_zeros(source: Source, optimizer: ast.expr, call: ast.Call, depth: int = 0) -> bool:
    """Return whether a step with gradients of zeros certainly has no effect on the training with ``optimizer``.

    True for SGD that certainly has no weight decay and no dampening. (torch applies dampening from an optimizer's second
    step on, so an extra step has an effect.) True also for Adagrad, which Horovod does not step because it has a state
    from the start. If ``optimizer`` is a parameter, what the function's calls pass counts.
    """
    if not isinstance(optimizer, ast.Call):
        text = ast.unparse(optimizer)
        # Leave out the wrapper in optimizer = hvd.DistributedOptimizer(optimizer): the variable's other values decide.
        before = _values_before(source, optimizer, call)
        values = [(value, call) for value in before if ast.unparse(_unwrapped(source, value)) != text]
        values += [(value, at) for at, value in _calls_with_optimizer(source, optimizer)]
        return depth < 4 and bool(values) and all(_ignores_zeros(source, value, at, depth + 1) for value, at in values)
    if (inner := _unwrapped(source, optimizer)) is not optimizer:
        return _ignores_zeros(source, inner, call, depth + 1)
    if source.name(optimizer.func) == "torch.optim.SGD":
        known = len(optimizer.args) < 4 and all(each.arg not in (None, "dampening") for each in optimizer.keywords)
        return known and _is_zero(source, keyword(optimizer, "weight_decay"))
    return source.name(optimizer.func) == "torch.optim.Adagrad"


def _unwrapped(source: Source, value: ast.expr) -> ast.expr:
    """Return the optimizer that ``value`` wraps, or ``value`` itself."""
    if isinstance(value, ast.Call) and source.hvd(value.func) == "DistributedOptimizer":
        return first_argument(value, "optimizer") or value
    return value


def frozen_after_wrapping(source: Source) -> Iterator[Finding]:
    """Parameters that are frozen after an optimizer is wrapped; one finding for all parameters."""
    own = {model for file in source.files for _, wrap in file.wraps for model in models_of_optimizer(file, wrap)}
    later = (node for _, wrap in source.wraps for node in nodes_after(source, wrap))
    frozen = (node for node in later if _freezes(source, node) and _is_of_models(source, node, own))
    lines = {source.statement(node).lineno for node in frozen}
    for line in sorted(lines)[:1]:
        message = (
            "dualtrain does not change a parameter frozen after wrapping; Horovod gives it gradients of zeros, so that "
            "weight decay and momentum change it; freeze before wrapping to get the same result with both libraries"
        )
        yield Finding(line, "differs", message)


def _freezes(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` freezes parameters; False if the function around it also unfreezes some, as for a GAN."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        value = first_argument(node, "requires_grad")
        return is_bool(value, False) and not _unfreezes_too(source, node)
    if not isinstance(node, ast.Assign) or not is_bool(node.value, False):
        return False
    owners = [t.value for t in node.targets if isinstance(t, ast.Attribute) and t.attr == "requires_grad"]
    found = any(last_name(owner) in ("weight", "bias") or _is_parameter(source, owner) for owner in owners)
    return found and not _unfreezes_too(source, node)


def _is_of_models(source: Source, node: ast.AST, models: set[str]) -> bool:
    """Return whether ``node`` certainly freezes parameters of one of ``models``.

    The function that contains ``node`` may get the model as an argument.
    """
    if isinstance(node, ast.Assign):
        loops = list(source.around(node, ast.For))
        text = ast.unparse(loops[0].iter if loops else node.targets[0])
    else:
        text = ast.unparse(node)
    root = re.match(r"(?:self\.)?\w+", text.removeprefix("list(").removeprefix("enumerate("))
    name = root.group() if root else ""
    given = _passed(source, node, name)
    return any(re.match(rf"{re.escape(model)}(\.|$)", one) for model in models for one in ([name, *given] if name else ()))


def _passed(source: Source, node: ast.AST, name: str) -> list[str]:
    """Return the arguments, as text, that calls pass for the parameter ``name`` of the function that contains ``node``."""
    scope = source.scope(node)
    if not isinstance(scope, Function) or name not in source.parameters(node):
        return []
    given = (source.argument(scope, call, name) for call in calls_of(source, scope))
    return [ast.unparse(value) for value in given if value is not None]


def _is_parameter(source: Source, owner: ast.expr) -> bool:
    """Return whether ``owner`` is a variable of a loop over parameters."""
    named = (loop for loop in source.around(owner, ast.For) if last_name(owner) in variables_in(loop.target))
    return isinstance(owner, ast.Name) and any("parameters" in ast.unparse(loop.iter) for loop in named)


def _unfreezes_too(source: Source, node: ast.AST) -> bool:
    for other in ast.walk(source.scope(node)):
        if isinstance(other, ast.Assign) and any(last_name(target) == "requires_grad" for target in other.targets):
            value: ast.expr | None = other.value
        elif isinstance(other, ast.Call) and last_name(other.func) == "requires_grad_":
            value = first_argument(other, "requires_grad") or ast.Constant(True)
        else:
            continue
        if is_bool(value, True):
            return True
    return False


def several_evaluations(source: Source) -> Iterator[Finding]:
    """LBFGS, which evaluates its closure several times per step."""
    for _, wrap in source.wraps:
        for value in source.possible_values(first_argument(wrap, "optimizer")):
            if isinstance(value, ast.Call) and source.name(value.func) in _LBFGS:
                message = (
                    "LBFGS evaluates its closure several times per step, so Horovod raises AssertionError; with dualtrain "
                    "all ranks get averaged losses and gradients; the closure must return the loss on every rank"
                )
                yield Finding(value.lineno, "differs", message)


_LBFGS = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")


def _methods(source: Source, name: str) -> Iterator[ast.Call]:
    return (call for call in source.calls if isinstance(call.func, ast.Attribute) and call.func.attr == name)


def _on_wrapped(source: Source, name: str) -> Iterator[ast.Call]:
    return (call for call in _methods(source, name) if last_name(_owner(call)) in source.wrapped)


def _owner(call: ast.Call) -> ast.expr:
    assert isinstance(call.func, ast.Attribute)
    return call.func.value
