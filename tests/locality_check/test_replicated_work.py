"""Steps in which each replica computes the same are told: with a whole batch, or with common random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


@pytest.fixture
def w(pair: replicax.MirroredStrategy) -> replicax.Variable:
    with pair.scope():
        return replicax.Variable(np.ones(3, np.float32), name="w")


def trained(w: replicax.Variable, of: Callable[[Any], Any] = lambda x: x) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        share, [gradient] = replicax.value_and_grad(lambda: replicax.compute_average_loss(of(x) @ w.value), [w])()
        w.assign_sub(0.1 * replicax.get_replica_context().all_reduce("sum", gradient))
        return share

    return step


@pytest.mark.parametrize("batch", [X, jnp.asarray(X)], ids=["numpy", "jax"])
def test_a_batch_that_is_not_distributed(pair: replicax.MirroredStrategy, w: replicax.Variable, batch: Any) -> None:
    step = trained(w)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for rows in (4, 4, 2):  # told once, however often the step is traced
            pair.run(step, args=(batch[:rows],))
    [warning] = found
    assert warning.category is replicax.errors.LocalityWarning
    assert warning.filename == __file__
    for part in ("'step'", "same on all 2 replicas (x)", "strategy.distribute_dataset(batches)", "split one batch"):
        assert part in str(warning.message)


def test_a_captured_batch_and_a_derivative_of_jax(pair: replicax.MirroredStrategy) -> None:
    x = jnp.asarray(X)

    def step(v: Any) -> Any:
        return v - 0.1 * replicax.get_replica_context().all_reduce(
            "mean", jax.grad(lambda v: jnp.mean((x @ v) ** 2))(v)
        )

    with pytest.warns(replicax.errors.LocalityWarning, match=r"\(v, an array that it captures \(float32\[4, 3\]\)\)"):
        pair.run(step, args=(np.ones(3, np.float32),))


def test_the_same_random_numbers_in_place_of_a_batch(pair: replicax.MirroredStrategy) -> None:
    def step(theta: Any, key: Any) -> Any:
        def loss(theta: Any) -> Any:
            states, _ = jax.lax.scan(
                lambda s, k: (s + jax.random.normal(k) * theta, None), 0.0, jax.random.split(key, 4)
            )
            return jnp.sum(states**2)

        return theta - 0.1 * replicax.get_replica_context().all_reduce("mean", jax.grad(loss)(theta))

    with pytest.warns(replicax.errors.LocalityWarning, match=r"every replica computes all.*random_key\(key\)"):
        pair.run(step, args=(1.0, jax.random.key(0)))
    pair.run(lambda theta, key: step(theta, replicax.get_replica_context().random_key(key)), (1.0, jax.random.key(0)))


def test_initial_values_that_a_step_draws_are_not_told(pair: replicax.MirroredStrategy) -> None:
    with pair.scope():
        v = replicax.Variable(np.zeros(3, np.float32), aggregation="mean")
    pair.run(lambda key: v.assign(jax.random.normal(key, (3,))), args=(jax.random.key(0),))


def noisy(x: Any) -> Any:
    key = replicax.get_replica_context().random_key(jax.random.key(0))
    return x + jax.random.normal(key, x.shape)


def own_rows(x: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, 2 * replicax.get_replica_context().replica_id_in_sync_group, 2)


@pytest.mark.parametrize("of", [noisy, own_rows])
def test_replicas_that_differ_by_themselves(
    pair: replicax.MirroredStrategy, w: replicax.Variable, of: Callable[[Any], Any]
) -> None:
    pair.run(trained(w, of), args=(X,))


def test_steps_of_which_nothing_can_be_distributed(pair: replicax.MirroredStrategy, w: replicax.Variable) -> None:
    pair.run(lambda x: replicax.compute_average_loss(x @ w.value), args=(X,))  # an evaluation
    pair.run(trained(w, lambda scale: scale * jnp.ones((4, 3))), args=(2.0,))  # no batch
    [batch] = pair.distribute_dataset([X])
    pair.run(trained(w), args=(batch,))
    with replicax.debug():
        pair.run(trained(w), args=(X,))


def test_one_replica() -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32))
    strategy.run(trained(w), args=(X,))
