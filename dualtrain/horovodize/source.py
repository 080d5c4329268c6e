"""A script's syntax tree with resolved names, for the rules of ``--check``. The script is never run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from dualtrain.horovodize.bindings import Bindings
from dualtrain.horovodize.edits import Edit, Layout
from dualtrain.horovodize.names import HOMES, MODULE_NAMES, PUBLIC
from dualtrain.horovodize.nodes import argument_at, calls_in, is_stored, keyword, last_name, loaded_module
from dualtrain.horovodize.normal_form import normalized

T = TypeVar("T")
N = TypeVar("N", bound=ast.AST)
#: "differs": the code works, but not as on Horovod. "trap": it is probably wrong, on Horovod too. "unsupported": it does
#: not work with dualtrain.
Level = Literal["differs", "trap", "unsupported"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler\b|swa_utils\b)(\w+\.)?[A-Z]\w*")
_SCHEDULE = re.compile(r"torch\.optim\.(lr_scheduler\.\w+|swa_utils\.SWALR)")
#: A module or function. Rules about the order of calls check one scope at a time.
Scope = ast.Module | Function


class Finding(NamedTuple):
    """A rule's finding about one line, with the ``edits`` of the safe repair, if there is one."""

    line: int
    level: Level
    message: str
    edits: tuple[Edit, ...] = ()


