"""What devices hold is what their arrays say, on every placement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.drawing.holdings import Exchange, devices_that_hold, exchanges_in, holding_of
from tests.conftest import logical_strategy, strategy_of

PLACEMENTS = {
    "mirrored": lambda: strategy_of(4),
    "split": lambda: replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "groups": lambda: replicax.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], variable_partitioner=replicax.variables.GroupPartitioner(2)
    ),
    "logical": lambda: logical_strategy(2, 2),
    "both": lambda: replicax.ShardedStrategy(num_logical_devices=2),
    "shared": lambda: replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=6),
    "central": lambda: replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:5"),
}


@pytest.mark.parametrize("parts", [None, [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_device_has_the_numbers_that_its_part_says(placement: str, parts: list[int] | None) -> None:
    strategy = PLACEMENTS[placement]()
    if parts and strategy.extended.num_logical_devices == 1:
        parts = None
    value = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    with strategy.scope():
        v = replicax.Variable(value, name="v", partition_dimensions=parts)
        uneven = replicax.Variable(np.arange(513.0, dtype=np.float32), name="uneven")
        own = replicax.Variable(np.arange(3, dtype=np.int32), name="own", synchronization="on_read", aggregation="sum")
        few = replicax.Variable(np.arange(625, dtype=np.float32).reshape(5, 5, 5, 5), name="few")
    variables = [v, uneven, few, own]
    devices = devices_that_hold(strategy.extended.mesh, variables)
    for variable, whole in zip(variables, (value, np.arange(513.0), few.numpy(), None), strict=True):
        holding = holding_of(variable, devices, strategy.extended.replicas.per_device)
        assert holding.shape == variable.shape
        assert holding.bytes == variable.size * variable.dtype.itemsize
        held = {shard.device: np.asarray(shard.data) for shard in variable.stored().addressable_shards}
        assert {d for d, part in zip(devices, holding.parts, strict=True) if part} == set(held)
        for device, part in zip(devices, holding.parts, strict=True):
            if part is None:
                continue
            assert part.bytes == held[device].nbytes
            if whole is None:
                assert (part.own, part.copies, part.size) == (True, held[device].shape[0], 3)
                continue
            expected = whole[tuple(slice(*bounds) for bounds in part.bounds)]
            found = held[device][tuple(slice(n) for n in expected.shape)]  # without what fills it up
            np.testing.assert_array_equal(found, expected)
            assert part.size == expected.size
            if part.size in (0, whole.size):
                assert holding.share(part) == ("all" if part.size else "none")


def test_exchanges_are_counted_as_often_as_they_run() -> None:
    strategy = replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        w = replicax.Variable(jnp.ones((64, 64)), name="w")

    def step(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=3)
        return replicax.get_replica_context().all_reduce("sum", y)

    program = strategy.extended.trace(step, args=(jax.ShapeDtypeStruct((1, 64), jnp.float32),))
    found = {e.kind: e for e in exchanges_in(program.compiled_text(), 4)}
    assert set(found) == {"all-gather", "all-reduce"}
    gather = found["all-gather"]
    assert gather.bytes == gather.count * w.value.nbytes
    assert gather.count in (1, 3)  # once before the loop, or in each of its turns
    assert (found["all-reduce"].count, found["all-reduce"].bytes) == (1, 256)
    assert gather.groups == found["all-reduce"].groups == ((0, 1, 2, 3),)


def test_exchanges_of_slices_that_are_alike() -> None:
    """The text is the program of the first slice: what its devices do, those of the second do, too."""
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %s = (f32[4]{0}, u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_transfer_type="ALL_GATHER"}
  ROOT %z = f32[8]{0} all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add
}"""
    inside, between = exchanges_in(text, 8, slices=2)
    assert inside == Exchange("all-reduce", ((0, 2), (1, 3), (4, 6), (5, 7)), count=2, bytes=64)
    assert between == Exchange("all-gather", ((0, 4), (1, 5), (2, 6), (3, 7)), count=1, bytes=16)
