"""Is what the passes know of JAX's primitives true of the JAX that is installed? Run before everything else."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import jax
import pytest

import replicax
from replicax import _jax
from replicax._jax import primitive_table
from tests._jax.tiny_programs import PROGRAMS

SOURCES = pathlib.Path(replicax.__file__).parent


def found_in(program: _jax.Jaxpr) -> Iterator[tuple[str, frozenset[str]]]:
    for equation in program.eqns:
        yield equation.primitive.name, frozenset(equation.params)
        for inner in _jax.sub_jaxprs(equation):
            yield from found_in(inner)


@functools.cache
def parameters_of(name: str) -> frozenset[str] | None:
    """The parameters that the installed JAX gives a primitive; ``None`` if the program for it has none of that name."""
    closed = jax.make_jaxpr(PROGRAMS[name])()
    return dict(found_in(_jax.open_jaxpr(closed))).get(name)


@pytest.mark.parametrize("name", sorted(primitive_table.parameters()))
def test_a_primitive_has_the_parameters_that_are_declared(name):
    declared, found = primitive_table.parameters()[name], parameters_of(name)
    assert found is not None, f"JAX {jax.__version__} has no {name} any more where it had one: a pass looks for it"
    assert found == declared, (
        f"JAX {jax.__version__} has changed the parameters of {name}: gone are {sorted(declared - found)}, new are "
        f"{sorted(found - declared)}. See which passes look into it, mend them, and declare it in "
        "src/replicax/_jax/primitive_table.py"
    )


def test_every_declared_primitive_has_a_program():
    everything = primitive_table.parameters((10**6,))
    assert sorted(everything) == sorted(PROGRAMS)


def test_a_name_that_is_not_declared_is_refused():
    assert primitive_table.primitives_named("psum scan") == {"psum", "scan"}
    with pytest.raises(ValueError, match=r"\['num_scan'\] are no primitives of JAX that .*primitive_table declares"):
        primitive_table.primitives_named("scan num_scan")


def test_versions_differ_in_what_is_declared_for_them():
    before, after = primitive_table.parameters((0, 10, 2)), primitive_table.parameters((0, 12, 0, 1))
    assert "num_consts" in before["scan"]
    assert "ft_in" in after["scan"]
    assert "log2" not in before
    assert "log2" in primitive_table.parameters((0, 11, 0))
    assert before["while"] == after["while"]


def read_parameters(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Constants in ``params["x"]``, ``e.params["x"]`` and ``params.get("x")``."""

    def is_params(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id == "params") or (
            isinstance(node, ast.Attribute) and node.attr == "params"
        )

    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and is_params(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key = node.args[0] if is_params(node.func.value) else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, node.lineno


def compared_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Constants that a primitive's name is compared with: ``name == "x"``, ``e.primitive.name == "x"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            if getattr(node.left, "id", getattr(node.left, "attr", None)) != "name":
                continue
            for constant in ast.walk(node.comparators[0]):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value, node.lineno


def test_a_pass_compares_names_only_with_those_that_are_declared():
    paths = sorted((SOURCES / "execution").rglob("*.py"))
    read = {name: f"{path}:{line}" for path in paths for name, line in compared_names(ast.parse(path.read_text()))}
    example = ast.parse('name == "scan" or e.primitive.name in ("while", "cond")')
    assert {name for name, _ in compared_names(example)} == {"scan", "while", "cond"}  # the search finds them
    for name, where in read.items():
        if not name.startswith("replicax_"):
            assert primitive_table.primitives_named(name), where


# Parameters of Replicax's own primitives.
OUR_OWN = {"axis", "back", "device", "index", "map", "mark_id", "number", "options", "question"}


def test_a_pass_reads_only_parameters_that_are_declared():
    declared = OUR_OWN.union(
        *(p for version in primitive_table.VERSIONS for p in primitive_table.parameters(version).values())
    )
    paths = sorted(SOURCES.rglob("*.py"))
    read = {name: f"{path}:{line}" for path in paths for name, line in read_parameters(ast.parse(path.read_text()))}
    assert {"axes", "dimension_numbers", "ft_in"} <= set(read)  # the search finds them
    assert {name: where for name, where in read.items() if name not in declared} == {}
