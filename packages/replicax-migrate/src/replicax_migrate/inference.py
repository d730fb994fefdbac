"""What the expressions of a program are, as far as distribution goes: names of TensorFlow, strategies, contexts."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from replicax_migrate.bindings import Binding, Bindings, NameScope, defaults, last_name, parameters, returned
from replicax_migrate.counterparts import paths
from replicax_migrate.original_names import KINDS, MODERN, ROLES, TOWER
from replicax_migrate.run_names import RUNS


@dataclasses.dataclass(frozen=True)
class DottedName:
    """A dotted name of TensorFlow's, after ``tensorflow.``; of today's, with ``replicax`` before it."""

    path: str
    is_sure: bool = True  # whether the program never binds anything else to it

    def is_like(self, other: DottedName) -> bool:
        """Whether both are surely the same name, perhaps of two releases, which had it in different modules."""
        return self.is_sure and other.is_sure and self.path.rpartition(".")[2] == other.path.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Instance:
    """A value of a kind, one of those in ``MEMBERS``."""

    kind: str
    is_sure: bool = True  # false if only a name suggests it
    is_today: bool = False  # whether it is Replicax's already


@dataclasses.dataclass(frozen=True)
class Method:
    """A member of a value, not called yet."""

    of: Instance
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A function or class of the program itself."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


Known: TypeAlias = DottedName | Instance | Method | Definition

NAMED = {
    "Strategy": re.compile(r"(^|_)(dist_|distribution_|distribute_)?(strategy|distribution|dist_strat|strat)$"),
    "ReplicaContext": re.compile(r"(^|_)(replica|tower)_(context|ctx)$"),
    "InputContext": re.compile(r"^input_(context|ctx)$"),
}
"""What a value is whose name is all that says so."""

_MAKES_STRATEGY = re.compile(r"^(get|create|make|build|init|setup|define|choose|select).*_strategy$|strategy_(fn|cls)$")
_CLASSES: dict[str, str] = {**paths(RUNS), **paths(TOWER), **paths(MODERN)}
_LAST_NAMES = set(_CLASSES.values())
DISTINCT = {
    name for name in _LAST_NAMES if re.search(r"\w(Strategy|ClusterResolver)$", name) and name != "DistributionStrategy"
}
"""Classes that nothing else has the name of, wherever a program has them from."""


def canonical(path: str) -> str | None:
    """A dotted path as ``MODERN`` and ``TOWER`` have it, wherever it was imported from; ``None`` if not theirs."""
    if path == "replicax" or path.startswith("replicax."):
        return path
    root, _, rest = path.partition(".")
    if root == "keras":
        return path  # as it is in tf.keras
    if root not in ("tensorflow", "tf"):
        return None
    rest = re.sub(r"^(compat\.v[12](\.|$))+", "", rest)
    last = rest.rpartition(".")[2]
    if re.fullmatch(r"(python|contrib)\.tpu\.(\w+\.)*device_assignment\.device_assignment", rest):
        return "tpu.experimental.DeviceAssignment.build"
    if last in _LAST_NAMES and re.match(r"python\.(distribute|training\.distribut|tpu)|contrib\.\w+\.python", rest):
        homes = [path for path, name in _CLASSES.items() if name == last]
        return next((path for path in homes if path.startswith("contrib") == rest.startswith("contrib")), homes[0])
    return rest


class Inference:
    """What the expressions of one program are."""

    def __init__(self, tree: ast.Module) -> None:
        self.bindings = Bindings(tree)
        self._known: dict[ast.AST, Known | None] = {}
        self._asked: set[ast.AST] = set()
        self._tentative: set[ast.AST] = set()
        self._is_circular = False

    def of(self, node: ast.AST) -> Known | None:
        """What an expression is; ``None`` if that has nothing to do with distribution, or can't be told."""
        if node in self._known:
            self._is_circular |= node in self._tentative
            return self._known[node]
        if node in self._asked:
            self._is_circular = True  # in terms of itself, of which nothing is known so far
            return None
        outside, self._is_circular = self._is_circular, False
        self._asked.add(node)
        found = self._known[node] = self._evaluate(node)
        self._asked.discard(node)
        if found is None and self._is_circular and self._asked:
            self._tentative.add(node)  # perhaps only because of what it was asked for
        if not self._asked:
            for each in self._tentative:
                del self._known[each]
            self._tentative.clear()
        self._is_circular |= outside
        return found

    def is_imported(self, name: ast.Name) -> bool:
        """Whether a name is what an import has made it."""
        scope = self.bindings.scope_of.get(name, self.bindings.module)
        return any(binding.how == "import" for binding in scope.lookup(name.id)) or self.is_from_star(name)

    def is_from_star(self, name: ast.Name) -> bool:
        """Whether a name is one that ``from tensorflow import *``, or the like, has brought."""
        scope = self.bindings.scope_of.get(name, self.bindings.module)
        return not scope.lookup(name.id) and self._from_star(name.id) is not None

    def _from_star(self, name: str) -> DottedName | None:
        """What a name is that nothing in the program binds, if it is one of distribution's in such a module."""
        for module in self.bindings.stars:
            path = canonical(f"{module}.{name}")
            if path and any(f"{known}.".startswith(f"{path}.") for known in _CLASSES):
                return DottedName(path)
        return None

    def _evaluate(self, node: ast.AST) -> Known | None:
        match node:
            case ast.Name():
                return self.name(node.id, self.bindings.scope_of.get(node, self.bindings.module))
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.Lambda():
                return Definition(node)
            case ast.IfExp():
                return self._first([node.body, node.orelse])
            case ast.BoolOp():
                return self._first(node.values if isinstance(node.op, ast.Or) else node.values[-1:])
            case ast.NamedExpr() | ast.Await():
                return self.of(node.value)
        return None

    def _first(self, nodes: Iterable[ast.AST], bindings: Sequence[Binding] = ()) -> Known | None:
        """What one of several expressions is, which the name that has the bindings, if there is one, stands for."""
        found = ((self.of(node), node) for node in nodes)
        return _one_of([known for known, node in found if known or not self._is_none_or_of(node, bindings)])

    def name(self, name: str, scope: NameScope) -> Known | None:
        """What a name is in a scope."""
        bindings = scope.lookup(name)
        if not bindings and (found := self._from_star(name)) is not None:
            return found
        if name in ("tf", "tf1", "tf2") and all(binding.how == "import" for binding in bindings):
            known = self._bound(bindings) or DottedName("")  # imported from a module of the program's own
            return dataclasses.replace(known, is_sure=True) if isinstance(known, DottedName) else known
        return self._bound(bindings) or by_name(name)

    def _bound(self, bindings: list[Binding]) -> Known | None:
        found = ((self._binding(binding), binding) for binding in bindings)
        return _one_of([known for known, binding in found if known or self._may_differ(binding, bindings)])

    def _may_differ(self, binding: Binding, bindings: list[Binding]) -> bool:
        """Whether a binding of which nothing is known may be to something else than the others."""
        is_value = binding.how == "value"
        return binding.how != "annotation" and not (is_value and self._is_none_or_of(binding.node, bindings))

    def _is_none_or_of(self, node: ast.AST, bindings: Sequence[Binding]) -> bool:
        """Whether an expression is ``None``, or made from the name that it is bound to, as in ``tf = tf.compat.v1``."""
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        scopes = self.bindings.scope_of
        is_of = any(name in scopes and scopes[name].lookup(name.id) is bindings for name in names)
        return is_of or (isinstance(node, ast.Constant) and node.value is None)

    def _binding(self, binding: Binding) -> Known | None:
        node = binding.node
        match binding.how:
            case "value":
                return self.of(node)
            case "with":
                found = self.of(node)
                return found if isinstance(found, Instance) else None
            case "item":
                if isinstance(node, ast.Call) and isinstance(function := self.of(node.func), Definition):
                    return self._first(self._returned(function, binding.index))
                found = self.of(node)  # of an element, each part is one for each replica
                return found if isinstance(found, Instance) and found.kind == "PerReplica" else None
            case "iteration":
                found = self.of(node)
                if isinstance(found, Instance) and found.kind in ("DistributedDataset", "DistributedIterator"):
                    return dataclasses.replace(found, kind="PerReplica")
            case "import":
                path = canonical(binding.path)
                return None if path is None else DottedName(path)
            case "definition":
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                return Definition(node)
            case "annotation":
                return self.annotated(node)
            case "parameter":
                assert isinstance(node, ast.arg)
                return self._parameter(node, binding.scope)
        return None

    def annotated(self, node: ast.AST) -> Known | None:
        """What a value with an annotation is."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = re.search(r"[\w.]*\b(?:Strategy|ReplicaContext|InputContext)\b", node.value)
            return by_name("strategy") if dotted and dotted[0].endswith("Strategy") else None
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return next((found for found in map(self.annotated, parts) if found), None)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left) or self.annotated(node.right)
        return self._made(self.of(node))

    def _parameter(self, parameter: ast.arg, scope: NameScope) -> Known | None:
        function = scope.node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if parameter.annotation is not None and (found := self.annotated(parameter.annotation)):
            return found
        owner = self.bindings.parents.get(function)
        names = [each.arg for each in parameters(function)]
        index = names.index(parameter.arg)
        if isinstance(owner, ast.ClassDef) and not isinstance(function, ast.Lambda):
            static = any(last_name(decorator) == "staticmethod" for decorator in function.decorator_list)
            if not static and index == 0:
                return self._made(Definition(owner))
            name = owner.name if function.name == "__init__" else function.name
            index -= not static
        else:
            name = "" if isinstance(function, ast.Lambda) else function.name
        given = [
            argument
            for call in self.bindings.calls.get(name, ())
            for argument in (_argument(call, parameter.arg, index),)
            if argument is not None
        ]
        default = defaults(function).get(parameter.arg)
        found = self._first([*given, *([default] if default is not None else [])], scope.names[parameter.arg])
        if found is None and index == 0:
            found = self._role(function)
        return found

    def _role(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Known | None:
        """What a function gets first that some method calls."""
        for method, kind in ROLES.items():
            for call in self.bindings.calls.get(method, ()):
                given = _argument(call, "", 0)
                if given is not None and isinstance(found := self.of(given), Definition) and found.node is function:
                    by = self.of(call.func)
                    return Instance(kind, is_today=isinstance(by, Method) and by.of.is_today)
        return None

    def _attribute(self, node: ast.Attribute) -> Known | None:
        owner = self.of(node.value)
        if isinstance(owner, DottedName):
            whole = f"{owner.path}.{node.attr}".lstrip(".")
            path = whole if whole.startswith("replicax.") else canonical(f"tf.{whole}") or ""
            return dataclasses.replace(owner, path=path)
        if isinstance(owner, Instance):
            given = KINDS.get(f"{owner.kind}.{node.attr}")
            if given in ("Strategy", "StrategyExtended", "ClusterResolver", "Topology") and node.attr != "scope":
                return dataclasses.replace(owner, kind=given)
            return Method(owner, node.attr)
        if isinstance(owner, Definition):
            return self._member_function(owner, node.attr)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            around = self.bindings.around(node)
            if around is not None and (found := self._member_function(Definition(around), node.attr)) is not None:
                return found
        return self._bound(self.bindings.attributes.get(node.attr, [])) or by_name(node.attr)

    def _member_function(self, owner: Definition, name: str) -> Known | None:
        if not isinstance(owner.node, ast.ClassDef):
            return None
        own = self.bindings.definitions[owner.node].names.get(name)
        found = self._bound([*own, *self.bindings.attributes.get(name, [])]) if own else None
        if isinstance(found, Definition) and isinstance(found.node, ast.FunctionDef):
            decorators = [last_name(decorator) or "" for decorator in found.node.decorator_list]
            if any(decorator.endswith("property") for decorator in decorators):
                return self._result(found)
        return found

    def _result(self, function: Definition) -> Known | None:
        """What a function of the program's own returns."""
        said = getattr(function.node, "returns", None)
        return self._first(self._returned(function)) or (self.annotated(said) if said is not None else None)

    def _call(self, node: ast.Call) -> Known | None:
        if isinstance(node.func, ast.Name) and node.func.id in ("iter", "next") and node.args:
            inside = self.of(node.args[0])
            if isinstance(inside, Instance) and inside.kind in ("DistributedDataset", "DistributedIterator"):
                return dataclasses.replace(
                    inside, kind="DistributedIterator" if node.func.id == "iter" else "PerReplica"
                )
        function = self.of(node.func)
        if isinstance(function, Definition) and not isinstance(function.node, ast.ClassDef):
            return self._result(function)
        made = self._made(function)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            around = self.bindings.around(node)
            return self._made(Definition(around)) if around is not None else None
        if made is None and function is None and isinstance(node.func, ast.Attribute) and node.func.attr in DISTINCT:
            return Instance(KINDS[node.func.attr], is_sure=False)
        is_unknown = function is None or (isinstance(function, Instance) and not function.is_sure)
        if made is None and is_unknown and _MAKES_STRATEGY.match(last_name(node.func) or ""):
            return Instance("Strategy", is_sure=False)
        return made

    def _returned(self, function: Definition, index: int | None = None) -> list[ast.AST]:
        if isinstance(function.node, ast.ClassDef):
            return []
        found: list[ast.AST] = list(returned(function.node))
        if index is None:
            return found
        return [node.elts[index] for node in found if isinstance(node, ast.Tuple) and index < len(node.elts)]

    def _made(self, called: Known | None) -> Instance | None:
        """What calling something gives."""
        if isinstance(called, DottedName):
            last = called.path.rpartition(".")[2]
            is_today = called.path.startswith("replicax")
            if is_today or called.path in _CLASSES:
                kind = KINDS.get(last)
                return Instance(kind, called.is_sure, is_today) if kind else None
            owner, _, member = called.path.rpartition(".")
            kind = KINDS.get(f"{_CLASSES.get(owner, '')}.{member}")
            return Instance(kind, called.is_sure) if kind else None
        if isinstance(called, Method):
            kind = KINDS.get(f"{called.of.kind}.{called.name}")
            return dataclasses.replace(called.of, kind=kind) if kind else None
        if isinstance(called, Definition) and isinstance(called.node, ast.ClassDef):
            return next((made for base in called.node.bases if (made := self._made(self.of(base)))), None)
        return None


def _one_of(found: Sequence[Known | None]) -> Known | None:
    """What is one of several things, of which perhaps not all are known: what is said of it for sure, if anything."""
    known = [each for each in found if each is not None]
    chosen = next((each for each in known if not isinstance(each, Instance) or each.is_sure), next(iter(known), None))
    if isinstance(chosen, DottedName) and not all(
        isinstance(each, DottedName) and each.is_like(chosen) for each in found
    ):
        return dataclasses.replace(chosen, is_sure=False)
    return chosen


def by_name(name: str) -> Instance | None:
    """What a value is that nothing is known about but its name."""
    kind = next((kind for kind, pattern in NAMED.items() if pattern.search(name)), None)
    return Instance(kind, is_sure=False) if kind else None


def _argument(call: ast.Call, name: str, index: int) -> ast.expr | None:
    keyword = next((k.value for k in call.keywords if k.arg == name), None) if name else None
    if keyword is not None:
        return keyword
    if index < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: index + 1]):
        return call.args[index]
    return call.keywords[0].value if not name and call.keywords and not call.args else None
