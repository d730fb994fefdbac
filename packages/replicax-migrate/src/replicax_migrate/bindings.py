"""Which expressions a program binds to which names: its scopes, its attributes, and who calls its functions."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Defining: TypeAlias = Function | ast.ClassDef


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Let functions call themselves as deeply as Python's own parser lets expressions be nested, about 3000 nodes."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One way in which a name gets its value.

    ``how`` is ``value`` of an expression; ``with``, ``item`` or ``iteration`` of one; ``import``; ``definition``;
    ``parameter``; ``annotation``; ``unknown``.
    """

    how: str
    node: ast.AST  # the expression, the definition, or the parameter
    scope: NameScope  # where the expression stands
    path: str = ""  # what is imported
    index: int = 0  # of ``item``: which one


class NameScope:
    """The names of a module, class or function."""

    def __init__(self, node: ast.Module | Defining, parent: NameScope | None) -> None:
        self.node = node
        self.parent = parent
        self.names: dict[str, list[Binding]] = collections.defaultdict(list)
        self.outer: dict[str, NameScope] = {}
        """What ``global`` and ``nonlocal`` say belongs elsewhere."""

    def lookup(self, name: str) -> list[Binding]:
        """How ``name``, used here, gets its value: from the innermost scope that binds it."""
        scope: NameScope | None = self.outer.get(name, self)
        while scope is not None:
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope.names[name]
            scope = scope.parent
        return []


class Bindings(ast.NodeVisitor):
    """All that a program binds."""

    @deep_recursion()
    def __init__(self, tree: ast.Module) -> None:
        self.scope = self.module = NameScope(tree, None)
        self.scope_of: dict[ast.AST, NameScope] = {}  # in which each expression stands, of those that can be a use
        self.attributes: dict[str, list[Binding]] = collections.defaultdict(list)  # of all objects, by their names
        self.calls: dict[str, list[ast.Call]] = collections.defaultdict(list)  # by the last name of what is called
        self.parents: dict[ast.AST, ast.AST] = {}
        self.definitions: dict[ast.AST, NameScope] = {}
        self.stars: list[str] = []  # the modules of which everything is imported, ``from module import *``
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.visit(tree)

    @property
    def members(self) -> set[str]:
        """The names of all that classes of the program define, and of all attributes that are set."""
        of_classes = (scope.names for node, scope in self.definitions.items() if isinstance(node, ast.ClassDef))
        return {*self.attributes, *(name for names in of_classes for name in names)}

    def _bind(self, target: ast.AST, how: str, node: ast.AST, path: str = "", index: int = 0) -> None:
        binding = Binding(how, node, self.scope, path, index)
        if isinstance(target, ast.Name):
            self.scope.outer.get(target.id, self.scope).names[target.id].append(binding)
        elif isinstance(target, ast.Attribute):
            self.attributes[target.attr].append(binding)
        elif isinstance(target, ast.Tuple | ast.List):
            for i, part in enumerate(target.elts):
                if how != "value":
                    self._bind(part, how, node)
                elif isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(target.elts):
                    self._bind(part, how, node.elts[i])
                else:
                    self._bind(part, "item", node, index=i)

    def visit(self, node: ast.AST) -> None:
        """Note what ``node`` binds, and what is inside it."""
        self.scope_of[node] = self.scope
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                self._define(node)
                return
            case ast.Import():
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._bind(ast.Name(alias.asname or first), "import", node, alias.name if alias.asname else first)
            case ast.ImportFrom():
                module = f"{'.' * node.level}{node.module or ''}"
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(module)
                        continue
                    self._bind(ast.Name(alias.asname or alias.name), "import", node, f"{module}.{alias.name}")
            case ast.Global():
                self.scope.outer.update(dict.fromkeys(node.names, self.module))
            case ast.Nonlocal():
                self.scope.outer.update((name, self._enclosing(name)) for name in node.names)
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, "value", node.value)
            case ast.AnnAssign():
                self._bind(node.target, "annotation", node.annotation)
                if node.value is not None:
                    self._bind(node.target, "value", node.value)
            case ast.NamedExpr():
                self._bind(node.target, "value", node.value)
            case ast.withitem() if node.optional_vars is not None:
                self._bind(node.optional_vars, "with", node.context_expr)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind(node.target, "iteration", node.iter)
            case ast.ExceptHandler(name=str(own)) | ast.MatchAs(name=str(own)) | ast.MatchStar(name=str(own)):
                self._bind(ast.Name(own), "unknown", node)
            case ast.Call() if (name := last_name(node.func)) is not None:
                self.calls[name].append(node)
        self.generic_visit(node)

    def around(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class that something stands in."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, ast.ClassDef):
            parent = self.parents.get(parent)
        return parent

    def _enclosing(self, name: str) -> NameScope:
        scope = self.scope.parent
        while scope is not None and name not in scope.names:
            scope = scope.parent
        return scope or self.module

    def _define(self, node: Defining) -> None:
        if not isinstance(node, ast.Lambda):
            self._bind(ast.Name(node.name), "definition", node)
        outer, inner = self.scope, NameScope(node, self.scope)
        self.definitions[node] = inner
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        for child in ast.iter_child_nodes(node):
            self.scope = inner if child in body else outer  # decorators, defaults and bases are evaluated outside
            self.visit(child)
        self.scope = inner
        if not isinstance(node, ast.ClassDef):
            for parameter in parameters(node):
                self._bind(ast.Name(parameter.arg), "parameter", parameter)
            for rest in (node.args.vararg, node.args.kwarg):
                if rest is not None:
                    self._bind(ast.Name(rest.arg), "unknown", rest)
        self.scope = outer


def parameters(function: Function) -> list[ast.arg]:
    """The parameters of a function that can be named, positional ones first."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def defaults(function: Function) -> dict[str, ast.expr]:
    """The default values, by the names of the parameters."""
    positional = [*function.args.posonlyargs, *function.args.args]
    found = dict(zip([p.arg for p in reversed(positional)], reversed(function.args.defaults), strict=False))
    found.update({p.arg: d for p, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d})
    return found


def last_name(node: ast.AST) -> str | None:
    """``f`` of ``f`` and of ``a.b.f``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def returned(function: Function) -> Iterator[ast.expr]:
    """The expressions that a function returns, without those of functions inside it."""
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            yield node.value
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
