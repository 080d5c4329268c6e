"""Rules on values that only some ranks set, and on which the training of these ranks then depends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import is_stored, is_unconditional, last_name
from dualtrain.horovodize.order import called, calls_of, nodes_after
from dualtrain.horovodize.rules.ranks import Collectives, may_leave, only_waits
from dualtrain.horovodize.source import Finding, Scope, Source

#: Code that may send a value from one rank to the others, besides broadcast_parameters and broadcast_optimizer_state.
#: Calls of ``synchronize`` do not match, because ``may_send`` checks them one by one.
_SENDS = re.compile(r"broadcast(?!_optimizer_state|_parameters\b)|bcast|(?<!reduce_a)sync(?!hronize\()|gather|elastic")

#: Functions and methods that don't send an argument to other ranks. ``get`` is listed here because ``Source.mentions`` also
#: has strings, such as the argument of ``checkpoint.get("start_epoch")``.
_READERS = ("format", "get", "info", "print", "range")


def may_send(source: Source) -> bool:
    """Return whether the program may send values between ranks, by code that ``_SENDS`` matches or by ``synchronize()``.

    A ``synchronize()`` that only waits does not count (:func:`only_waits`).
    """
    for file in source.files:
        calls = (call for call in file.calls if last_name(call.func) == "synchronize")
        if _SENDS.search(file.code) or not all(only_waits(file, call) for call in calls):
            return True
    return False


def loop_by_value_of_some_ranks(source: Source) -> Iterator[Finding]:
    """A loop that contains collectives, if only some ranks set a variable that decides the number of iterations.

    Examples are the first epoch, which rank 0 reads from a checkpoint, and a flag by which rank 0 stops early.
    """
    if source.uses_elastic or source.hvd_calls("join"):
        return  # an elastic state is sent to all ranks; with join(), ranks may take different numbers of steps
    guards, collectives = Guards.of(source), Collectives(source)
    for loop in (node for node in source.nodes if isinstance(node, ast.For | ast.While)):
        for name in _names_of_condition(loop):
            collective, text = collectives.first_in(loop.body), ast.unparse(name)
            if not collective or guards.looks_like_one_rank(loop):
                continue
            if not any(
                differs(source, name) for differs in (_is_set_on_some_ranks, _is_result_of_some_ranks, _is_changed_by_calls)
            ):
                continue
            message = (
                f"only some ranks set {text}, which decides how often this loop runs, so that {collective}() of other "
                f"ranks hangs; send it to all ranks first: {text} = hvd.broadcast_object({text}, root_rank=0)"
            )
            yield Finding(name.lineno, "trap", message)


def _names_of_condition(loop: ast.For | ast.While) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the variables and attributes in ``range(…)`` of ``loop``, and ``flag`` of ``if flag: break``.

    The flag counts only if this is the only exit, and ``loop`` is a ``for`` loop or a ``while True``.
    """
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range":
        yield from (value for value in loop.iter.args if isinstance(value, ast.Name | ast.Attribute))
    exits = [node for part in loop.body for node in ast.walk(part) if may_leave(node)]
    for one in loop.body if is_unconditional(loop) else ():
        if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break) and exits == one.body[-1:]:
            yield from [one.test] if isinstance(one.test, ast.Name | ast.Attribute) else []