class Source:
    """Syntax tree of one script, with resolved imports.

    Below, horovod.torch stands for each of the modules in ``HOMES``: dualtrain.hvd has the same API.

    Args:
        text: source code of the script.

    Raises:
        SyntaxError: the text is not valid Python. ValueError, RecursionError and MemoryError are possible too.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = normalized(ast.parse(text))
        #: All nodes in source order.
        self.nodes = list(_in_order(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._bindings = Bindings(self.nodes, self.parents, self._imports_of)
        self._full_names: dict[ast.AST, str] = {}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        #: Names of the variables that hold an hvd.DistributedOptimizer: ``optimizer`` for ``self.optimizer``. These are the
        #: variables of this file or, after ``make_program`` (``wrapped_names.py``), those of the program.
        self.wrapped = {name for name, _ in self.wraps}
        #: This file, and then the other files of the program.
        self.files = [self]
        self._computed: dict[object, Any] = {}

    def with_text(self, text: str) -> Source:
        """Return a Source for this file with the new ``text``; its program has copies of the other files.

        The files of this program are not changed. Raise what the constructor raises.
        """
        after = Source(text)
        after.wrapped |= self.wrapped
        connect([after, *map(copy, self.files[1:])])
        return after

    def alone(self) -> Source:
        """Return a copy of this file that is the only file of its program, and shares no results of :meth:`once`."""
        copied = copy(self)
        copied.files, copied._computed = [copied], {}
        return copied

    def once(self, compute: Callable[[Source], T]) -> T:
        """Return ``compute(self)``, which is called only once.

        A repair of another file copies this object, and the copy shares the result. So the result must not depend on code
        of other files that a repair may change.
        """
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return self._computed[compute]  # type: ignore[no-any-return]

    @cached_property
    def code(self) -> str:
        """The script without comments and docstrings, and without spaces between tokens.

        This is the whole text if it cannot be tokenized.
        """
        # Don't use ast.unparse, which fails for a sum of some hundred terms.
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(self.text, newline=None).readline))
        except (tokenize.TokenError, SyntaxError):  # unusual line ends, for example, which only the parser accepts
            return self.text
        tokens = [token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL)]
        starts = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        before = [tokenize.NEWLINE, *(token.type for token in tokens)]
        after = [*(token.type for token in tokens[1:]), tokenize.NEWLINE]
        return "".join(
            token.string
            for token, last, following in zip(tokens, before, after, strict=False)
            if not (token.type == tokenize.STRING and last in starts and following == tokenize.NEWLINE)
        )

    @cached_property
    def layout(self) -> Layout:
        """Positions in the text, for repairs."""
        # Don't use self.tree, which has ``if`` in place of ``match``, and so a wrong width of indentation.
        return Layout(self.text, ast.parse(self.text))

    def _imports_of(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield (name in the script, full name) for each name that an absolute import or a call of import_module binds."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names = PUBLIC if alias.name == "*" and self._has_api(node.module) else [alias.name]
                yield from ((alias.asname or name, f"{node.module}.{name}") for name in names)
        elif isinstance(node, ast.Assign | ast.NamedExpr) and loaded_module(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, loaded_module(node.value)) for target in targets if isinstance(target, ast.Name))

    @staticmethod
    def _has_api(module: str) -> bool:
        """Return whether ``module`` is horovod.torch, dualtrain.hvd, or the submodule mpi_ops of one of them."""
        return module in HOMES or module in {f"{home}.mpi_ops" for home in HOMES}

    def name(self, node: ast.AST) -> str:
        """Return the full dotted name of ``node`` according to the imports, or an empty string if it is not imported."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return ""
        if node not in self._full_names:  # many rules ask for the names of all nodes
            if isinstance(node, ast.Name):
                self._full_names[node] = self._bindings.full_name(node)
            else:
                base = self.name(node.value)
                self._full_names[node] = f"{base}.{node.attr}" if base else self._stored_module(node)
        return self._full_names[node]

    def _stored_module(self, node: ast.Attribute) -> str:
        return self._stored_modules.get(ast.unparse(node), "") if self._stored_modules else ""

    @cached_property
    def _stored_modules(self) -> dict[str, str]:
        """Map of each attribute that holds horovod.torch or None, such as ``self.hvd``, to the full name of the module."""
        found: dict[str, set[str]] = {}
        for target, value, at in self.assignments:
            if "." in target and not (isinstance(value, ast.Constant) and value.value is None):
                found.setdefault(target, set()).add(self._module(value) if isinstance(at, ast.Assign) else "")
        return {target: names.pop() for target, names in found.items() if len(names) == 1 and names <= set(HOMES)}

    def _module(self, value: ast.expr) -> str:
        """Return the full name of the module in ``value``, a name or a call of ``importlib.import_module``; else ""."""
        if isinstance(value, ast.Name):
            return self._bindings.full_name(value)
        return loaded_module(value)

    def hvd(self, node: ast.AST) -> str:
        """Return the name of ``node`` in horovod.torch (``allreduce``, ``elastic.run``), or an empty string."""
        first, _, rest = self.hvd_path(node).partition(".")
        return rest if first in MODULE_NAMES and rest else f"{first}.{rest}".rstrip(".")

    def called(self, call: ast.Call) -> str:
        """Return the name in horovod.torch of the function that ``call`` calls, or else its last name in the script."""
        return self.hvd(call.func) or last_name(call.func)

    def hvd_path(self, node: ast.AST) -> str:
        """Return the name of ``node`` in horovod.torch with its submodule (``mpi_ops.allreduce``), or an empty string."""
        full = self.name(node)
        return next((full.removeprefix(f"{root}.") for root in HOMES if full.startswith(f"{root}.")), "") if full else ""

    def hvd_calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of the functions ``names`` of horovod.torch."""
        return [call for name, call in self._named_calls if name in names]

    @cached_property
    def _named_calls(self) -> list[tuple[str, ast.Call]]:
        """The calls of functions of horovod.torch, each with the function's name, in source order."""
        return [(name, call) for call in self.calls if (name := self.hvd(call.func))]

    def spell(self, name: str, place: ast.AST) -> str:
        """Return the expression by which code at the node ``place`` can refer to horovod.torch's ``name``: ``hvd.rank``.

        Return "" if no import of it certainly runs before ``place``, or if a variable or a parameter may hide the import.
        """
        for node in self.nodes:
            if not isinstance(node, ast.Import | ast.ImportFrom) or not self._is_certain(node, place):
                continue
            for bound, full in self._imports_of(node):
                if self._bindings.meaning(bound, place, certain=True) != full:
                    continue
                if full in HOMES:
                    return f"{bound}.{name}"
                if full in {f"{home}.{name}" for home in HOMES}:
                    return bound
        return ""

    def _is_certain(self, node: ast.stmt, place: ast.AST) -> bool:
        """Return whether the import statement ``node`` certainly runs before ``place``."""
        scope = self.parents[node]
        if scope is self.tree:
            return self.scope(place) is not self.tree or node.lineno < getattr(place, "lineno", 0)
        return scope is self.scope(place) and node.lineno < getattr(place, "lineno", 0)

    def imports_torch(self, place: ast.AST) -> bool:
        """Return whether an import statement that certainly runs before ``place`` binds the name ``torch``."""
        imports = (node for node in self.nodes if isinstance(node, ast.Import) and self._is_certain(node, place))
        return any(bound == "torch" for node in imports for bound, _ in self._imports_of(node))

    @cached_property
    def imported_names(self) -> set[str]:
        """Full names of everything that is imported."""
        return set(self._bindings.imported.values())

    @property
    def may_have_stub(self) -> bool:
        """Return whether another module may have horovod.torch's name: ``except ImportError: import stub as hvd``."""
        return self._bindings.may_have_stub

    @cached_property
    def uses_elastic(self) -> bool:
        """Return whether the script uses ``hvd.elastic``."""
        return any(self.hvd(node).startswith("elastic.") for node in self.nodes)

    @cached_property
    def uses_horovod(self) -> bool:
        """Return whether the script imports anything from horovod, or from a module of dualtrain that replaces it."""
        names = (*self.imported_names, *self._stored_modules.values(), *map(loaded_module, self.calls))
        return any(re.match(r"horovod|dualtrain\.(hvd|ray|spark)\b", name) for name in names)

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr, ast.stmt]]:
        """All assignments: (target as text, value, statement). Tuples of equal length on both sides are split.

        The statement of ``:=`` is the one that contains it. The value of ``x += y`` is ``y``.
        """
        found: list[tuple[str, ast.expr, ast.stmt]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found += [(ast.unparse(t), value, node) for t, value in _pairs(target, node.value)]
            elif isinstance(node, ast.AugAssign):
                found.append((ast.unparse(node.target), node.value, node))
            elif isinstance(node, ast.NamedExpr):
                found.append((node.target.id, node.value, self.statement(node)))
        return found

    @cached_property
    def values(self) -> dict[str, list[ast.expr]]:
        """Map of each target, as text, to all values that are assigned to it."""
        found: dict[str, list[ast.expr]] = {}
        for target, value, _ in self.assignments:
            found.setdefault(target, []).append(value)
        return found

    def possible_values(self, value: ast.expr | None) -> list[ast.expr]:
        """Return ``value``, and all values that are assigned to it if it is a variable; an empty list for None."""
        return [] if value is None else [value, *self.values.get(ast.unparse(value), ())]

    def local_values(self, variable: ast.expr) -> list[ast.expr]:
        """Return the values that are assigned to ``variable`` in its function; if there are none, all other values.

        For a local variable, values that are assigned outside of its function never count.
        """
        values = self.values.get(ast.unparse(variable), [])
        scope = self.scope(variable)
        stores = filter(is_stored, self.mentions.get(variable.id, ())) if values and isinstance(variable, ast.Name) else ()
        found = [value for value in values if self.scope(value) is scope]
        local = any(isinstance(node, ast.Name) and self.scope(node) is scope for node in stores)
        return found if found or local or ast.unparse(variable) in self.parameters(variable) else values

    def constant(self, value: ast.expr | None) -> ast.Constant | None:
        """Return ``value`` if it is a constant; for a variable, the only constant that is certainly assigned to it.

        Return None for attributes, for parameters of functions, for variables of loops, and for variables that are assigned
        more than once or conditionally. A test of ``__name__`` does not count as a condition.
        """
        if value is None or isinstance(value, ast.Constant):
            return value
        text = ast.unparse(value)
        found = [(given, at) for target, given, at in self.assignments if target == text]
        if not isinstance(value, ast.Name) or len(found) != 1 or value.id in self.parameters(value):
            return None
        if sum(isinstance(node, ast.Name) for node in filter(is_stored, self.mentions[value.id])) > 1:
            return None
        given, at = found[0]
        around = next(above for above in self.above(at) if not isinstance(above, ast.With))
        guarded = isinstance(around, ast.If) and "__name__" in ast.unparse(around.test)
        certain = isinstance(around, ast.Module | Function) or guarded
        plain = isinstance(at, ast.Assign) and not isinstance(self.parents[given], ast.NamedExpr)
        return given if certain and plain and isinstance(given, ast.Constant) else None

    @cached_property
    def wraps(self) -> list[tuple[str, ast.Call]]:
        """Calls of hvd.DistributedOptimizer, each with the name of the variable that it is assigned to."""
        return [
            (target.rpartition(".")[2], value)
            for target, value, _ in self.assignments
            if isinstance(value, ast.Call) and self.hvd(value.func) == "DistributedOptimizer"
        ]

    @property
    def plain_optimizers(self) -> set[str]:
        """Names of the variables to which an optimizer of torch is assigned."""
        return {target.rpartition(".")[2] for target, value, _ in self.assignments if self.makes_optimizer(value)}

    def makes_optimizer(self, value: ast.AST) -> bool:
        """Return whether ``value`` is a call that makes an optimizer of torch."""
        return isinstance(value, ast.Call) and _OPTIMIZER.fullmatch(self.name(value.func)) is not None

    def makes_schedule(self, value: ast.AST) -> bool:
        """Return whether ``value`` is a call that makes a learning-rate schedule of torch."""
        return isinstance(value, ast.Call) and _SCHEDULE.fullmatch(self.name(value.func)) is not None

    def is_plain(self, optimizer: ast.expr) -> bool:
        """Return whether ``optimizer`` is a function's local variable to which only torch's optimizers are assigned."""
        scope = self.scope(optimizer)
        if not isinstance(optimizer, ast.Name) or scope is self.tree:
            return False
        values = [value for target, value, at in self.assignments if target == optimizer.id and self.scope(at) is scope]
        return bool(values) and all(map(self.makes_optimizer, values))

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods of the script by name."""
        return {node.name: node for node in self.nodes if isinstance(node, Function)}

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Classes of the script."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def called_names(self) -> list[tuple[str, set[str]]]:
        """Functions and methods of the script, each with the names of what it calls: "step" for ``o.step()``."""
        functions = [node for node in self.nodes if isinstance(node, Function)]
        return [(one.name, {last_name(call.func) for call in calls_in(one)} - {""}) for one in functions]

    @cached_property
    def _definitions_of_names(self) -> Counter[str]:
        return Counter(node.name for node in self.nodes if isinstance(node, Function))

    def is_ambiguous(self, name: str) -> bool:
        """Return whether the function ``name`` is a method, is defined several times, or is also assigned as a variable."""
        function = self.functions.get(name)
        method = function is not None and isinstance(self.parents[function], ast.ClassDef)
        return method or self._definitions_of_names[name] > 1 or name in self.values

    def is_only(self, name: str) -> bool:
        """Return whether the script defines one function or method ``name``, and assigns nothing to this name.

        For a method, only assignments to attributes and class variables of this name count.
        """
        if self._definitions_of_names[name] != 1:
            return False
        method = isinstance(self.parents[self.functions[name]], ast.ClassDef)
        return name not in (self._assigned_attributes if method else self.values)

    @cached_property
    def _assigned_attributes(self) -> set[str]:
        """Names of the attributes and class variables that the script assigns."""
        found = (
            target for target, _, at in self.assignments if "." in target or isinstance(self.parents[at], ast.ClassDef)
        )
        return {target.rpartition(".")[2] for target in found}

    def is_instance(self, owner: ast.expr, cls: ast.AST) -> bool:
        """Return whether ``owner`` is an object of the script's class ``cls``, or a variable to which one is assigned."""
        return any(isinstance(value, ast.Call) and self.constructs(value, cls) for value in self.possible_values(owner))

    def constructs(self, call: ast.Call, cls: ast.AST) -> bool:
        """Return whether ``call`` makes an object of the script's class ``cls``: by its name, or as ``cls()``."""
        name = last_name(call.func)
        return name == getattr(cls, "name", "") or (name == "cls" and self.parents.get(self.scope(call)) is cls)

    @cached_property
    def mentions(self) -> dict[str, list[ast.AST]]:
        """Nodes by the name that they mention: variables, attributes, imported names and strings."""
        found: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            name = node.name if isinstance(node, ast.alias) else last_name(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value  # getattr(module, "name"), for example
            found.setdefault(name, []).append(node)
        return found

    @cached_property
    def scopes(self) -> dict[Scope, list[ast.AST]]:
        """Map of the module and of every function to its own nodes in source order."""
        own: dict[Scope, list[ast.AST]] = {node: [] for node in self.nodes if isinstance(node, Scope)}
        for node in self.nodes[1:]:
            own[self.scope(node)].append(node)
        return own

    @cached_property
    def definitions(self) -> list[tuple[str, list[str]]]:
        """Functions, methods, and classes with ``__init__``: (name, names of the parameters for positional arguments)."""
        found = []
        for node in self.nodes:
            if isinstance(node, Function):
                parent = self.parents[node]
                name = parent.name if isinstance(parent, ast.ClassDef) and node.name == "__init__" else node.name
                found.append((name, self.positional(node)))
        return found

    def positional(self, function: Function) -> list[str]:
        """Return the names of the parameters for positional arguments, without ``self`` or ``cls`` of a method."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        static = any(last_name(each) == "staticmethod" for each in function.decorator_list)
        return names[isinstance(self.parents[function], ast.ClassDef) and not static :]

    def argument(self, function: Function, call: ast.Call, parameter: str) -> ast.expr | None:
        """Return what ``call`` passes for ``parameter`` of ``function``; None if it passes nothing.

        Return None, too, if the argument is positional, and it or an earlier one is unpacked (``*values``).
        """
        named, names = keyword(call, parameter), self.positional(function)
        if named is not None or parameter not in names:
            return named
        position = names.index(parameter)
        if any(isinstance(one, ast.Starred) for one in call.args[: position + 1]):
            return None
        return argument_at(call, position, parameter)

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function, or else the module, that contains ``node``."""
        return next(above for above in self.above(node) if isinstance(above, Scope))

    def parameters(self, node: ast.AST) -> set[str]:
        """Return the names of the parameters of the function that contains ``node``, without ``*args`` and ``**kwargs``."""
        scope = self.scope(node)
        given = scope.args if isinstance(scope, Function) else ast.arguments([], [], None, [], [], None, [])
        return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain ``node``, from the innermost to the outermost."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def around(self, node: ast.AST, kind: type[N]) -> Iterator[N]:
        """Yield the nodes of one ``kind`` that contain ``node``, from the innermost to the outermost."""
        return (above for above in self.above(node) if isinstance(above, kind))

    def with_items(self, node: ast.AST) -> Iterator[ast.withitem]:
        """Yield the items of the ``with`` statements that contain ``node``, from the innermost to the outermost."""
        return (item for block in self.around(node, ast.With) for item in block.items)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return ``node`` if it is a statement, else the innermost statement that contains it."""
        return next(above for above in (node, *self.above(node)) if isinstance(above, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains ``statement``."""
        parent = self.parents[statement]
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        return next(block for block in blocks if isinstance(block, list) and statement in block)

    def is_caught(self, node: ast.AST, errors: str) -> bool:
        """Return whether :meth:`catching_try` finds a ``try``."""
        return self.catching_try(node, errors) is not None

    def catching_try(self, node: ast.AST, errors: str) -> ast.Try | None:
        """Return the innermost ``try`` with ``node`` in its body that catches an exception whose name matches ``errors``.

        Return None if there is none. A bare ``except:`` is matched as if it were ``except Exception:``.
        """
        below = node
        for above in self.above(node):
            if isinstance(above, ast.Try) and below in above.body:
                caught = (ast.unparse(handler.type) if handler.type else "Exception" for handler in above.handlers)
                if re.search(errors, " ".join(caught)):
                    return above
            below = above
        return None

    def exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Return whether the nodes are in branches that exclude each other.

        Such branches are the body and the ``else`` of one ``if``, or of two ``if`` with the same condition. Or the branches
        are for different values of one variable, as the bodies of ``if mode == 0:`` and ``if mode == 1:``.
        """
        arms = dict(arm for above, below in self._branches(one) for arm in self._arms(above, below))
        others = (arm for above, below in self._branches(other) for arm in self._arms(above, below))
        return any(arms.get(key, arm) != arm for key, arm in others)

    def _arms(self, branch: ast.AST, below: ast.AST) -> Iterator[tuple[object, object]]:
        """Yield (key, value): a key of the condition of ``branch``, and the condition's value where ``below`` runs.

        There are up to three keys:

        1. The node ``branch``.
        2. The condition's text without ``not``. If the condition contains a parameter (other than ``self`` and ``args``) of
           the function around it, the key also contains this function.
        3. A variable that certainly keeps its value, and must be equal to a constant where ``below`` runs; with the
           function as in key 2. The value is this constant.

        If the condition contains a call or ``:=``, only the first key is yielded, because the condition's value may change
        between two evaluations.
        """
        arm = _is_in_body(branch, below)
        yield branch, arm
        test = getattr(branch, "test", branch)
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, arm = test.operand, not arm
        nodes = list(ast.walk(test))
        if not any(isinstance(node, ast.Call | ast.NamedExpr) for node in nodes):
            local = {node.id for node in nodes if isinstance(node, ast.Name)} & set(self.parameters(branch)) - {
                "self",
                "args",
            }
            home = self.scope(branch) if local else None
            yield (home, ast.unparse(test)), arm
            if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq if arm else ast.NotEq]:
                variable, constant = test.left, test.comparators[0]
                if isinstance(constant, ast.Constant) and self._keeps_value(variable):
                    yield (home, "value", ast.unparse(variable)), constant.value

    def _keeps_value(self, variable: ast.expr) -> bool:
        """Return whether ``variable`` certainly keeps its value.

        Assignments to any variable or attribute with the same last name count as assignments to ``variable``. Variables
        that are assigned in a loop, parameters of functions, and attributes of ``self`` or ``cls`` may have several values.
        """
        stores = list(filter(is_stored, self.mentions.get(last_name(variable), ())))
        loops = any(isinstance(above, ast.For | ast.While) for store in stores for above in self.above(store))
        varies = loops or ast.unparse(variable).startswith(("self.", "cls.")) or last_name(variable) in self._parameters
        return isinstance(variable, ast.Name | ast.Attribute) and len(stores) <= 1 and not varies

    @cached_property
    def _parameters(self) -> set[str]:
        """Names of the parameters of all functions of the script."""
        return {node.arg for node in self.nodes if isinstance(node, ast.arg)}

    def _branches(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (``if``, its child that contains ``node``) for each ``if`` that has ``node`` in a branch."""
        below = node
        for above in self.above(node):
            if isinstance(above, ast.If | ast.IfExp) and below is not above.test:
                yield above, below
            below = above


def connect(files: Sequence[Source]) -> None:
    """Make ``files`` one program."""
    for file in files:
        file.files = [file, *(other for other in files if other is not file)]


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _is_in_body(branch: ast.AST, below: ast.AST) -> bool:
    """Return whether ``below`` is in the body of the ``if`` statement or expression ``branch``, not in its ``else``."""
    body = getattr(branch, "body", None)
    return below in body if isinstance(body, list) else below is body


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)
    else:
        yield target, value
