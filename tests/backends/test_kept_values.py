"""What is computed from several arrays, and used several times, is computed once and in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax
from replicax.execution.backends.cpu.kept_values import FEWEST_ELEMENTS, KeptValues, has_kept_values, kept_values
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting
from replicax.execution.compiled.replicate import rewriting_for
from tests.conftest import strategy_of

LAYERS = 4
SHAPE = (FEWEST_ELEMENTS // 64, 64)
PASS = Rewriting([KeptValues()])


def residual(x: Any, weight: Any, layers: int = LAYERS) -> Any:
    """Layers that add to what goes past them."""
    for _ in range(layers):
        x = x + 0.5 * jnp.tanh(x) * (x @ weight) + 0.1
    return x


def operands() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=SHAPE), "float32"), jnp.asarray(rng.normal(size=(64, 64)) / 8, "float32")


def in_a_loop(x: Any, weight: Any) -> Any:
    return lax.scan(lambda c, _: (residual(c, weight), None), x, None, length=2)[0]


def in_a_branch(x: Any, weight: Any) -> Any:
    return lax.cond(x.sum() < 1e9, residual, lambda x, weight: x, x, weight)


def gradient(x: Any, weight: Any) -> Any:
    return jax.grad(lambda x: jnp.square(residual(x, weight)).mean())(x)


def kept_in(text: str) -> int:
    return text.count('inlineable = "false"')


@pytest.mark.parametrize("fn", [residual, in_a_loop, in_a_branch, gradient])
def test_residual_sums_are_in_memory_wherever_they_are(fn: Any) -> None:
    x, weight = operands()
    ours = jax.jit(PASS.applied_to(fn))
    assert has_kept_values(jax.make_jaxpr(fn)(x, weight).jaxpr)
    np.testing.assert_allclose(ours(x, weight), jax.jit(fn)(x, weight), rtol=1e-5, atol=1e-5)
    assert kept_in(ours.lower(x, weight).as_text()) > kept_in(jax.jit(fn).lower(x, weight).as_text()) == 0


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_every_other_layer_is_computed_from_three_arrays(layers: int) -> None:
    program = jax.make_jaxpr(lambda x, w: residual(x, w, layers))(*operands()).jaxpr
    assert len(kept_values(program)) == (layers - 1) // 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y, z: x + y * 2 + z - x * 3 + 1,  # used once
        lambda x, y, z: (lambda v: (v * y, v * z))(jnp.tanh(x * 2 + 1) * x - 3),  # from one array
        lambda x, y, z: (lambda v: (v @ v.T, v))(x + y + z),  # by few operations
        lambda x, y, z: (lambda v: (v.sum(), v * 2))((x + y * 2 + z - x * 3 + 1)[:2]),  # small
    ],
)
def test_others_are_computed_where_they_are_used(fn: Any) -> None:
    x, _ = operands()
    assert not has_kept_values(jax.make_jaxpr(fn)(x, x + 1, x + 2).jaxpr)


@pytest.mark.parametrize("kind", ["uint32", "bool"])
def test_what_is_not_a_float_is_kept_as_it_is(kind: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, size=SHAPE), kind)

    def fn(x: Any, y: Any, z: Any) -> Any:
        v = x & y | z ^ x & z | y ^ x
        return v, v & x

    assert len(kept_values(jax.make_jaxpr(fn)(x, ~x, x ^ x).jaxpr)) == 1
    for found, expected in zip(jax.jit(PASS.applied_to(fn))(x, ~x, x), jax.jit(fn)(x, ~x, x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_steps_and_loops_of_steps_keep_them_but_not_where_sums_have_an_order() -> None:
    strategy: replicax.Strategy = strategy_of(2)
    x, weight = operands()
    with strategy.scope():
        variable = replicax.Variable(np.asarray(weight))
    rows = np.concatenate([x, x + 1])

    def step(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", residual(x, variable.value).mean())

    [batch] = strategy.distribute_dataset([rows])
    program = strategy.extended.trace(step, args=(batch,))
    for executable in (program, program.repeated(2)):
        assert "inlineable" in executable.compiled_text()
    found = strategy.reduce("mean", strategy.run(step, args=(batch,)))
    expected = residual(x, weight).mean() + residual(x + 1, weight).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    mesh, jaxpr = strategy.extended.mesh, program.program.jaxpr
    assert rewriting_for(jaxpr, mesh, Target()) is not None
    assert rewriting_for(jaxpr, mesh, Target(in_order=True)) is None
