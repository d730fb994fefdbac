"""The total of shares, and its derivatives, are those of one function of all data, on every replica."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.conftest import strategy_of
from tests.soaking import soaked

X = np.arange(8, dtype=np.float32) / 3
EXECUTORS = ["compiled", "per_replica"]


def part(v: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(x * v["a"]) + x * v["b"] ** 3 * v["a"])


def values(total: Any, v: Any) -> Any:
    gradient = jax.grad(total)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), v)
    return total(v), gradient(v), jax.jacrev(gradient)(v), jax.vmap(jax.value_and_grad(total))(stacked)


@pytest.mark.parametrize(
    ("replicas", "executor"), [(4, "compiled"), (2, "per_replica"), soaked(1, "compiled"), soaked(1, "per_replica")]
)
def test_values_and_derivatives_are_those_of_all_data(replicas: int, executor: str) -> None:
    strategy = strategy_of(replicas)
    v = {"a": jnp.float32(0.3), "b": jnp.float32(0.7)}
    [batch] = strategy.distribute_dataset([X])

    def step(v: Any, x: Any) -> Any:
        return values(replicax.total_of_shares(lambda v: part(v, x)), v)

    found = strategy.run(step, args=(v, batch), options=replicax.RunOptions(executor=executor))
    expected = jax.jit(lambda v: values(lambda v: part(v, X), v))(v)
    assert jax.tree.structure(found) == jax.tree.structure(expected)  # arrays, and nothing that differs
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_total_without_parameters(pair: replicax.MirroredStrategy, executor: str) -> None:
    [batch] = pair.distribute_dataset([X])
    step = lambda x: replicax.total_of_shares(lambda: jnp.sum(x))()  # noqa: E731
    total = pair.run(step, args=(batch,), options=replicax.RunOptions(executor=executor))
    np.testing.assert_allclose(total, X.sum(), rtol=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_counts_beside_the_total(pair: replicax.MirroredStrategy, executor: str) -> None:
    def step(v: Any, x: Any) -> Any:
        total = replicax.total_of_shares(lambda v: (jnp.sum(v * x), x.shape[0]))
        return jax.value_and_grad(total, has_aux=True)(v)

    [batch] = pair.distribute_dataset([X])
    (value, count), gradient = pair.run(step, args=(2.0, batch), options=replicax.RunOptions(executor=executor))
    np.testing.assert_allclose((value, count, gradient), (2 * X.sum(), 8, X.sum()), rtol=1e-6)


def searched(objective: Any, start: Any) -> Any:
    """What L-BFGS comes to in five steps: its line search decides by gradients how often it calls ``objective``."""
    tx = optax.lbfgs()

    def turn(carry: Any, _: Any) -> Any:
        point, state = carry
        value, gradient = optax.value_and_grad_from_state(objective)(point, state=state)
        update, state = tx.update(gradient, state, point, value=value, grad=gradient, value_fn=objective)
        return (optax.apply_updates(point, update), state), value

    (point, _), values = jax.lax.scan(turn, (start, tx.init(start)), length=5)
    return point, values


def distances(point: Any, x: Any) -> Any:
    return jnp.sum(jnp.log1p((jnp.outer(x, jnp.ones(2)) - point) ** 2))


def test_a_line_search_over_split_data(pair: replicax.MirroredStrategy) -> None:
    [batch] = pair.distribute_dataset([X])
    start = jnp.float32([0.5, -1.0])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = pair.run(
            lambda x: searched(replicax.total_of_shares(lambda point: distances(point, x)), start), args=(batch,)
        )
        for one, other in zip(
            found, jax.jit(lambda: searched(lambda point: distances(point, X), start))(), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4)


def test_a_line_search_over_an_all_reduced_value_is_told_of_the_total(pair: replicax.MirroredStrategy) -> None:
    [batch] = pair.distribute_dataset([X])

    def step(x: Any) -> Any:
        all_reduce = replicax.get_replica_context().all_reduce
        return searched(lambda point: all_reduce("sum", distances(point, x)), jnp.float32([0.5, -1.0]))

    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(replicax.errors.DeadlockError, match="(?s)line search.*replicax.total_of_shares"),
    ):
        pair.run(step, args=(batch,))


def test_a_decision_without_a_gradient_is_told_nothing_of_it(pair: replicax.MirroredStrategy) -> None:
    [batch] = pair.distribute_dataset([X])

    def step(x: Any) -> Any:
        all_reduce = replicax.get_replica_context().all_reduce
        return jax.lax.cond(x.sum() > 1, lambda: all_reduce("sum", x.sum()), x.sum)

    with pytest.raises(replicax.errors.DeadlockError, match=r"\(for example with all_reduce\)\.$"):
        pair.run(step, args=(batch,))


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
    with pytest.raises(replicax.errors.LocalityError, match=message):
        pair.run(
            lambda x: of(replicax.total_of_shares(lambda v: v * 2.0), x),
            args=(batch,),
            options=replicax.RunOptions(executor=executor),
        )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_derivative_in_forward_mode_is_told_in_loops_too(pair: replicax.MirroredStrategy, executor: str) -> None:
    [batch] = pair.distribute_dataset([X])

    def step(x: Any) -> Any:
        total = replicax.total_of_shares(lambda v: jnp.sum(jnp.sin(v * x)))

        def descend(v: Any) -> Any:
            return v - 0.1 * jax.jvp(total, (v,), (jnp.float32(1),))[1]

        return jax.lax.while_loop(lambda v: v > 1, descend, jnp.float32(2))

    options = replicax.RunOptions(executor=executor)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff") as error:
        pair.run(step, args=(batch,), options=options)
    assert executor != "compiled" or f"{__file__}:" in str(error.value)


def test_bad_input(pair: replicax.MirroredStrategy) -> None:
    with pytest.raises(TypeError, match="total_of_shares"):
        replicax.total_of_shares(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a float array, got int32"):
        replicax.total_of_shares(lambda v: v)(3)
    with pair.scope(), pytest.raises(replicax.errors.ContextError, match="inside a step"):
        replicax.total_of_shares(lambda v: v)(3.0)
    assert float(jax.grad(replicax.total_of_shares(lambda v: v * v))(3.0)) == 6.0  # outside every strategy
