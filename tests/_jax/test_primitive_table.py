"""Is what the passes know of JAX's primitives true of the JAX that is installed? Run before everything else."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import pytest

from replicax import _jax
from replicax._jax import primitive_table
from replicax.checks.loss_scale import operation_rules
from replicax.padding import example_rules
from tests._jax.tiny_programs import PROGRAMS


def found_in(program: _jax.Jaxpr) -> Iterator[tuple[str, frozenset[str]]]:
    for equation in program.eqns:
        yield equation.primitive.name, frozenset(equation.params)
        for inner in _jax.sub_jaxprs(equation):
            yield from found_in(inner)


@functools.cache
def parameters_of(name: str) -> frozenset[str] | None:
    """The parameters that the installed JAX gives a primitive; ``None`` if the program for it has none of that name."""
    closed = jax.make_jaxpr(PROGRAMS[name])()
    return dict(found_in(closed.jaxpr)).get(name)


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


def test_an_analysis_has_a_rule_for_each_word_of_its_column():
    examples, terms = (set(primitive_table.column(name).values()) for name in ("examples", "terms"))
    assert examples == {*example_rules._RULES, "each", "together", "reference"}
    assert terms == set(operation_rules._RULES)
    assert set(primitive_table.column("replicas").values()) == {"own", "position", "same", "kept"}


def test_a_word_that_no_primitive_has_is_refused():
    with pytest.raises(ValueError, match="no primitive has 'elementwide' in the column 'examples'"):
        primitive_table.primitives_with("examples", "elementwide")
