"""What was saved under one strategy is restored under every other, and the run goes on with the next example."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import replicax
from replicax.variables.partitioners import over_all
from tests.checkpoint.runs import Run
from tests.conftest import logical_strategy, strategy_of

KINDS = ["mirrored", "sharded", "central", "logical"]


def strategy_named(name: str, replicas: int) -> replicax.Strategy:
    devices = [f"cpu:{i}" for i in range(replicas)]
    if name == "mirrored":
        return strategy_of(replicas)
    if name == "sharded":
        return replicax.ShardedStrategy(devices)
    if name == "central":
        return replicax.CentralStorageStrategy(devices)
    return logical_strategy(replicas, 2)


def own_number() -> jax.Array:
    """1 on replica 0, 2 on replica 1, and so on."""
    return jnp.asarray(replicax.get_replica_context().replica_id_in_sync_group).astype(jnp.float32) + 1.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint under each strategy, the values that were saved, and the examples that come next."""
    folder = tmp_path_factory.mktemp("saved")
    made = {}

    def of(kind: str, replicas: int):
        if (kind, replicas) not in made:
            run = Run.of(strategy_named(kind, replicas), splits=kind == "logical")
            run.go(2)
            path = folder / f"{kind}-{replicas}"
            run.checkpoint.save(path)
            made[kind, replicas] = path, run.values(), run.coming()
        return made[kind, replicas]

    return of


@pytest.mark.covering(1)
@pytest.mark.parametrize("after", [1, 2, 3, 8], ids="onto-{}".format)
@pytest.mark.parametrize("onto", KINDS)
@pytest.mark.parametrize("before", [1, 2, 3, 8], ids="from-{}".format)
@pytest.mark.parametrize("source", KINDS)
def test_onto(saved, source, before, onto, after) -> None:
    # With two devices each there are at most four; and their batches are to be of one size.
    before = {3: 2, 8: 4}.get(before, before) if source == "logical" else before
    after = {8: 4}.get(after, after) if onto == "logical" else after
    path, values, coming = saved(source, before)
    run = Run.of(strategy_named(onto, after), batch=12, seed=1, splits=onto == "logical")
    assert run.values()["w"] != values["w"]
    run.checkpoint.restore(path)
    assert run.values() == values
    assert run.coming()[:8] == coming
    run.go(1)


def test_a_sum_is_shared_out_anew(tmp_path) -> None:
    with strategy_of(2).scope():
        total = replicax.Variable(0.0, synchronization="on_read", aggregation="sum")
        count = replicax.Variable(0, synchronization="on_read", aggregation="sum")
    strategy = total.strategy

    def step() -> None:
        replica = replicax.get_replica_context().replica_id_in_sync_group
        total.assign(own_number() + 2.0)
        count.assign(replica + 3)

    strategy.run(step)
    replicax.Checkpoint(total=total, count=count).save(tmp_path / "a")
    for replicas, totals, counts in ((2, [3.5, 3.5], [4, 3]), (4, [1.75] * 4, [4, 1, 1, 1]), (1, [7.0], [7])):
        other = strategy_of(replicas)
        with other.scope():
            v = replicax.Variable(1.0, synchronization="on_read", aggregation="sum")
            n = replicax.Variable(1, synchronization="on_read", aggregation="sum")
        replicax.Checkpoint(total=v, count=n).restore(tmp_path / "a")
        assert float(v.read_value()) == 7.0
        assert int(n.read_value()) == 7
        assert [float(x) for x in other.local_results(v)] == totals
        assert [int(x) for x in other.local_results(n)] == counts


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_other_aggregations_are_the_same_on_all_replicas(tmp_path, aggregation) -> None:
    with strategy_of(2).scope():
        v = replicax.Variable(0.0, synchronization="on_read", aggregation=aggregation)
    v.strategy.run(lambda: v.assign(own_number()))
    expected = float(v.read_value())
    replicax.Checkpoint(v=v).save(tmp_path / "a")
    other = strategy_of(3)
    with other.scope():
        w = replicax.Variable(9.0, synchronization="on_read", aggregation=aggregation)
    replicax.Checkpoint(v=w).restore(tmp_path / "a")
    assert [float(x) for x in other.local_results(w)] == [expected] * 3