def _is_set_on_some_ranks(source: Source, name: ast.Name | ast.Attribute) -> bool:
    """Return whether one statement that only some ranks run sets ``name``, and no rank sends the value.

    These conditions must hold, too:

    - All other assignments assign constants. Those that may run on all ranks come before that statement. A variable has at
      least one of those, and is not a parameter. An attribute may have none, since argparse may set it.
    - All assignments are in the function that contains ``name`` or, for an attribute, in the class that contains ``name``
      (if no class does: outside of classes).
    - Of all calls, only those in ``_READERS`` get the value: a different call may send it.
    - For an attribute, which can be sent with its object, the program does not send any values.
    """
    guards, home = Guards.of(source), _home(source, name, name)
    mentions = source.mentions.get(last_name(name), ())
    is_attribute = isinstance(name, ast.Attribute)
    same = [
        node for file in source.files if is_attribute or file is source for node in file.mentions.get(last_name(name), ())
    ]
    stores = list(filter(is_stored, same))
    made = [(value, at) for target, value, at in source.assignments if target == ast.unparse(name)]
    if (
        len(stores) != len(made)
        or (may_send(source) if is_attribute else last_name(name) in source.parameters(name))
        or any(_home(source, name, at) is not home for _, at in made)
    ):
        return False
    some = [at for value, at in made if not isinstance(value, ast.Constant) or isinstance(at, ast.AugAssign)]
    common = [at for _, at in made if at not in some and not guards.looks_like_one_rank(at)]
    if len(some) != 1 or not guards.is_on_some_ranks(some[0]) or guards.is_without_horovod(some[0]):
        return False
    if not (common or is_attribute) or any(at.lineno > some[0].lineno for at in common):
        return False  # perhaps a later assignment, which makes the value equal on all ranks again
    given = [source.parents[node] for node in mentions if node not in stores]
    calls = [node for node in given if isinstance(node, ast.Call | ast.keyword)]
    return all(isinstance(node, ast.Call) and last_name(node.func) in _READERS for node in calls)


def _is_result_of_some_ranks(source: Source, name: ast.Name | ast.Attribute) -> bool:
    """Return whether ``name`` holds the result of a function that returns a constant, except on some ranks.

    Also return True if the function returns a variable that only some ranks set (:func:`_is_set_on_some_ranks`). In both
    cases, the program must not send any values.
    """
    guards = Guards.of(source)
    values = [value for value in source.values.get(ast.unparse(name), ()) if not isinstance(value, ast.Constant)]
    function = called(source, values[0]) if len(values) == 1 and isinstance(values[0], ast.Call) else None
    if function is None or function.decorator_list or not source.is_only(function.name):
        return False  # perhaps this calls a different function, or a decorator sends the result
    if may_send(source) or last_name(name) in source.parameters(name):
        return False
    ends = [node for node in ast.walk(function) if isinstance(node, ast.Return) and source.scope(node) is function]
    given = [end for end in ends if end.value is not None and not isinstance(end.value, ast.Constant)]
    return len(given) == 1 and (
        (len(ends) > 1 and guards.is_on_some_ranks(given[0]) and not guards.is_without_horovod(given[0]))
        or (isinstance(given[0].value, ast.Name) and _is_set_on_some_ranks(source, given[0].value))
    )


def _is_changed_by_calls(source: Source, name: ast.Name | ast.Attribute) -> bool:
    """Return whether ``name`` is an attribute of an object that only some ranks call, as in ``stopper(loss)``.

    Calls of its methods count too. All ranks must make the object, and the program must not send any values.
    """
    if not isinstance(name, ast.Attribute) or not isinstance(name.value, ast.Name) or may_send(source):
        return False
    if ast.unparse(name) in source.values:
        return False  # perhaps all ranks set it to a common value
    guards, owner = Guards.of(source), name.value
    made = [(value, at) for target, value, at in source.assignments if target == owner.id]
    if len(made) != 1 or not isinstance(made[0][0], ast.Call) or guards.looks_like_one_rank(made[0][1]):
        return False
    if source.scope(made[0][1]) is not source.scope(name) or owner.id in source.parameters(name):
        return False
    uses = [node for node in source.mentions[owner.id] if isinstance(node, ast.Name) and not is_stored(node)]
    parents = [source.parents[node] for node in uses]
    others = [parent for parent in parents if not isinstance(parent, ast.Attribute) or parent.attr != name.attr]
    calls = [source.parents[other] if isinstance(other, ast.Attribute) else other for other in others]
    known = all(isinstance(call, ast.Call) and call.func in (*uses, *others) for call in calls)
    return bool(calls) and known and all(map(guards.is_on_some_ranks, calls))


def _home(source: Source, name: ast.Name | ast.Attribute, node: ast.AST) -> ast.AST:
    """Return the function around ``node`` if ``name`` is a variable. For an attribute, return the class or the module."""
    if isinstance(name, ast.Name):
        return source.scope(node)
    return next(source.around(node, ast.ClassDef), source.tree)


