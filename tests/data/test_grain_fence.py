"""The fence around what Grain keeps to itself: nobody else uses it, and the installed Grain has all of it."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import grain
import pytest

import replicax
from replicax._grain import graph

SOURCES = pathlib.Path(replicax.__file__).parent
FENCE = sorted((SOURCES / "_grain").glob("*.py"))
OUTSIDE = sorted([*(SOURCES / "data").rglob("*.py"), *(SOURCES / "integrations").glob("*.py")])
PRIVATE = re.compile(r"_[a-z][a-z_]*")


def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def attributes(tree: ast.AST, of_self: bool) -> Iterator[ast.Attribute]:
    """Private attributes that are used in ``tree``: of ``self``, or of anything else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if is_self == of_self:
                yield node


def own_names(tree: ast.AST) -> set[str]:
    """What the classes in ``tree`` have that is private: methods, and what is stored in ``self``."""
    stored = {node.attr for node in attributes(tree, of_self=True) if isinstance(node.ctx, ast.Store)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return stored | {part.name for c in classes for part in c.body if isinstance(part, ast.FunctionDef)}


@functools.cache
def in_grain() -> tuple[set[str], set[str]]:
    """The private names of Grain's classes, and the names of the classes."""
    names, classes = set(), set()
    for path in pathlib.Path(grain.__file__).parent.rglob("*.py"):
        if "test" not in path.name and "dataset" in path.parts:
            tree = tree_of(path)
            names |= own_names(tree)
            classes |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return names, classes


@functools.cache
def in_bases() -> set[str]:
    """The private names of the classes that nodes and iterators of one's own inherit from."""
    bases = (grain.MapDataset, grain.IterDataset, grain.DatasetIterator)
    found = {name for base in bases for name in dir(base) if PRIVATE.fullmatch(name)}
    return found | {"_parents", "_ctx", "_closed"}


def grains_classes(tree: ast.AST) -> list[ast.ClassDef]:
    """Those that inherit from Grain's, or from the fence's."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [c for c in classes if any(ast.unparse(base).startswith(("grain.", "nodes.")) for base in c.bases)]


def test_other_files_leave_private_names_of_grain_alone() -> None:
    wrong = []
    for path in OUTSIDE:
        tree = tree_of(path)
        used = [a for c in grains_classes(tree) for a in attributes(c, of_self=True) if a.attr in in_bases()]
        if "integrations" not in path.parts:  # they look into datasets of other libraries
            used += [node for node in attributes(tree, of_self=False) if node.attr not in own_names(tree)]
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in in_bases()]
        wrong += [f"{path.name}:{node.lineno}" for node in (*used, *methods)]
    assert wrong == []


def names_in_fence() -> set[str]:
    trees = [tree_of(path) for path in FENCE]
    own = set().union(*map(own_names, trees))
    used = {node.attr for tree in trees for node in attributes(tree, of_self=False)}
    used |= {node.attr for tree in trees for node in attributes(tree, of_self=True)} - own
    strings = [n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return used | {text for text in strings if isinstance(text, str) and PRIVATE.fullmatch(text)}


def test_the_installed_grain_has_the_private_names() -> None:
    used = names_in_fence()
    assert used >= {"_parents", "_getitems", "_batch_size", "_seed", "_stats"}
    assert used - in_grain()[0] == set()


def test_the_installed_grain_has_the_nodes() -> None:
    strings = [n.value for n in ast.walk(tree_of(pathlib.Path(graph.__file__))) if isinstance(n, ast.Constant)]
    nodes = {text for text in strings if isinstance(text, str) and re.fullmatch(r"\w+Dataset", text)}
    assert len(nodes) > 20
    assert nodes - in_grain()[1] == set()


@pytest.mark.parametrize(
    ("body", "is_found"),
    [("self._parent", True), ("node._batch_fn", True), ("self._rows", False), ("node.parent", False)],
)
def test_what_is_looked_for(body, is_found) -> None:
    tree = ast.parse(f"class Node(grain.MapDataset):\n    def __len__(self):\n        return {body}")
    found = [a for c in grains_classes(tree) for a in attributes(c, of_self=True) if a.attr in in_bases()]
    assert bool([*found, *attributes(tree, of_self=False)]) == is_found
