"""Rules on calls that only some ranks make: collectives, and steps of learning-rate schedules."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES
from dualtrain.horovodize.nodes import is_unconditional, keyword, last_name, variables_in
from dualtrain.horovodize.order import called as called_function
from dualtrain.horovodize.order import calls_of, nodes_after_or_repeated
from dualtrain.horovodize.source import Finding, Function, Scope, Source

#: Methods of an elastic state that broadcast.
_OF_STATE = ("check_host_updates", "commit", "sync")
#: Pattern of words in code that uses learning rates.
RATE = r"\blr\b|learning_rate|param_groups|sched"


class _Unmatched(NamedTuple):
    """A collective call in one branch of a condition on the rank, without the same call in the other branch."""

    name: str
    call: ast.Call
    function: ast.AST  # the function or module that contains the condition
    condition: tuple[bool, str]  # as in ``Guards.signature``


def collective_on_some_ranks(source: Source) -> Iterator[Finding]:
    """A collective that only some ranks call, because of a condition on the rank."""
    collectives = Collectives(source)
    unmatched = [found for branch in source.nodes for found in collectives.unmatched(branch)]
    for found in unmatched:
        holds, what = found.condition[0], _comparison(found)
        # The other ranks may make the same call in another place, such as a barrier before or after rank 0's download.
        same = [other for other in unmatched if other.name == found.name and _comparison(other) == what]
        pairs = [other for other in same if other.condition[0] is not holds]
        joined = found.name != "join" and collectives.joins(found)
        if not pairs and not joined:
            message = (
                f"only some ranks call {found.name}(), so the call hangs, or fails when a different rank shuts down; call "
                "it outside the condition"
            )
            yield Finding(found.call.lineno, "trap", message)


def loop_left_on_some_ranks(source: Source) -> Iterator[Finding]:
    """A loop that contains collectives and that only some ranks leave, for example by an early stop on rank 0."""
    collectives = Collectives(source)
    if source.hvd_calls("join"):
        return  # with join(), ranks may take different numbers of steps
    for jump in source.nodes:
        if isinstance(jump, ast.Break | ast.Return) and (found := collectives.in_left_loop(jump)):
            message = (
                f"only some ranks leave this loop, so that {found}() of the others hangs, or fails when a rank shuts down; "
                "leave it on all ranks at once, as by `if hvd.broadcast_object(stop):`"
            )
            yield Finding(jump.lineno, "trap", message)


def schedule_on_some_ranks(source: Source) -> Iterator[Finding]:
    """A learning-rate schedule that only some ranks step."""
    guards = Guards.of(source)
    steps = [call for call in source.calls if _steps_schedule(source, call)]
    for call in steps:
        others = [other for other in steps if ast.unparse(other.func) == ast.unparse(call.func) and other is not call]
        if guards.is_on_some_ranks(call) and not others and not sends_rate(source, call):
            message = (
                "only some ranks step the learning-rate schedule, so that learning rates, and then weights, differ between "
                "ranks; step it on all ranks, with the same metric if it takes one"
            )
            yield Finding(call.lineno, "trap", message)


def _steps_schedule(source: Source, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    assigned = source.values.get(ast.unparse(call.func.value), [])
    values = [value for value in assigned if not isinstance(value, ast.Constant)]  # scripts assign None for no schedule
    return bool(values) and all(_is_schedule(source, value) for value in values)


def _is_schedule(source: Source, value: ast.expr, depth: int = 0) -> bool:
    """Return whether ``value`` makes a schedule of torch or transformers, itself or by a function of the script."""
    if not isinstance(value, ast.Call):
        return False
    name = source.name(value.func)
    if source.makes_schedule(value) or re.fullmatch(r"transformers\.(\w+\.)*get_\w*schedule\w*", name):
        return True
    function = source.functions.get(value.func.id) if isinstance(value.func, ast.Name) and depth < 3 else None
    if function is None or source.is_ambiguous(function.name):
        return False
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and source.scope(node) is function]
    made = [one for node in returns for one in _values_of(source, function, node.value)]
    return bool(made) and all(_is_schedule(source, one, depth + 1) for one in made)


def _values_of(source: Source, function: Function, returned: ast.expr | None) -> list[ast.expr]:
    """Return the possible values of ``returned``, the expression after a ``return`` of ``function``, as expressions.

    For a variable, these are the values that ``function`` assigns to it; if there are none, the variable itself.
    """
    given = (
        [
            value
            for target, value, at in source.assignments
            if source.scope(at) is function and target == ast.unparse(returned)
        ]
        if isinstance(returned, ast.Name)
        else []
    )
    return given or ([returned] if returned is not None else [ast.Constant(None)])


def sends_rate(source: Source, step: ast.Call) -> bool:
    """Return whether the program may send rank 0's learning rate to the other ranks after ``step``, a schedule's step.

    True if a broadcast of the optimizer's state, or one that mentions a rate or a schedule, may run after ``step``. If it
    is unknown when a broadcast runs (:func:`_may_repeat`), it counts only if it mentions a rate or a schedule, or if it is
    one of several broadcasts of optimizer state in the file: a single one is usually before the first step. A broadcast in
    another file counts only if it mentions a rate or a schedule.
    """
    later = set(nodes_after_or_repeated(source, step))
    schedule = ast.unparse(step.func.value) if isinstance(step.func, ast.Attribute) else ""
    makers = {source.scope(at) for target, _, at in source.assignments if target == schedule}
    for file in source.files:
        sends = [call for call in file.calls if file.called(call).startswith("broadcast")]
        states = [call for call in sends if file.called(call) == "broadcast_optimizer_state"]
        for call in sends:
            named = re.search(RATE, ast.unparse(call)) is not None
            if file is not source:
                found = named
            else:
                sends_state = call in states
                found = call in later and (named or sends_state)
                found = found or ((named or (sends_state and len(states) > 1)) and _may_repeat(source, call, makers))
            if found:
                return True
    return False


def _may_repeat(source: Source, node: ast.AST, makers: Collection[Scope], depth: int = 0) -> bool:
    """Return whether code that is not examined may run ``node`` repeatedly, because it may call a function around ``node``.

    The functions ``makers``, which make the schedule, probably run only once.
    """
    scope = source.scope(node)
    if any(isinstance(above, ast.Lambda) for above in source.above(node)) or depth > 3:
        return True
    if not isinstance(scope, Function) or scope in makers:
        return False
    calls = list(calls_of(source, scope))
    kind = ast.Attribute if isinstance(source.parents[scope], ast.ClassDef) else ast.Name
    uses = [use for use in source.mentions.get(scope.name, ()) if isinstance(use, kind) and scope.name != "__init__"]
    if not calls or any(use not in [call.func for call in calls] for use in uses):
        return True  # ``sync``, for example, in ``engine.add_handler("epoch", sync)``
    return any(_may_repeat(source, call, makers, depth + 1) for call in calls)


def only_waits(source: Source, call: ast.Call) -> bool:
    """Return whether ``call``, a call of some ``synchronize``, waits for a handle, a wrapped optimizer or a device.

    Such a call starts no operation, except the exchange of a wrapped optimizer's gradients.
    """
    if name := source.name(call.func):
        return name.startswith("torch.") or source.hvd(call.func) == "synchronize"
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return owner in source.wrapped or "opt" in owner.lower()


def _comparison(unmatched: _Unmatched) -> str:
    """Return the part of the condition that compares the rank; its other parts may hold on all ranks."""
    return unmatched.condition[1].partition(" and ")[0]


class Collectives:
    """Finder of calls that all ranks must make.

    These are:

    - Horovod's collectives, except ``shutdown`` and calls with a process set;
    - ``step`` and ``synchronize`` of wrapped optimizers;
    - the methods of an elastic state that broadcast;
    - calls of the program's functions that certainly make such calls.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.guards = Guards.of(source)
        #: Functions of all files that make such calls.
        self.functions: set[Function] = set()
        for file in source.files[1:]:
            self.functions |= file.once(_own_collectives)
        self._find_functions()

    def _find_functions(self) -> None:
        """Add to ``functions`` those functions of this file that make such calls."""
        source = self.source
        for _ in range(4):  # nested calls, four levels deep
            self.functions |= {
                one for name, one in source.functions.items() if self._contains(one) and source.is_only(name)
            }

    def unmatched(self, branch: ast.AST) -> Iterator[_Unmatched]:
        """Yield the collective calls that only one arm of ``branch`` makes, if ``branch`` is an ``if`` on the rank.

        If only one arm ends with an exit or a jump, the code after ``branch`` counts as part of the other arm. Yield
        nothing if an ``if`` around ``branch`` already decides this condition.
        """
        if not isinstance(branch, ast.If | ast.IfExp) or (signature := self.guards.signature(branch.test)) is None:
            return
        if self.guards.is_decided(branch, signature[1]):
            return
        body = branch.body if isinstance(branch.body, list) else [branch.body]
        other = branch.orelse if isinstance(branch.orelse, list) else [branch.orelse]
        here, there = list(self._inside(body)), list(self._inside(other))
        leaves = [bool(arm) and self.guards.leaves(arm) for arm in (branch.body, branch.orelse) if isinstance(arm, list)]
        if isinstance(branch, ast.If) and leaves[0] is not leaves[1]:
            # With the condition ``rank == 0 and flag``, it is possible that no rank leaves the function here. A later call
            # under a condition of its own, such as ``not flag``, may then run on all ranks, so it is not counted as the
            # call of the other ranks.
            negated = branch.test.operand if isinstance(branch.test, ast.UnaryOp) else None
            test = branch.test if leaves[0] else negated
            several = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
            later = self._inside(self._following(branch))
            calls_after = there if leaves[0] else here
            calls_after += [(name, call) for name, call in later if not (several and self._is_conditional(call, branch))]
        holds, what = signature
        for calls, opposite, value in ((here, there, holds), (there, here, not holds)):
            matched = {name for name, _ in opposite}
            for name, call in calls:
                if name not in matched:
                    yield _Unmatched(name, call, self.source.scope(branch), (value, what))

    def in_left_loop(self, jump: ast.Break | ast.Return) -> str:
        """Return a collective that other ranks call in a loop that only some ranks leave by ``jump``, or ""."""
        below: ast.AST = jump
        inside: list[tuple[ast.If, ast.AST]] = []
        for above in self.source.above(jump):
            if isinstance(above, ast.For | ast.While | Function) and below not in getattr(above, "orelse", ()):
                break
            if isinstance(above, ast.If) and below is not above.test and self.guards.signature(above.test):
                inside.append((above, below))
            below = above
        if not inside or not isinstance(above, ast.For | ast.While):
            return ""
        tests = [one.test for one in self.source.around(jump, ast.If) if above in self.source.above(one)]
        if isinstance(above, ast.For) and any(_compares_equal(test, above.target) for test in tests):
            return ""  # the jump perhaps belongs to the last iteration, after which all ranks leave the loop
        branch, arm = inside[-1]
        other = [*(branch.orelse if arm in branch.body else branch.body), *self._following(branch)]
        around = [one for one in self.source.around(branch, ast.If) if above in self.source.above(one)]
        other += [later for one in around for later in self._following(one)]
        if not is_unconditional(above) or any(may_leave(node) for part in other for node in ast.walk(part)):
            return ""  # the other ranks perhaps leave the loop too
        return next((name for name, call in self._inside(above.body) if branch not in self.source.above(call)), "")

    def in_one_arm(self, branch: ast.If) -> str:
        """Return a collective on only one of the two paths through ``branch`` and the code after it.

        Return "" if there is none, or if an arm ends the loop or the program.
        """
        last = [node for arm in (branch.body, branch.orelse) for part in arm[-1:] for node in ast.walk(part)]
        ends = any(may_leave(node) and not isinstance(node, ast.Return) for node in last)
        if ends or any(map(self._ends_program, last)):
            return ""  # the loop or the program ends
        later = self._following(branch)
        for above in self.source.above(branch):
            if isinstance(above, ast.For | ast.While | Function):
                break
            later += self._following(above) if isinstance(above, ast.If) else []
        paths = [[*arm, *([] if arm and self.guards.leaves(arm) else later)] for arm in (branch.body, branch.orelse)]
        here, there = ([name for name, _ in self._inside(path)] for path in paths)
        return next((name for name in (*here, *there) if (name in here) is not (name in there)), "")

    def _ends_program(self, node: ast.AST) -> bool:
        """Return whether ``node`` calls a function of the script whose last statement is ``raise`` or an exit."""
        function = called_function(self.source, node) if isinstance(node, ast.Call) else None
        last = function.body[-1] if function is not None else node
        return last is not node and (isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and may_leave(last.value)))

    def _is_conditional(self, call: ast.Call, branch: ast.If) -> bool:
        """Return whether an ``if`` that does not contain ``branch`` decides whether ``call`` runs."""
        around = set(self.source.above(branch))
        return any(isinstance(above, ast.If) and above not in around for above in self.source.above(call))

    def first_in(self, nodes: Sequence[ast.AST]) -> str:
        """Return the name of the first collective call in ``nodes``; "" if there is none."""
        return next((name for name, _ in self._inside(nodes)), "")

    def joins(self, unmatched: _Unmatched) -> bool:
        """Return whether the ranks that do not make the call ``unmatched`` may call ``join`` in the same function."""
        joins = (call for call in self.source.hvd_calls("join") if self.source.scope(call) is unmatched.function)
        return any(not self.guards.is_in_same_rank_branch(call, unmatched.call) for call in joins)

    def _inside(self, nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
        """Yield the collective calls in ``nodes``, except inside definitions of functions and classes, and lambdas."""
        for node in nodes:
            if isinstance(node, Function | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(node, ast.Call) and (name := self._collective(node)):
                yield name, node
            yield from self._inside(list(ast.iter_child_nodes(node)))

    def _following(self, branch: ast.If) -> list[ast.stmt]:
        """Return the statements after ``branch`` in its block."""
        block = self.source.block(branch)
        return block[block.index(branch) + 1 :]

    def _collective(self, call: ast.Call) -> str:
        name, called = self.source.hvd(call.func), last_name(call.func)
        if name in COLLECTIVES - {"shutdown"}:  # shutdown on one rank ends Horovod on all ranks
            return name if keyword(call, "process_set") is None else ""
        _, function = self.guards.kinds.function(call.func) or (None, called_function(self.source, call))
        if function in self.functions:
            return called
        if isinstance(call.func, ast.Attribute) and called in _OF_STATE and self._is_state(call.func.value):
            return called
        stepping = isinstance(call.func, ast.Attribute) and last_name(call.func.value) in self.source.wrapped
        return called if stepping and called in ("step", "synchronize") else ""

    def _is_state(self, owner: ast.expr) -> bool:
        """Return whether ``owner`` was assigned an elastic state, or is the first parameter of an elastic.run function."""
        values = [value for value in self.source.values.get(ast.unparse(owner), ()) if isinstance(value, ast.Call)]
        if any(re.fullmatch(r"elastic\.\w*State", self.source.hvd(value.func)) for value in values):
            return True
        for function in (above for above in self.source.above(owner) if isinstance(above, Function)):
            first = function.args.args[0].arg if function.args.args else ""
            if any(self.source.hvd(each) == "elastic.run" for each in function.decorator_list):
                return isinstance(owner, ast.Name) and owner.id == first
        return False

    def _contains(self, function: Function) -> bool:
        """Return whether ``function`` certainly makes a call that all ranks must make."""
        return any(self.guards.runs_whenever(call, function) for _, call in self._inside(function.body))


def _own_collectives(source: Source) -> set[Function]:
    """Return the functions of one file that make calls that all ranks must make, directly or by functions of the file."""
    return Collectives(source.alone()).functions


def may_leave(node: ast.AST) -> bool:
    """Return whether ``node`` may end a loop, function or process. ``Guards.leaves`` tests whether a block must do so."""
    exits = isinstance(node, ast.Call) and last_name(node.func).lower() in ("abort", "exit", "_exit", "quit")
    return exits or isinstance(node, ast.Break | ast.Return | ast.Raise)


def _compares_equal(test: ast.expr, target: ast.expr) -> bool:
    """Return whether ``test`` contains a comparison such as ``epoch == last`` with a variable of a loop.

    ``step % 100 == 0`` does not count: it is also true before the last iteration.
    """
    names = variables_in(target)
    return any(
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Eq)
        and not names.isdisjoint(variables_in(node))
        and not re.search(r"% (\d+|[\w.]*(every|freq|interval)\w*) == 0$", ast.unparse(node))
        for node in ast.walk(test)
    )
