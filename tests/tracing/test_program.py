"""What a captured program says of its variables."""

from __future__ import annotations

import gc

import numpy as np

import replicax
from replicax.execution.program.program import Program, VariableOrder


def captured(pair: replicax.Strategy) -> tuple[Program, dict[str, replicax.Variable]]:
    with pair.scope():
        v = {name: replicax.Variable(np.float32(0), name=name) for name in "abcd"}

    def step(x):
        v["d"].assign(x.sum())  # without reading it
        v["b"].assign(v["a"].value + v["c"].value)
        v["c"].assign(v["b"] + 1.0)
        return x

    program: Program = pair.extended.trace(step, args=(np.ones(3, np.float32),)).program
    return program, v


def test_the_order_of_variables(pair: replicax.Strategy) -> None:
    program, _ = captured(pair)
    reads, writes = [use.name for use in program.reads], [use.name for use in program.writes]
    assert (reads, writes) == (["a", "c"], ["d", "b", "c"])
    assert program.order == VariableOrder(donated=[1], kept=[0], written=[2, 0, 1])


def test_each_variable_is_used_once(pair: replicax.Strategy) -> None:
    program, variables = captured(pair)
    assert list(program.uses) == [variables[name].slot for name in "acdb"]
    assert [use.name for use in program.uses.values()] == list("acdb")


def test_the_localities_of_inputs(pair: replicax.Strategy) -> None:
    program, _ = captured(pair)
    assert len(program.input_localities) == len(program.jaxpr.invars)


def test_a_variable_that_is_gone_has_its_name(pair: replicax.Strategy) -> None:
    program, variables = captured(pair)
    [first, *_] = program.reads
    assert first.describe() == variables["a"].describe() == "variable 'a' (float32[])"
    variables.clear()
    gc.collect()
    assert first.describe() == "variable 'a'"