def test_each_replica_gets_its_own_random_key_back(tmp_path) -> None:
    with strategy_of(2).scope():
        keys = replicax.Variable(lambda: jax.random.key(0), synchronization="on_read")
    strategy, key = keys.strategy, jax.random.key(3)

    def data() -> list[list[int]]:
        return [jax.random.key_data(local).tolist() for local in strategy.local_results(keys)]

    strategy.run(lambda: keys.assign(jax.random.fold_in(key, own_number().astype(int))))
    values = data()
    assert values[0] != values[1]
    replicax.Checkpoint(keys=keys).save(tmp_path / "a")
    strategy.run(lambda: keys.assign(key))
    replicax.Checkpoint(keys=keys).restore(tmp_path / "a")
    assert data() == values


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_copies_in_half_precision_are_added_up_as_a_read_does(tmp_path, aggregation) -> None:
    with strategy_of(8).scope():
        v = replicax.Variable(jnp.zeros((), jnp.bfloat16), synchronization="on_read", aggregation=aggregation)
    v.strategy.run(lambda: v.assign(jnp.where(own_number() == 1, 256, 1).astype(jnp.bfloat16)))
    replicax.Checkpoint(v=v).save(tmp_path / "a")
    with strategy_of(1).scope():
        one = replicax.Variable(jnp.zeros((), jnp.bfloat16))
    replicax.Checkpoint(v=one).restore(tmp_path / "a")
    assert float(one.value) == float(v.read_value()) == {"sum": 264.0, "mean": 33.0}[aggregation]


@pytest.mark.parametrize("replicas", [1, 2])
def test_without_aggregation_each_replica_has_its_own_again(tmp_path, replicas) -> None:
    strategy = strategy_of(replicas)
    with strategy.scope():
        v = replicax.Variable(np.zeros(3, np.float32), synchronization="on_read")
    strategy.run(lambda: v.assign(v * 0.0 + own_number()[None]))
    checkpoint = replicax.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a")
    strategy.run(lambda: v.assign(v * 0.0))
    checkpoint.restore(tmp_path / "a")
    assert [x.tolist() for x in strategy.local_results(v)] == [[i + 1.0] * 3 for i in range(replicas)]
    with strategy_of(3).scope():
        w = replicax.Variable(np.zeros(3, np.float32), synchronization="on_read")
    with pytest.raises(
        ValueError, match=rf"v: saved was float32\[{replicas},3\], of {replicas} replicas' copies, here"
    ):
        replicax.Checkpoint(v=w).restore(tmp_path / "a")


@pytest.mark.parametrize("count", [1, 2])
def test_a_sum_of_bools_comes_back_as_the_same_count(tmp_path, count) -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        v = replicax.Variable(False, synchronization="on_read", aggregation="sum")
    strategy.run(lambda: v.assign(own_number() <= count))
    checkpoint = replicax.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a")
    strategy.run(lambda: v.assign(own_number() <= 0))
    checkpoint.restore(tmp_path / "a")
    assert int(v.value) == count
    with strategy_of(2).scope():
        w = replicax.Variable(False, synchronization="on_read", aggregation="sum")
    with pytest.raises(ValueError, match=r"onto other numbers give it an aggregation, or an integer dtype\.$"):
        replicax.Checkpoint(v=w).restore(tmp_path / "a")


