"""A program as one call in what is being traced, and other operations in the place of some of a program's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax import _jax


def step(x: Any, y: Any) -> tuple[Any, Any]:
    def turn(total: Any, row: Any) -> tuple[Any, Any]:
        return total + jnp.sin(row) * y, row * 2

    total, rows = jax.lax.scan(turn, jnp.zeros(()), x)
    return jnp.where(total > 0, total, -total), rows


X, Y = jnp.arange(6.0), jnp.float32(0.5)


def opened(fn: Any, *args: Any) -> _jax.Jaxpr:
    closed = jax.make_jaxpr(fn)(*args)
    assert not closed.consts
    return closed.jaxpr


def test_a_call_computes_what_the_program_does() -> None:
    program = opened(step, X, Y)
    called = jax.jit(lambda *args: _jax.called(program, args))
    for got, wanted in zip(called(X, Y), step(X, Y), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_its_operations_are_not_traced_again() -> None:
    program = opened(step, X, Y)
    [call] = jax.make_jaxpr(lambda *args: _jax.called(program, args))(X, Y).jaxpr.eqns
    inside = _jax.called_program(call)
    assert inside is not None
    assert all(a is b for a, b in zip(inside.eqns, program.eqns, strict=True))
    assert call.params["name"] == "step"


@pytest.mark.parametrize("inputs", [0, 1, 3])
@pytest.mark.parametrize("outputs", [0, 1, 3])
def test_each_operand_and_result_has_its_place_in_jax_parameters(inputs: int, outputs: int) -> None:
    """All that JAX says of a call, it says of this one: a parameter of another length would be one that is new."""

    def fn(*xs: Any) -> list[Any]:
        return [sum(xs, jnp.zeros(()) + i) for i in range(outputs)]

    args = [jnp.float32(i) for i in range(inputs)]
    program = opened(fn, *args)
    [ours] = jax.make_jaxpr(lambda *xs: _jax.called(program, xs))(*args).jaxpr.eqns
    [jax_own] = jax.make_jaxpr(jax.jit(fn))(*args).jaxpr.eqns
    assert {**ours.params, "jaxpr": None, "name": None} == {**jax_own.params, "jaxpr": None, "name": None}
    assert len(jax.jit(lambda *xs: _jax.called(program, xs))(*args)) == outputs


def test_outside_of_a_trace_it_is_computed() -> None:
    total, _ = _jax.called(opened(step, X, Y), [X, Y])
    np.testing.assert_allclose(total, step(X, Y)[0], rtol=1e-6)


def test_only_what_is_replaced_is_traced() -> None:
    program = opened(lambda x, y: jnp.cos(x) * 2 + jnp.sin(y), X, Y)

    def replacement(equation: _jax.Equation) -> Any:
        return {"cos": lambda x: [jnp.tanh(x) + 1], "mul": lambda x, two: [x * two * two]}.get(equation.primitive.name)

    new = _jax.spliced(program, replacement)
    kept = [e for e in new.eqns if e in program.eqns]
    assert [e.primitive.name for e in kept] == ["sin"]
    [result] = jax.jit(lambda *args: _jax.called(new, args))(X, Y)
    np.testing.assert_allclose(result, (jnp.tanh(X) + 1) * 4 + jnp.sin(Y), rtol=1e-6)


def test_a_replacement_may_hand_on_its_operands() -> None:
    program = opened(lambda x, y: (jnp.cos(x), jnp.cos(y) + 1), X, Y)
    new = _jax.spliced(program, lambda e: (lambda x: [x]) if e.primitive.name == "cos" else None)
    first, second = jax.jit(lambda *args: _jax.called(new, args))(X, Y)
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, Y + 1)


def test_operations_keep_the_lines_that_they_came_from() -> None:
    program = opened(lambda x: jnp.cos(x) + jnp.sin(x), X)
    new = _jax.spliced(program, lambda e: (lambda x: [jnp.tanh(x)]) if e.primitive.name == "cos" else None)
    assert {_jax.source_line(e) for e in new.eqns} == {_jax.source_line(e) for e in program.eqns}
