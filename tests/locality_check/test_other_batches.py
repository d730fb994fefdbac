"""A warning where padding is left out of rows that are those of another batch."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.errors import LocalityWarning
from tests.conftest import strategy_of

PADDED, EXACT = (replicax.InputOptions(partial_batch=kind) for kind in ("pad", "exact"))
LABELED, OTHER = np.arange(3, dtype=np.float32), np.arange(4, 8, dtype=np.float32)


def plain(mean: Any, x: Any, u: Any) -> Any:
    return replicax.compute_average_loss(jnp.square(u))


def in_a_derivative(mean: Any, x: Any, u: Any) -> Any:
    def loss(w: Any) -> Any:
        return replicax.compute_average_loss(jax.jit(jnp.square)(u * w))

    return jax.grad(loss)(jnp.float32(1))


def in_a_metric(mean: Any, x: Any, u: Any) -> None:
    mean.update(u)


def own_key() -> Any:
    return replicax.get_replica_context().random_key(jax.random.key(0))


def run(strategy: Any, step: Any, x: Any, u: Any) -> None:
    with strategy.scope():
        mean = replicax.Mean("of u")
    strategy.run(lambda x, u: step(mean, x, u), args=(x, u))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("step", [plain, in_a_derivative, in_a_metric])
def test_rows_of_another_batch_beside_a_padded_one(step, replicas) -> None:
    strategy = strategy_of(replicas)
    [_, x], [u] = strategy.distribute_dataset([OTHER, LABELED], PADDED), strategy.distribute_dataset([OTHER])
    with pytest.warns(
        LocalityWarning, match=r"is computed from an argument that is not padded, .*='exact'\)"
    ) as caught:
        run(strategy, step, x, u)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    "step",
    [
        lambda mean, x, u: replicax.compute_average_loss(jnp.square(x)) + u.mean(),
        lambda mean, x, u: replicax.compute_average_loss(jnp.square(x - u)),
        lambda mean, x, u: replicax.compute_average_loss(jnp.ones(len(x))),
        lambda mean, x, u: replicax.compute_average_loss(jax.random.normal(own_key(), (len(x),))),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_of_the_padded_batch_or_of_none(step, replicas) -> None:
    strategy = strategy_of(replicas)
    [_, x], [u] = strategy.distribute_dataset([OTHER, LABELED], PADDED), strategy.distribute_dataset([OTHER])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(strategy, step, x, u)


@pytest.mark.parametrize("step", [plain, in_a_metric])
def test_batches_without_padding(pair, step) -> None:
    [x], [u] = pair.distribute_dataset([LABELED], EXACT), pair.distribute_dataset([OTHER], EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        run(pair, step, x, u)


def test_noise_beside_a_padded_batch_counts_once_for_each_example(pair) -> None:
    [x], [noise] = pair.distribute_dataset([LABELED], PADDED), pair.distribute_dataset([OTHER])
    with pytest.warns(LocalityWarning, match=r"such as noise, that is right: pass them as a part of the padded batch"):
        share = pair.run(lambda x, u: replicax.compute_average_loss(jnp.square(u)), args=(x, noise))
    assert float(pair.reduce("sum", share)) == pytest.approx(np.mean(np.square(OTHER[:3])))
    [both] = pair.distribute_dataset([(LABELED, OTHER[:3])], PADDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share = pair.run(lambda both: replicax.compute_average_loss(jnp.square(both[1])), args=(both,))
    assert float(pair.reduce("sum", share)) == pytest.approx(np.mean(np.square(OTHER[:3])))
