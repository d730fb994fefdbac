"""Variables that are split within groups of replicas, and mirrored over them: how they lie, are read and assigned."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.devices.mesh import slices_in_turn
from replicax.variables.layout import Mirrored, Split
from tests.conftest import logical_strategy, strategy_of

INITIAL = np.arange(21, dtype=np.float32).reshape(7, 3)
PAIRS = replicax.variables.GroupPartitioner(2, replicax.variables.FixedShardsPartitioner(2))


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def make(strategy: replicax.Strategy, value: Any = INITIAL, partitioner: Any = PAIRS, **options: Any) -> Any:
    with strategy.scope():
        return replicax.Variable(value, name="v", partitioner=partitioner, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("initial", [INITIAL, lambda: jnp.asarray(INITIAL)], ids=["value", "callable"])
@pytest.mark.parametrize("logical", [1, 2])
def test_each_group_holds_the_value_in_pieces(initial: Any, logical: int) -> None:
    strategy = strategy_of(6) if logical == 1 else logical_strategy(4, 2)
    groups = strategy.num_replicas_in_sync // 2
    v = make(strategy, initial)
    where = f"split along dim 0 over the 2 replicas of each of {groups} groups"
    assert v.layout.describe(strategy.extended.mesh) == where
    for read in (v.value, strategy.run(lambda: v.value), jnp.asarray(v)):
        np.testing.assert_array_equal(read, INITIAL)
    np.testing.assert_array_equal(
        strategy.run(lambda: v.value, options=replicax.RunOptions(executor="per_replica")), INITIAL
    )
    pieces = strategy.local_results(v)
    assert len(pieces) == 2 * groups
    for i in range(groups):
        np.testing.assert_array_equal(np.concatenate(pieces[2 * i : 2 * i + 2]), INITIAL)
    assert {shard.data.shape for shard in v.slot.array.addressable_shards} == {(4, 3)}
    assert repr(v).startswith(f"<Variable 'v' float32[7,3] {where}:\n[[ 0.  1.  2.]")


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_it_is_assigned_like_any_other(method: str, aggregation: str, executor: str) -> None:
    strategy = strategy_of(4)
    v, plain = make(strategy, aggregation=aggregation), make(strategy, aggregation=aggregation, partitioner=None)
    x: Any = INITIAL
    if aggregation != "none":
        x = strategy.distribute_values_from_function(lambda ctx: INITIAL + np.float32(ctx.replica_id_in_sync_group))
    for variable in (v, plain):
        getattr(variable, method)(INITIAL * 2)
        strategy.run(
            lambda x, variable=variable: getattr(variable, method)(x), args=(x,), options=replicax.RunOptions(executor)
        )
    np.testing.assert_allclose(v.value, plain.value, rtol=1e-6)


# --- which groups ---------------------------------------------------------------------------------------


def test_how_large_groups_are() -> None:
    strategy = strategy_of(4)
    value = np.zeros((8, 64), np.float32)
    for partitioner, layout in {
        replicax.variables.GroupPartitioner(): Split(dim=1, size=64, piece=16, replicas=4),
        replicax.variables.GroupPartitioner(4): Split(dim=1, size=64, piece=16, replicas=4),
        replicax.variables.GroupPartitioner(2): Split(dim=1, size=64, piece=32, replicas=2, groups=2),
        replicax.variables.GroupPartitioner(1): Mirrored(),
        replicax.variables.GroupPartitioner(2, replicax.variables.MinSizePartitioner(1, 9)): Split(
            0, 8, 4, replicas=2, groups=2
        ),
        replicax.variables.GroupPartitioner(2, replicax.variables.MaxSizePartitioner(4096)): Mirrored(),
    }.items():
        assert make(strategy, value, partitioner).layout == layout
    assert make(strategy, value[:1, :1], replicax.variables.GroupPartitioner()).layout == Mirrored()  # small


@pytest.mark.parametrize(("size", "pieces", "groups"), [(None, 4, 2), (2, 2, 4), (8, 8, 1)])
def test_a_group_is_a_slice_if_no_size_is_given(size: int | None, pieces: int, groups: int) -> None:
    resolver = replicax.TPUClusterResolver(emulate="2x1x1x2", slices=2)
    strategy = replicax.TPUStrategy(resolver, variable_partitioner=replicax.variables.GroupPartitioner(size))
    with strategy.scope():
        v = replicax.Variable(np.zeros((64, 8), np.float32))
    assert (v.layout.replicas, v.layout.groups) == (pieces, groups)


def test_groups_that_do_not_fit() -> None:
    message = "GroupPartitioner: group_size 3 does not divide the number of replicas, 4: choose one of 1, 2, 4"
    three = replicax.variables.GroupPartitioner(3)
    with pytest.raises(ValueError, match=message):
        replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)], variable_partitioner=three)
    with pytest.raises(ValueError, match=message):
        make(strategy_of(4), partitioner=three)
    assert make(strategy_of(1), partitioner=three).layout == Mirrored()  # one replica has all
    with pytest.raises(ValueError, match="GroupPartitioner: group_size must be an int of at least 1, got 0"):
        replicax.variables.GroupPartitioner(0)
    with pytest.raises(TypeError, match="a group has no groups of its own, got partitioner=GroupPartitioner"):
        replicax.variables.GroupPartitioner(4, replicax.variables.GroupPartitioner(2))
    with pytest.raises(TypeError, match=r"such as FixedShardsPartitioner\(2\), got 3"):
        replicax.variables.GroupPartitioner(4, 3)


@pytest.mark.parametrize("slices", [[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 1]])
def test_groups_are_no_slices_that_lie_otherwise(slices: list[int]) -> None:
    devices = np.array([[types.SimpleNamespace(slice_index=number, device_kind="TPU v5")] for number in slices])
    with pytest.raises(ValueError, match="not in one slice after the other.*give group_size"):
        replicax.variables.GroupPartitioner().size(len(slices), slices_in_turn(devices))
    assert replicax.variables.GroupPartitioner(1).size(len(slices), slices_in_turn(devices)) == 1


def test_an_on_read_variable_has_a_copy_on_each_replica() -> None:
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)], variable_partitioner=PAIRS)
    with strategy.scope():
        v = replicax.Variable(INITIAL, synchronization="on_read", aggregation="mean")
    assert v.is_stacked
    keys = jax.random.split(jax.random.key(0), 4)
    with strategy.scope():
        assert replicax.Variable(keys).layout == Mirrored()
