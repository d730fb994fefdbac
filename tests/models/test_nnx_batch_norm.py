"""Batch norms of Flax NNX, where a batch does not fill all replicas."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax
from tests.models.nets import arrays, check_alike
from tests.programs.programs import third_party

BATCH = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
PARTS = BATCH[:2], BATCH[2:4], BATCH[4:]  # of four replicas; the last has none


class Rectified(nnx.BatchNorm):
    def __call__(self, x):
        return nnx.relu(super().__call__(x))


class Folded(nnx.BatchNorm):
    def __call__(self, x):
        y = super().__call__(x)
        return jnp.where(y > 0, y, -y)  # JAX drops its derivative if there are no rows


class Masked(nnx.BatchNorm):
    def __call__(self, x):
        return super().__call__(x, mask=x > -1.5)


class Net(nnx.Module):
    def __init__(self, axis=None, kind=nnx.BatchNorm):
        self.norm = kind(6, axis_name=axis, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(6, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.norm(x))[:, 0]


def step(average, model, optimizer, x):
    gradients = nnx.grad(lambda model: average(jnp.square(model(x) - 1)))(model)
    optimizer.update(model, gradients)


@functools.cache
@third_party
def alone(kind=nnx.BatchNorm, rows=5):
    """What plain NNX has after a step on the global batch."""
    model = Net(None, kind)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    nnx.jit(functools.partial(step, jnp.mean))(model, optimizer, BATCH[:rows])
    return arrays(model)


def trained(model, replicas=4, batch=BATCH):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    [batch] = strategy.distribute_dataset([batch])
    strategy.run(functools.partial(step, replicax.compute_average_loss), args=(model, optimizer, batch))
    return model


@pytest.mark.parametrize("kind", [nnx.BatchNorm, pytest.param(Rectified, marks=pytest.mark.soak), Folded, Masked])
@third_party
def test_with_the_axis_of_the_replicas_it_is_that_of_the_global_batch(kind) -> None:
    check_alike(arrays(trained(Net(replicax.REPLICA_AXIS, kind))), alone(kind))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("replicas", [1, 2])
@third_party
def test_with_the_axis_of_the_replicas_it_is_that_of_the_global_batch_on_the_per_replica_executor(
    replicas, rows
) -> None:
    with replicax.debug():
        found = trained(Net(replicax.REPLICA_AXIS), replicas, BATCH[:rows])
    check_alike(arrays(found), alone(rows=rows))


@pytest.mark.parametrize("debug", [False, True])
@third_party
def test_a_replica_without_rows_has_no_part_in_the_statistics(debug) -> None:
    if debug:
        with replicax.debug():
            model = trained(Net())
    else:
        model = trained(Net())
    parts, forward = [Net() for _ in PARTS], nnx.jit(lambda part, x: part.norm(x))
    for part, x in zip(parts, PARTS, strict=True):
        forward(part, x)
    for name in ("mean", "var"):
        found = getattr(model.norm, name)[...]
        np.testing.assert_allclose(found, np.mean([getattr(part.norm, name)[...] for part in parts], 0), rtol=1e-5)
    before = arrays(model)
    assert all(np.isfinite(array).all() for array in before.values())
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    [nothing] = strategy.distribute_dataset([BATCH[:0]])
    strategy.run(lambda model, x: model.norm(x), args=(model, nothing))
    check_alike(arrays(model), before)
