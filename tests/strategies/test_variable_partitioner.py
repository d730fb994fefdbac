"""Every strategy of several replicas splits variables, if it is given a partitioner, and computes the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import strategy_of

RNG = np.random.default_rng(11)
DATA = RNG.normal(size=(2, 8, 6)).astype(np.float32)
INITIAL = [RNG.normal(size=shape).astype(np.float32) for shape in [(6, 9), (9,)]]


def tpu(emulate: str, slices: int, partitioner: Any, block: list[int] | None = None) -> replicax.Strategy:
    resolver = replicax.TPUClusterResolver(emulate=emulate, slices=slices)
    assignment = None
    if block is not None:
        count = resolver.topology.num_devices // int(np.prod(block))
        assignment = replicax.DeviceAssignment.build(resolver.topology, block, num_replicas=count)
    return replicax.TPUStrategy(resolver, assignment, variable_partitioner=partitioner)


PLACES = {
    "mirrored": lambda p: replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)], variable_partitioner=p),
    "a slice": lambda p: tpu("2x1x1x2", 1, p),
    "two slices": lambda p: tpu("1x1x1x2", 2, p),
    "two logical devices": lambda p: tpu("2x2x1x2", 1, p, [1, 1, 1, 2]),
}
PARTITIONERS = {
    "four pieces": replicax.variables.FixedShardsPartitioner(4),
    "columns": replicax.variables.FixedShardsPartitioner(4, dim=-1),
    "pairs": replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0)),
}


def train(strategy: replicax.Strategy, executor: str) -> list[Any]:
    """What two steps leave in parameters, slots and statistics, and what they return."""
    with strategy.scope():
        variables = [replicax.Variable(value, name=f"v{i}") for i, value in enumerate(INITIAL)]
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)))

    def step(x: Any) -> Any:
        a, b = variables
        seen.assign_add(x.shape[0])

        def loss() -> Any:
            return replicax.compute_average_loss(jnp.square(jnp.tanh(x @ a) + b.value[None]).sum(-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return share

    options = replicax.RunOptions(executor)
    losses = [
        strategy.reduce("sum", strategy.run(step, args=(x,), options=options))
        for x in strategy.distribute_dataset(list(DATA))
    ]
    return [*losses, *(v.numpy() for v in [*variables, seen, *optimizer.variables])]


@functools.cache
def on_one_device() -> list[Any]:
    return train(strategy_of(1), "compiled")


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("place", PLACES)
def test_training_on_pieces_is_that_of_one_device(place: str, partitioner: str, executor: str) -> None:
    strategy = PLACES[place](PARTITIONERS[partitioner])
    assert strategy.num_replicas_in_sync == 4
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for mine, theirs in zip(train(strategy, executor), on_one_device(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_each_device_keeps_a_piece(place: str) -> None:
    strategy = PLACES[place](PARTITIONERS["four pieces"])
    with strategy.scope():
        v = replicax.Variable(INITIAL[0], name="v")
        optimizer = replicax.Optimizer(optax.adam(0.1))
    optimizer.build([v])
    for variable in (v, *optimizer.variables[1:]):
        assert {shard.data.shape for shard in variable.slot.array.addressable_shards} == {(2, 9)}
    np.testing.assert_array_equal(v, INITIAL[0])


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_partitioner(place: str) -> None:
    with pytest.raises(TypeError, match=r"such as FixedShardsPartitioner\(2\), got 3"):
        PLACES[place](3)
