"""Rules say operations in another way wherever in a program they are, all in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicax import _jax
from replicax.execution.compiled.program_rewriting import Rewriting, Rule


class Instead(Rule):
    """A rule for the operation of one name."""

    def __init__(self, name: str, other: Callable[..., Any]) -> None:
        self.name = name
        self.other = other
        self.asked = 0

    def is_ours(self, equation: _jax.Equation) -> bool:
        self.asked += 1
        return equation.primitive.name == self.name

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        return [self.other(*operands)]


def rules() -> list[Instead]:
    return [Instead("sin", jnp.cos), Instead("cos", jnp.sin)]


def ordinary(x: Any) -> Any:
    return jnp.sin(x) + 2 * jnp.cos(x)


def rewritten(x: Any) -> Any:
    return jnp.cos(x) + 2 * jnp.sin(x)


def with_a_derivative(f: Callable[[Any], Any], x: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return g(x)


PLACES: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "at the top": lambda f, x: f(f(x)),
    "in a call": lambda f, x: jax.jit(f)(x) + f(x),
    "in a loop": lambda f, x: lax.scan(lambda carry, _: (f(carry), f(x)), x, length=2),
    "in a while": lambda f, x: lax.while_loop(lambda c: f(c[0]) > -9, lambda c: (c[0] * jnp.nan, f(c[1])), (x[0], x)),
    "in a branch": lambda f, x: lax.cond(x[0] > 0, f, jnp.tan, x),
    "in a checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "in a function with a derivative of its own": with_a_derivative,
    "in a linear solve": lambda f, x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: f(b) / 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_operations_are_replaced_once_wherever_they_are(place: str) -> None:
    x = jnp.array([0.5, 1.0, 2.0], "float32")
    found = jax.jit(Rewriting(rules()).applied_to(lambda x: PLACES[place](ordinary, x)))(x)
    expected = jax.jit(lambda x: PLACES[place](rewritten, x))(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_program_is_traced_once_however_many_rules_there_are() -> None:
    calls = []

    def fn(x: Any) -> Any:
        calls.append(None)
        return ordinary(x)

    asked = rules()
    jax.jit(Rewriting(asked).applied_to(fn)).trace(1.0)
    operations = len(jax.make_jaxpr(ordinary)(1.0).eqns)
    assert len(calls) == 1
    assert max(rule.asked for rule in asked) == operations