def rate_on_some_ranks(source: Source) -> Iterator[Finding]:
    """A learning rate of a wrapped optimizer that only some ranks change before further training.

    If the program sets learning rates in several places, it may correct this rate elsewhere, so there is no finding.
    """
    if may_send(source):
        return
    guards = Guards.of(source)
    sends = [call for file in source.files for call in file.calls if file.called(call) == "broadcast_optimizer_state"]
    rates = [(target, at) for file in source.files for target, _, at in file.assignments if target.endswith("['lr']")]
    for target, at in rates if len(rates) == 1 and rates[0][1] in source.parents else ():
        if not guards.is_on_some_ranks(at) or not _is_rate_of_wrapped(source, target, at):
            continue
        later = set(nodes_after(source, at))
        trains = any(isinstance(node, ast.Call) and last_name(node.func) == "backward" for node in later)
        sent = any(call in later or call not in source.parents or _is_repeated(source, call) for call in sends)
        if (trains or may_repeat(source, at)) and not sent:
            message = (
                "only some ranks change the learning rate, so that learning rates, and then weights, differ between ranks; "
                "change it on all ranks"
            )
            yield Finding(at.lineno, "trap", message)


def _is_repeated(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` may run more than once, because it is in a loop or a function."""
    return any(isinstance(above, ast.For | ast.While | Scope) and above is not source.tree for above in source.above(node))


def may_repeat(source: Source, node: ast.AST, depth: int = 0) -> bool:
    """Return whether ``node``, or a call of the function that contains it, is in a loop that is not over param_groups.

    A loop does not count if a ``break`` after ``node`` ends it.
    """
    left = False  # whether ``break`` follows in the same loop
    for above in (node, *source.above(node)):
        if isinstance(above, ast.For | ast.While):
            over_groups = isinstance(above, ast.For) and "param_groups" in ast.unparse(above.iter)
            if not left and not over_groups:
                return True
            left = False
        if isinstance(above, ast.stmt):
            left = left or isinstance(source.block(above)[-1], ast.Break)
    calls = calls_of(source, source.scope(node))
    return depth < 3 and any(may_repeat(source, call, depth + 1) for call in calls)


def _is_rate_of_wrapped(source: Source, target: str, assignment: ast.AST) -> bool:
    """Return whether ``target`` of ``assignment`` is ``optimizer.param_groups[…]['lr']``, or ``group['lr']`` in a loop.

    The optimizer must be a wrapped one, and the loop must be over its ``param_groups``.
    """
    group = ast.parse(target, mode="eval").body.value  # type: ignore[attr-defined]
    if isinstance(group, ast.Subscript):
        return _are_groups_of_wrapped(source, group.value)
    pairs = (pair for loop in source.around(assignment, ast.For) for pair in loop_variables(loop.target, loop.iter))
    given = next((value for name, value in pairs if ast.unparse(name) == ast.unparse(group)), None)
    return given is not None and _are_groups_of_wrapped(source, given)


def loop_variables(target: ast.expr, values: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each variable of a ``for`` loop, with the sequence of its values, also in ``enumerate``, ``zip`` and ``items``.

    Leave out the count of ``enumerate``, and variables in other tuples. For both variables of ``items``,
    the sequence is the call of ``items`` itself.
    """
    if not isinstance(target, ast.Tuple):
        yield target, values
    elif isinstance(values, ast.Call) and len(target.elts) == 2 and ast.unparse(values.func) == "enumerate" and values.args:
        yield from loop_variables(target.elts[1], values.args[0])
    elif isinstance(values, ast.Call) and ast.unparse(values.func) == "zip":
        for one, sequence in zip(target.elts, values.args, strict=False):
            yield from loop_variables(one, sequence)
    elif isinstance(values, ast.Call) and last_name(values.func) == "items":
        yield from ((one, values) for one in target.elts)


def _are_groups_of_wrapped(source: Source, node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "param_groups" and last_name(node.value) in source.wrapped
