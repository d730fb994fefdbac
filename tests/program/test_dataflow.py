"""The dataflow pass by itself, with facts that are easy to tell: which inputs a value is computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from replicax import _jax
from replicax.execution.program.dataflow import Control, Dataflow, Found

Inputs = frozenset[int]


class Reaching(Dataflow[Inputs]):
    """A result is computed from what its operands are computed from, and from what decides."""

    def __init__(self, found: dict[Any, Inputs] | None = None) -> None:
        super().__init__(frozenset(), found)
        self.applied: list[tuple[str, Control, bool]] = []

    def join(self, facts: Any) -> Inputs:
        return frozenset().union(*facts)

    def decided(self, fact: Inputs, decision: Inputs) -> Inputs:
        return fact | decision

    def inside(self, where: str, decision: Inputs, control: Control) -> Control:
        return where if decision else control

    def operation(self, equation: Any, facts: list[Inputs], control: Control, final: bool) -> Found[Inputs]:
        name = equation.primitive.name
        self.applied.append((name, control, final))
        joined = self.join(facts)
        return [joined] * len(equation.outvars), [joined, *facts[1:]] if name == "swap" else facts


def reaching(fn: Callable[..., Any], *args: Any) -> list[set[int]]:
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    inputs = [frozenset([i]) for i in range(len(jaxpr.invars))]
    return [set(fact) for fact in Reaching().run(jaxpr, inputs, final=True)[0]]


def shifted(carry: tuple[Any, ...], _: Any = None) -> tuple[Any, Any]:
    return (carry[-1], *carry[:-1]), carry[0]


@pytest.mark.parametrize("turns", [4, 0])
def test_a_scan_runs_until_nothing_changes(turns: int) -> None:
    # How often it runs is no matter: each place of the ring is reached from each other.
    def step(a: Any, b: Any, c: Any, d: Any) -> Any:
        carry, stacked = lax.scan(shifted, (a, b, c), length=turns)
        return *carry, stacked, d

    assert reaching(step, 1.0, 1.0, 1.0, 1.0) == [{0, 1, 2}] * 4 + [{3}]


def test_what_is_carried_depends_on_how_often_a_loop_runs() -> None:
    def step(limit: Any, x: Any, y: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1.0, c[1] * 2, c[2] + 1.0), (x, y, 1.0))

    assert reaching(step, 1.0, 1.0, 1.0) == [{0, 1}, {0, 1, 2}, {0, 1}]


def test_a_result_depends_on_which_branch_has_made_it() -> None:
    def step(which: Any, x: Any, y: Any) -> Any:
        return lax.switch(which, [lambda x, y: (x, 1.0), lambda x, y: (y, 2.0)], x, y)

    assert reaching(step, 0, 1.0, 1.0) == [{0, 1, 2}, {0}]


def test_what_is_written_stays_in_a_mutable_array() -> None:
    def step(x: Any, y: Any) -> Any:
        ref = jax.new_ref(x)
        before = ref[...]

        def turn(_: Any, c: Any) -> Any:
            ref[...] = c * 2
            return c

        lax.fori_loop(0, 3, turn, y)
        return before, ref[...]

    assert reaching(step, 1.0, 1.0) == [{0}, {0, 1}]


def test_control_is_known_inside_and_final_comes_last() -> None:
    def step(which: Any, x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, c: lax.cond(which, jnp.sin, jnp.cos, c), x)

    jaxpr = jax.make_jaxpr(step)(True, 1.0).jaxpr
    flow = Reaching()
    flow.run(jaxpr, [frozenset([0]), frozenset([1])], final=True)
    sines = [(control, final) for name, control, final in flow.applied if name == "sin"]
    assert {control for control, _ in sines} == {"inside a branch (jax.lax.cond or switch)"}
    assert [final for _, final in sines].count(True) == 1
    assert sines[-1][1]


def test_nested_loops_are_not_searched_again_and_again() -> None:
    def nested(depth: int, x: Any) -> Any:
        if not depth:
            return jnp.sin(x)
        return lax.scan(lambda c, _: (nested(depth - 1, c), None), x, length=2)[0]

    def count(depth: int) -> int:
        flow = Reaching()
        flow.run(jax.make_jaxpr(lambda x: nested(depth, x))(1.0).jaxpr, [frozenset([0])], final=True)
        return sum(name == "sin" for name, *_ in flow.applied)

    assert count(6) == count(1)


def test_the_facts_on_all_values_are_found() -> None:
    double = jax.jit(lambda x: x * 2)
    jaxpr = jax.make_jaxpr(lambda x, y: double(x) + double(y))(1.0, 1.0).jaxpr
    found: dict[Any, Inputs] = {}
    Reaching(found).run(jaxpr, [frozenset([0]), frozenset([1])], final=True)
    calls = [e for e in jaxpr.eqns if e.primitive.name == "jit"]
    assert [found[e.outvars[0]] for e in calls] == [{0}, {1}]
    called = _jax.called_program(calls[0])
    assert called is _jax.called_program(calls[1])  # computed in two places
    assert found[called.invars[0]] == {0, 1}
