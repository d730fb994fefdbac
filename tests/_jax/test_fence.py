"""The fence around JAX: what its primitives and their parameters are called is known in ``replicax._jax`` only.

Two packages that may be removed know it, too: the rules for XLA's CPU backend rewrite single operations, and the
per-replica executor computes them.

Elsewhere a primitive of JAX is in a family of :mod:`replicax._jax.primitive_families`, its parameters are read by a
function of ``_jax``, and a primitive of Replicax is referred to by its object. Ordinary words are names of primitives,
too ("name", "sign", "pad"), so what is looked at is how a constant is used.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import replicax
from replicax._jax import primitive_table

SOURCES = pathlib.Path(replicax.__file__).parent
FOLDERS = ("_jax", "backends/cpu", "per_replica/eager")
INSIDE = sorted(path for folder in FOLDERS for path in (SOURCES / folder).rglob("*.py"))
OUTSIDE = sorted(set(SOURCES.rglob("*.py")).difference(INSIDE))

DECLARED = [primitive_table.parameters(version) for version in primitive_table.VERSIONS]
PARAMETERS = frozenset(parameter for known in DECLARED for found in known.values() for parameter in found)
OWN_PARAMETERS = frozenset(
    {
        "along",
        "back",
        "device",
        "in_order",
        "index",
        "mark_id",
        "number",
        "of_each",
        "options",
        "own",
        "per_device",
        "program",
        "question",
        "sizes",
        "stated",
    }
)

PARTS_OF_STRINGS = {
    "startswith": str.startswith,
    "removeprefix": str.startswith,
    "endswith": str.endswith,
    "removesuffix": str.endswith,
}


def nodes_of(text: str) -> list[ast.AST]:
    """All of a module's syntax tree, walked once for all that looks through it."""
    return list(ast.walk(ast.parse(text)))


def called(node: ast.AST | None, *names: str) -> bool:
    """Whether an expression is a variable or an attribute of one of these names."""
    return getattr(node, "id", getattr(node, "attr", None)) in names


def strings_in(node: ast.AST) -> Iterator[str]:
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def own_names() -> Iterator[str]:
    """Those of Replicax's own primitives, where these are made."""
    for path in (*INSIDE, *OUTSIDE):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "rimitive(" in text else ():
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if function == "Primitive" or function.endswith("_primitive"):
                    yield node.args[0].value


PRIMITIVES = frozenset().union(*DECLARED, own_names())