def bytes_of_arrays(folder) -> int:
    """Of the values in a store of pieces; how much its files hold besides depends on which writes came together."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return sum(len(store.read(key).result().value) for key in store.list().result() if not key.endswith(b".zarray"))


@pytest.mark.parametrize("kind", [pytest.param("mirrored", marks=pytest.mark.soak), "sharded"])
def test_groups_are_saved_once_and_restored_from_and_onto_other_placements(tmp_path, kind) -> None:
    pairs = replicax.variables.GroupPartitioner(2)
    runs = {
        "groups": Run.of(replicax.ShardedStrategy([f"cpu:{i}" for i in range(6)], pairs), batch=12),
        kind: Run.of(strategy_named(kind, 3), batch=12, seed=1),
    }
    saved, sizes = {}, {}
    for name, run in runs.items():
        run.go(1)
        run.checkpoint.save(tmp_path / name)
        saved[name] = run.values()
        sizes[name] = bytes_of_arrays(tmp_path / name / "arrays-0")
    assert sizes[kind] > 2 * 20 * 30 * 4  # the largest variable and its slot
    assert sizes["groups"] == sizes[kind]
    for source, onto in ((kind, "groups"), ("groups", kind), ("groups", "groups")):
        runs[onto].checkpoint.restore(tmp_path / source)
        assert runs[onto].values() == saved[source]
        runs[onto].go(1)


def test_a_piece_that_is_filled_up_is_saved_without_the_filling(tmp_path) -> None:
    values = np.arange(5, dtype=np.float32)
    with strategy_of(4).scope():
        v = replicax.variables.ShardedVariable(values)
    replicax.Checkpoint(v=v).save(tmp_path / "a")
    with strategy_of(3).scope():
        w = replicax.variables.ShardedVariable(values * 0)
    replicax.Checkpoint(v=w).restore(tmp_path / "a")
    np.testing.assert_array_equal(w.numpy(), values)
    np.testing.assert_array_equal(w.slot.array, [0, 1, 2, 3, 4, 0])


def test_on_one_logical_device_and_copies_that_are_split(tmp_path) -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        there = replicax.Variable(np.arange(4.0, dtype=np.float32), logical_device=1)
        copies = replicax.Variable(
            np.ones((4, 2), np.float32), synchronization="on_read", aggregation="sum", partition_dimensions=[2, 1]
        )
    replicax.Checkpoint(there=there, copies=copies).save(tmp_path / "a")
    with strategy_of(3).scope():
        v = replicax.Variable(np.zeros(4, np.float32))
        w = replicax.Variable(np.zeros((4, 2), np.float32), synchronization="on_read", aggregation="sum")
    replicax.Checkpoint(there=v, copies=w).restore(tmp_path / "a")
    assert v.numpy().tolist() == [0, 1, 2, 3]
    assert w.numpy().tolist() == [[2.0, 2.0]] * 4
    back = replicax.Checkpoint(there=there, copies=copies)
    replicax.Checkpoint(there=v, copies=w).save(tmp_path / "b")
    strategy.run(lambda: there.assign(there * 0.0))
    back.restore(tmp_path / "b")
    assert there.numpy().tolist() == [0, 1, 2, 3]
    assert {device.id for device in there.slot.array.devices()} == {1, 3}
    assert copies.numpy().tolist() == [[2.0, 2.0]] * 4


def test_pieces_that_a_step_moves_to_a_logical_device_are_saved_from_there(tmp_path) -> None:
    strategy = logical_strategy(2, 2, over_all(2, min_bytes=0))
    with strategy.scope():
        w = replicax.Variable(np.arange(6.0, dtype=np.float32))
    checkpoint = replicax.Checkpoint(w=w)
    checkpoint.save(tmp_path / "before")
    strategy.run(lambda: w.assign(strategy.assign_to_logical_device(jnp.ones(6), 1) + w.value))
    assert {device.id for device in w.slot.array.devices()} == {1, 3}
    checkpoint.save(tmp_path / "after")
    checkpoint.restore(tmp_path / "before")
    assert w.numpy().tolist() == [0, 1, 2, 3, 4, 5]
    checkpoint.restore(tmp_path / "after")
    assert w.numpy().tolist() == [1, 2, 3, 4, 5, 6]


def test_arrays_get_their_shardings(tmp_path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.arange(8, dtype=np.float32)
    replicax.Checkpoint(x=jax.device_put(values, split)).save(tmp_path / "a")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for sharding in (split, everywhere, jax.sharding.SingleDeviceSharding(jax.devices()[5])):
        checkpoint = replicax.Checkpoint(x=jax.device_put(values * 0, sharding))
        checkpoint.restore(tmp_path / "a")
        assert checkpoint.x.sharding == sharding
        assert checkpoint.x.committed
        np.testing.assert_array_equal(checkpoint.x, values)


def test_an_array_that_jax_may_move_may_be_moved_again(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(x=jnp.arange(3.0), weak=jnp.asarray(2.0), key=jax.random.key(0))
    checkpoint.save(tmp_path / "a")
    checkpoint.restore(tmp_path / "a")
    elsewhere = jax.device_put(1.0, jax.devices()[1])
    assert (checkpoint.x * checkpoint.weak + elsewhere).tolist() == [1.0, 3.0, 5.0]
    assert not checkpoint.key.committed
