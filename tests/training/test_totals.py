"""The total of shares, and its derivatives, are those of one function of all data, on every replica."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

X = np.arange(8, dtype=np.float32) / 3
EXECUTORS = ["compiled", "per_replica"]


def part(v: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(x * v["a"]) + x * v["b"] ** 3 * v["a"])


def values(total: Any, v: Any) -> Any:
    gradient = jax.grad(total)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), v)
    return total(v), gradient(v), jax.jacrev(gradient)(v), jax.vmap(jax.value_and_grad(total))(stacked)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_values_and_derivatives_are_those_of_all_data(strategy: replicax.Strategy, executor: str) -> None:
    v = {"a": jnp.float32(0.3), "b": jnp.float32(0.7)}
    [batch] = strategy.distribute_dataset([X])

    def step(v: Any, x: Any) -> Any:
        return values(replicax.total_of_shares(lambda v: part(v, x)), v)

    found = strategy.run(step, args=(v, batch), options=replicax.RunOptions(executor=executor))
    expected = values(lambda v: part(v, X), v)
    assert jax.tree.structure(found) == jax.tree.structure(expected)  # arrays, and nothing that differs
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_counts_beside_the_total(pair: replicax.MirroredStrategy, executor: str) -> None:
    def step(v: Any, x: Any) -> Any:
        total = replicax.total_of_shares(lambda v: (jnp.sum(v * x), x.shape[0]))
        return jax.value_and_grad(total, has_aux=True)(v)

    [batch] = pair.distribute_dataset([X])
    (value, count), gradient = pair.run(step, args=(2.0, batch), options=replicax.RunOptions(executor=executor))
    np.testing.assert_allclose((value, count, gradient), (2 * X.sum(), 8, X.sum()), rtol=1e-6)


def test_a_value_and_its_gradient_are_two_all_reduces(pair: replicax.MirroredStrategy) -> None:
    [batch] = pair.distribute_dataset([X])
    program = pair.extended.trace(
        lambda v, x: jax.value_and_grad(replicax.total_of_shares(lambda v: jnp.sum(jnp.sin(v * x))))(v),
        args=(2.0, batch),
    )
    assert [c.kind for c in program.collectives()] in (["all-reduce"], ["all-reduce"] * 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda total, x: total(x.sum()), "a parameter differs between replicas.*data is captured"),
        (lambda total, x: jax.grad(lambda v: total(v) * x.sum())(2.0), "the derivative of the total differs between"),
    ],
)
def test_what_differs_between_replicas_is_refused(
    pair: replicax.MirroredStrategy, of: Any, message: str, executor: str
) -> None:
    [batch] = pair.distribute_dataset([X])
    with pytest.raises(replicax.LocalityError, match=message):
        pair.run(
            lambda x: of(replicax.total_of_shares(lambda v: v * 2.0), x),
            args=(batch,),
            options=replicax.RunOptions(executor=executor),
        )


def test_bad_input(pair: replicax.MirroredStrategy) -> None:
    with pytest.raises(TypeError, match="total_of_shares"):
        replicax.total_of_shares(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a float array, got int32"):
        replicax.total_of_shares(lambda v: v)(3)
    with pair.scope(), pytest.raises(replicax.ContextError, match="inside a step"):
        replicax.total_of_shares(lambda v: v)(3.0)
    assert float(jax.grad(replicax.total_of_shares(lambda v: v * v))(3.0)) == 6.0  # outside every strategy