def compared_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Constants that the names of primitives are compared with: ``e.primitive.name == "x"``, ``"x" in …``."""
    for node in nodes:
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else ()
        if any(called(side, "name") and called(getattr(side, "value", None), "primitive") for side in sides):
            yield from (c for side in sides for c in strings_in(side))


def names_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Names of primitives, or parts of them, by which primitives are recognized."""
    yield from compared_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(called(side, "name") for side in sides):
                yield from (c for side in sides for c in strings_in(side) if c in PRIMITIVES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            matches = PARTS_OF_STRINGS.get(node.func.attr)
            if matches is not None and called(node.func.value, "name"):
                yield from (c for a in node.args for c in strings_in(a) if c and any(matches(p, c) for p in PRIMITIVES))
        elif isinstance(node, ast.match_case):
            yield from PRIMITIVES.intersection(strings_in(node.pattern))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            yield from words if len(words) > 1 and PRIMITIVES.issuperset(words) else ()
        elif isinstance(node, ast.Attribute) and node.attr.endswith("_p"):  # jax.lax.scan_p
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            yield from [node.attr] if called(root, "jax", "lax") else ()


def listed_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Names of primitives in what something is looked up in."""
    for node in nodes:
        listed: list[ast.AST] = []
        if isinstance(node, ast.Dict):
            listed = [key for key in node.keys if isinstance(key, ast.Constant | ast.Tuple)]
        elif isinstance(node, ast.Set):
            listed = [node]
        elif isinstance(node, ast.Call) and called(node.func, "frozenset", "set", "fromkeys"):
            listed = list(node.args[:1])
        yield from (name for n in listed for name in strings_in(n) if name in PRIMITIVES)


def parameters_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Keys by which parameters of an operation are read or replaced; "?" for one that is computed."""

    def key(node: ast.AST) -> str:
        return node.value if isinstance(node, ast.Constant) else "?"

    for node in nodes:
        if isinstance(node, ast.Subscript) and called(node.value, "params"):
            yield key(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "pop") and called(node.func.value, "params"):
                yield key(node.args[0])
            elif node.func.attr == "bind" and called(node.func.value, "primitive"):
                yield from (k.arg for k in node.keywords if k.arg is not None)
        elif isinstance(node, ast.Compare):
            if any(called(right, "params") for right in node.comparators):
                yield key(node.left)
            elif called(node.comparators[0], "name"):  # "axis" in name
                yield from PARAMETERS.intersection(strings_in(node.left))
        elif isinstance(node, ast.Dict):
            if any(k is None and called(v, "params") for k, v in zip(node.keys, node.values, strict=True)):
                yield from (key(k) for k in node.keys if k is not None)
        elif isinstance(node, ast.BinOp) and called(node.left, "params") and isinstance(node.right, ast.Dict):
            yield from (key(k) for k in node.right.keys if k is not None)


def looks_into_programs(nodes: list[ast.AST]) -> bool:
    """Whether a module imports ``_jax``, or any of it."""
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    return any("_jax" in f"{n.module}.{'.'.join(a.name for a in n.names)}".split(".") for n in imports)


def known_in(text: str) -> set[str]:
    """What a module knows of primitives by name."""
    nodes = nodes_of(text)
    found = {*names_in(nodes), *(p for p in parameters_in(nodes) if p not in OWN_PARAMETERS)}
    return found.union(listed_names(nodes)) if looks_into_programs(nodes) else found


# XLA's operations have names of their own, which are JAX's in places.
OF_XLA = {
    "hlo/executed.py": {"while"},
    "planning/cost.py": {"reduce", "scatter"},
    "planning/timeline/peak.py": {"while"},
    "planning/timeline/walk.py": {"while"},
}


def test_names_of_primitives_and_parameters_are_known_inside_only() -> None:
    known = {path.relative_to(SOURCES).as_posix(): known_in(path.read_text()) for path in OUTSIDE}
    assert {name: found for name, found in known.items() if found} == OF_XLA


def test_families_are_made_inside_only() -> None:
    assert [path for path in OUTSIDE if re.search("primitives_(named|with)", path.read_text())] == []


def test_names_are_declared_where_they_are_known() -> None:
    compared = {c: path for path in INSIDE for c in compared_names(nodes_of(path.read_text()))}
    assert "free_ref" in compared  # the search finds them
    assert {c: path for c, path in compared.items() if not any(c in name for name in PRIMITIVES)} == {}


def test_parameters_are_declared_where_they_are_read() -> None:
    read = {p: path for path in INSIDE for p in parameters_in(nodes_of(path.read_text()))}
    assert {"dimension_numbers", "ft_in"} <= set(read)
    ours = {"?", "axis", "map"} | OWN_PARAMETERS
    assert {p: path for p, path in read.items() if p not in PARAMETERS | ours} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        'if equation.primitive.name == "scan": pass': {"scan"},
        'if "callback" in e.primitive.name: pass': {"callback"},
        'known = name in ("cumsum", "elsewhere")': {"cumsum"},
        'rules = equation.primitive.name.startswith("custom_")': {"custom_"},
        'match name:\n    case "while" | "cond": pass': {"while", "cond"},
        'RULES = {"reduce_sum argmax": 1}': {"reduce_sum", "argmax"},
        'from replicax._jax import primitive_families\nRULES = {"scan": 1, "other": 2}': {"scan"},
        'from replicax import _jax\nSUMS = frozenset({"psum", "all_reduce"})': {"psum", "all_reduce"},
        "if primitive is jax.lax.scan_p: pass": {"scan_p"},
        'numbers = equation.params["dimension_numbers"]': {"dimension_numbers"},
        'side = params.get("has_side_effect")': {"has_side_effect"},
        'has = "axes" in equation.params': {"axes"},
        'found = any("axis" in name for name in params)': {"axis"},
        "value = params[name]": {"?"},
        'new = {**equation.params, "mode": 1}': {"mode"},
        'new = params | {"axes": (0,)}': {"axes"},
        "y = equation.primitive.bind(x, axes=(0,))": {"axes"},
        'tree = equation.params["out_tree"]': {"out_tree"},
        'mark = equation.params["mark_id"]': set(),
        'record = {"name": 1}; policy.name == "eager"; print("add", "pad", "the sign of name")': set(),
    }.items(),
)
def test_the_fence_can_be_run_into(text: str, expected: set[str]) -> None:
    assert known_in(text) == expected
