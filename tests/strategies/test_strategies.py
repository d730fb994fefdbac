from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of


def test_the_default_strategy_runs_compiled() -> None:
    strategy = replicax.get_strategy()
    assert isinstance(strategy, replicax.DefaultStrategy)
    assert strategy is replicax.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    v = replicax.Variable(1.0)

    def step(x):
        assert isinstance(x, jax.core.Tracer)
        v.assign_add(x)
        return replicax.get_replica_context().all_reduce("sum", v.value)

    assert float(strategy.run(step, args=(2.0,))) == 3.0
    assert float(v) == 3.0
    with jax.default_device(jax.devices()[3]):  # as set when the program begins
        assert replicax.DefaultStrategy().extended.worker_devices == (jax.devices()[3],)


def test_one_device_may_have_several_replicas() -> None:
    strategy = replicax.OneDeviceStrategy("cpu:5", num_replicas=3)
    assert repr(strategy) == "OneDeviceStrategy([cpu:5], 3 replicas on each)"
    ids = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group)
    assert [int(i) for i in strategy.local_results(ids)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"got 0 replica\(s\) for 1 device"):
        replicax.OneDeviceStrategy("cpu:5", num_replicas=0)


def test_one_device_keeps_everything_there() -> None:
    strategy = replicax.OneDeviceStrategy("cpu:5")
    with strategy.scope():
        v = replicax.Variable(jnp.ones(3))
    device = {jax.devices()[5]}
    assert v.slot.array.devices() == device
    out = strategy.run(lambda x: v + x, args=(jnp.ones(3),))
    assert out.devices() == device
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices == (jax.devices()[5],)


def test_mirrored_variables_are_on_every_device() -> None:
    strategy = strategy_of(4)
    with strategy.scope():
        v = replicax.Variable(jnp.arange(3.0))
    strategy.run(lambda: v.assign(v * 2))
    shards = v.slot.array.addressable_shards
    assert [s.device.id for s in shards] == [0, 1, 2, 3]
    for shard in shards:
        np.testing.assert_array_equal(shard.data, [0, 2, 4])


def test_variable_created_in_scope(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    assert pair.extended.variable_created_in_scope(v)
    assert not pair.extended.variable_created_in_scope(replicax.Variable(1.0))
    assert not pair.extended.variable_created_in_scope(1.0)


def test_experimental_names_are_the_same_objects() -> None:
    for name in ("local_results", "distribute_dataset", "distribute_values_from_function", "make_numpy_dataset"):
        assert getattr(replicax.Strategy, f"experimental_{name}") is getattr(replicax.Strategy, name)


def test_repr() -> None:
    assert repr(strategy_of(2)) == "MirroredStrategy([cpu:0, cpu:1])"
    assert repr(replicax.OneDeviceStrategy("cpu:1")) == "OneDeviceStrategy([cpu:1])"


def test_a_strategy_is_copied_deeply_or_not_at_all(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0, name="v")
    with pytest.raises(RuntimeError, match=r"MirroredStrategy.* can't be copied, .* use copy.deepcopy"):
        copy.copy(pair)
    twin = copy.deepcopy(pair)
    assert type(twin) is type(pair)
    assert twin.extended.strategy is twin
    assert twin.extended.worker_devices == pair.extended.worker_devices
    assert float(twin.run(lambda x: replicax.get_replica_context().all_reduce("sum", x), args=(2.0,))) == 4.0
    assert not twin.extended.variable_created_in_scope(v)
    with pytest.raises(
        replicax.errors.ContextError, match="'v' .* belongs to .* but the step runs under another Mirrored"
    ):
        twin.run(lambda: v.assign_add(1.0))
    with pair.scope(), pytest.raises(replicax.errors.ContextError, match="mixing different Strategy objects"):
        twin.run(lambda: 1)


def test_an_extended_knows_its_devices_before_it_has_a_strategy() -> None:
    extended = replicax.StrategyExtended(jax.devices()[:2])
    assert extended.parameter_devices == tuple(jax.devices()[:2])
    assert replicax.Strategy(extended).extended.parameter_devices == tuple(jax.devices()[:2])


def test_a_strategy_has_its_extended_for_itself() -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match=r"StrategyExtended belongs to MirroredStrategy\(\[cpu:0, cpu:1\]\) already"):
        replicax.Strategy(strategy.extended)
    assert strategy.extended.strategy is strategy


@pytest.mark.parametrize("kind", ["MirroredStrategy", "MultiWorkerMirroredStrategy", "ShardedStrategy"])
@pytest.mark.parametrize("logical", [1, 2, 4])
def test_each_replica_is_spread_over_so_many_devices_one_after_the_other(kind: str, logical: int) -> None:
    names = [f"cpu:{i}" for i in (0, 1, 2, 3, 6, 7, 4, 5)]
    strategy = getattr(replicax, kind)(names, num_logical_devices=logical)
    assert strategy.num_replicas_in_sync == 8 // logical
    found = [d.id for d in strategy.extended.logical_devices.flat]
    assert found == [0, 1, 2, 3, 6, 7, 4, 5]
    with strategy.scope():
        v = replicax.Variable(np.zeros((16, 64), np.float32), partition_dimensions=[1, logical])
    kept = 16 * 64 // (8 if kind == "ShardedStrategy" else logical)
    assert {s.data.size for s in v.stored().addressable_shards} == {kept}


@pytest.mark.parametrize("kind", ["MirroredStrategy", "MultiWorkerMirroredStrategy", "ShardedStrategy"])
def test_a_number_of_logical_devices_that_the_devices_are_not_enough_for(kind: str) -> None:
    make = getattr(replicax, kind)
    message = r"must divide the number of devices.*: got 3 for 2 device\(s\), cpu:0, cpu:1"
    with pytest.raises(ValueError, match=message):
        make(["cpu:0", "cpu:1"], num_logical_devices=3)
    with pytest.raises(ValueError, match="got 0 for 1 device"):
        make(["cpu:0"], num_logical_devices=0)
    for wrong in (True, "2", 2.0):
        with pytest.raises(TypeError, match="num_logical_devices must be an int"):
            make(["cpu:0", "cpu:1"], num_logical_devices=wrong)


def test_choices_that_a_strategy_does_not_have_are_explained() -> None:
    emulated = replicax.TPUClusterResolver(emulate="2x1x1x1")
    makes: list[Callable[..., replicax.Strategy]] = [
        functools.partial(replicax.OneDeviceStrategy, "cpu:0"),
        functools.partial(replicax.CentralStorageStrategy, ["cpu:0"]),
        functools.partial(replicax.TPUStrategy, emulated),
    ]
    for make, instead in zip(makes, ("MirroredStrategy", "MirroredStrategy", "device_assignment="), strict=True):
        with pytest.raises(TypeError, match=f"there is no argument 'num_logical_devices'; .*{instead}"):
            make(num_logical_devices=2)
    for make in makes[:2]:
        with pytest.raises(TypeError, match="variable_partitioner"):
            make(variable_partitioner=replicax.variables.FixedShardsPartitioner(2))
