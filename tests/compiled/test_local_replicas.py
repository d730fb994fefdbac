"""Replicas that share devices: a program means what it means with a device for each replica."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax
from replicax import REPLICA_AXIS
from replicax.variables.partitioners import over_all
from tests.checkpoint.runs import Run
from tests.conftest import shared_strategy, strategy_of
from tests.programs.programs import components

PER_REPLICA = replicax.RunOptions(executor="per_replica")


def context() -> replicax.ReplicaContext:
    replica = replicax.get_replica_context()
    assert replica is not None
    return replica


def rows(strategy: replicax.Strategy, *shape: int) -> Any:
    """A value of each replica's own."""
    size = int(np.prod(shape))
    return strategy.distribute_values_from_function(
        lambda ctx: (np.arange(size, dtype=np.float32).reshape(shape) + 10 * ctx.replica_id_in_sync_group) / 7
    )


def everyones(strategy: replicax.Strategy, tree: Any) -> Any:
    """The components of each leaf, and plain arrays."""

    def read(leaf: Any) -> Any:
        if not isinstance(leaf, replicax.PerReplica):
            return leaf
        return [np.asarray(x) for x in (components(leaf) if leaf.mask is None else strategy.local_results(leaf))]

    return jax.tree.map(read, tree, is_leaf=lambda v: isinstance(v, replicax.PerReplica))


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@functools.cache
def on_devices_of_their_own(step: Any, replicas: int, *shape: int) -> Any:
    strategy = strategy_of(replicas)
    return everyones(strategy, strategy.run(step, (rows(strategy, *shape),)))


def compare(step: Any, devices: int, *shape: int, replicas: int = 8, options: Any = None) -> None:
    """``step`` on so many replicas: compiled for as many devices, and with fewer."""
    strategy, expected = shared_strategy(replicas, devices), on_devices_of_their_own(step, replicas, *shape)
    found = everyones(strategy, strategy.run(step, (rows(strategy, *shape),), options=options))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same(found, expected)


# --- collectives ----------------------------------------------------------------------------------------


def collectives_of_jax(x: jax.Array) -> Any:
    n, mine = lax.axis_size(REPLICA_AXIS), lax.axis_index(REPLICA_AXIS).astype(x.dtype)
    table = jnp.outer(jnp.arange(n, dtype=x.dtype) + 1, x)
    return {
        "number": mine,
        "sum": lax.psum({"x": x, "one": 1, "shared": jnp.ones(2)}, REPLICA_AXIS),
        "extremes": (lax.pmax(x, REPLICA_AXIS), lax.pmin(x, REPLICA_AXIS)),
        "gathered": (lax.all_gather(x, REPLICA_AXIS, axis=1), lax.all_gather(x, REPLICA_AXIS, tiled=True)),
        "scattered": (
            lax.psum_scatter(table * mine, REPLICA_AXIS),
            lax.psum_scatter(jnp.tile(table.T, 2), REPLICA_AXIS, scatter_dimension=1, tiled=True),
        ),
        "exchanged": (
            lax.all_to_all(table, REPLICA_AXIS, 0, 1),
            lax.all_to_all(jnp.tile(table, (2, 1)), REPLICA_AXIS, 0, 1, tiled=True),
        ),
        "permuted": (lax.pshuffle(x, REPLICA_AXIS, [*range(1, n), 0]), lax.ppermute(x, REPLICA_AXIS, [(0, n - 1)])),
        "in groups": lax.psum(x * 2, REPLICA_AXIS, axis_index_groups=[[0, 7, 2, 5], [4, 3, 6, 1]]),
    }


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4))])
def test_collectives_of_jax(devices: int) -> None:
    compare(collectives_of_jax, devices, 3)


def test_collectives_over_the_rows_of_all_replicas() -> None:
    axes = ("rows", REPLICA_AXIS)

    def centred(x: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda row: row - lax.pmean(row, axes), axis_name="rows")
        return lax.fori_loop(0, 2, lambda _, x: rows(x), x)

    def step(x: jax.Array) -> Any:
        sums = jax.vmap(lambda row: lax.psum({"row": row, "shared": row * 0 + 2}, axes), axis_name="rows")(x)
        largest = jax.vmap(lambda row: lax.pmax(row, axes), axis_name="rows")(x)
        return centred(x), jax.grad(lambda x: jnp.sum(jnp.tanh(centred(x))))(x), sums, largest

    compare(step, 2, 4, 3)


def collectives_of_replicas(x: jax.Array) -> Any:
    ring = replicax.CommunicationOptions(implementation="ring", bytes_per_pack=16, timeout_seconds=60.0)
    number = jnp.asarray(context().replica_id_in_sync_group).astype(jnp.float32)
    total = context().all_reduce("sum", {"x": x, "number": number > 2, "half": (x * 0 + 1).astype(jnp.bfloat16)})

    def across(strategy: replicax.Strategy, value: Any) -> Any:
        return strategy.reduce("mean", value, axis=0), strategy.local_results(value)[3], strategy.gather(value, 0)

    return (
        total,
        context().all_reduce("mean", [x * total["x"], jnp.ones(3)], ring),
        context().all_gather(x, 0, ring),
        context().merge_call(across, (x + number,)),
        context().all_gather(x[:0] * number, 0),
        jax.random.key_data(context().all_gather(context().random_key(jax.random.key(0))[None], 0)),
        jax.grad(lambda x: (context().all_reduce("sum", x * x) * (1.0 + number)).sum())(x),
    )


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_collectives_of_replicas(options: Any) -> None:
    compare(collectives_of_replicas, 2, 4, replicas=4, options=options)


def test_a_timeout_names_all_replicas_of_the_device_that_is_missing() -> None:
    strategy, release = shared_strategy(4, 2), threading.Event()

    def late(replica: Any) -> Any:
        if replica == 2:
            release.wait(20)
        return np.float32(1)

    def step(x: Any) -> Any:
        number = context().replica_id_in_sync_group
        one = jax.pure_callback(late, jax.ShapeDtypeStruct((), jnp.float32), number)
        return context().all_reduce("sum", x + one, replicax.CommunicationOptions(timeout_seconds=0.3))

    missing = r"replica\(s\) \[0, 1\] have waited for more than 0.3 s .* replica\(s\) \[2, 3\], which have not come"
    with pytest.raises(replicax.errors.DeadlockError, match=missing):
        strategy.run(step, args=(1.0,))
    release.set()
    slower = replicax.CommunicationOptions(timeout_seconds=60.0)
    assert float(strategy.run(lambda x: context().all_reduce("sum", x, slower), args=(1.0,))) == 4.0


# --- loops, branches and calls --------------------------------------------------------------------------


def loops_and_branches(x: jax.Array) -> Any:
    mine = lax.axis_index(REPLICA_AXIS).astype(x.dtype)

    def turn(carry: Any, y: Any) -> Any:
        own, common, count = carry
        total = lax.psum(own * y, REPLICA_AXIS)
        return (own + 0.1 * total + mine, common + total, count + 1), (own, total, count)

    def until(state: Any) -> Any:
        return (state[0] < 3) & (lax.pmax(state[1], REPLICA_AXIS).max() < 1e4)

    return {
        "scan": lax.scan(turn, (x, jnp.zeros(3), 0), jnp.stack([x, x * 2]), reverse=True),
        "while": lax.while_loop(until, lambda s: (s[0] + 1, s[1] + lax.pmean(s[1], REPLICA_AXIS)), (0, x)),
        "branch": lax.cond(lax.psum(x[0], REPLICA_AXIS) > 0, lambda: (lax.psum(x, REPLICA_AXIS), x), lambda: (x, -x)),
        "call": jax.jit(lambda v: (lax.psum(v, REPLICA_AXIS), v * mine, lax.axis_index(REPLICA_AXIS)))(x),
        "kept": jax.checkpoint(lambda v: jnp.sin(v) * lax.pmean(v, REPLICA_AXIS))(x),
        "number in a branch": lax.cond(x[0] > 3, lambda: x * lax.axis_index(REPLICA_AXIS).astype(x.dtype), lambda: x),
        "number in a loop": lax.fori_loop(0, lax.axis_index(REPLICA_AXIS), lambda i, v: v + i, 0),
        "key": jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index(REPLICA_AXIS)))[0],
    }


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_loops_branches_and_calls(devices: int) -> None:
    def step(x: jax.Array) -> Any:
        found = loops_and_branches(x)
        return {**found, "key": jax.random.key_data(found["key"])}

    compare(step, devices, 3)


def test_mutable_arrays_on_one_side_of_a_collective() -> None:
    def step(x: jax.Array) -> Any:
        total = context().all_reduce("sum", x)
        kept = jax.new_ref(jnp.zeros(3))
        kept[...] += x * total
        return kept[...] + total

    compare(step, 2, 3)


# --- what is computed how often -------------------------------------------------------------------------


def test_the_same_is_computed_once_for_each_device_and_gradients_are_added_up_one_by_one() -> None:
    strategy = shared_strategy(6, 2)
    with strategy.scope():
        w = replicax.Variable(jnp.ones((17, 19)), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: jax.Array) -> Any:
        scale = jnp.exp(jnp.full(23, w.value[0, 0]))  # the same on all replicas
        loss, gradients = replicax.value_and_grad(lambda: replicax.compute_average_loss(jnp.sin(x @ w).sum(-1)), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss, scale

    program = strategy.extended.trace(step, args=(rows(strategy, 2, 17),))
    lowered = program.call.lower(*program.inputs()).as_text()
    assert lowered.count("stablehlo.exponential") == 1
    assert "3x23xf32" not in lowered
    assert "3x17x19xf32" not in lowered  # no gradient is kept for each replica
    assert [c.kind for c in program.collectives()] == ["all-reduce"]


def test_replicas_print_one_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = shared_strategy(4, 1)

    def step() -> Any:
        number = context().replica_id_in_sync_group
        jax.debug.print("replica {}", number)
        total = context().all_reduce("sum", number)
        jax.debug.print("total {}", total)
        return jax.pure_callback(lambda n: np.asarray(n * 2), jax.ShapeDtypeStruct((), jnp.int32), number)

    doubled = strategy.run(step)
    jax.effects_barrier()
    assert [int(n) for n in strategy.local_results(doubled)] == [0, 2, 4, 6]
    printed = capfd.readouterr().out.splitlines()
    assert sorted(printed) == sorted([f"replica {i}" for i in range(4)] + ["total 6"] * 4)


# --- training -------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, 2])
def test_training_and_a_checkpoint_onto_other_devices(devices: int, tmp_path: Any) -> None:
    goes_on_elsewhere(shared_strategy(4, devices), [shared_strategy(4, 3 - devices)], tmp_path)


def goes_on_elsewhere(strategy: replicax.Strategy, others: Sequence[replicax.Strategy], path: Any) -> None:
    """A run of four replicas is that of four devices, and goes on from a checkpoint under other strategies.

    Under the last of these it does so on the per-replica executor.
    """
    reference, run = Run.of(strategy_of(4)), Run.of(strategy)
    for each in (reference, run):
        each.go(2)
    assert_all_close(run, reference)
    run.checkpoint.save(path / "run")
    for other in others:
        onto = Run.of(other, seed=1)
        onto.checkpoint.restore(path / "run")
        assert onto.values() == run.values()
    with replicax.debug():
        onto.go(1)
    reference.go(1)
    assert_all_close(onto, reference)


def assert_all_close(run: Run, reference: Run) -> None:
    """The variable ``b`` and its slot have 16 bits."""
    found, expected = run.values(), reference.values()
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=2e-2 if name in ("b", "slot 0") else 1e-5, err_msg=name
        )


def pieces_on_two_devices() -> replicax.Strategy:
    return replicax.ShardedStrategy(["cpu:0", "cpu:1"], over_all(2, min_bytes=0), num_replicas=4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("partial", ["exact", "pad"])
@pytest.mark.parametrize("make", [lambda: shared_strategy(4, 2), pieces_on_two_devices], ids=["mirrored", "split"])
def test_batches_that_do_not_divide_evenly(make: Callable[[], replicax.Strategy], partial: str) -> None:
    results = []
    for strategy in (strategy_of(4), make()):
        with strategy.scope():
            w = replicax.Variable(jnp.ones(3), name="w")
            own = replicax.Variable(jnp.zeros(()), name="own", synchronization="on_read")
            optimizer = replicax.Optimizer(optax.sgd(0.1))

        def step(x: jax.Array) -> Any:
            loss, gradients = replicax.value_and_grad(lambda: replicax.compute_average_loss(x @ w.value), [w])()  # noqa: B023
            optimizer.apply_gradients(zip(gradients, [w], strict=True))  # noqa: B023
            own.assign_add(loss)  # noqa: B023
            return loss

        batches = [np.arange(3.0 * n, dtype=np.float32).reshape(n, 3) for n in (8, 6)]
        dataset = strategy.distribute_dataset(batches, replicax.InputOptions(partial_batch=partial))
        losses = [strategy.reduce("sum", strategy.run(step, args=(x,))) for x in dataset]
        copies = [np.asarray(c) for c in strategy.local_results(own)]
        results.append((losses, w.numpy(), copies))
    assert_same(results[1], results[0])


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3, -2])
def test_the_number_of_replicas_is_a_multiple_of_the_devices(number: int) -> None:
    with pytest.raises(ValueError, match=rf"multiple of the number of devices.*got {number} replica\(s\) for 2 device"):
        replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=number)
    with pytest.raises(TypeError, match=r"num_replicas must be an int or None, got 2\.0"):
        replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=2.0)  # type: ignore[arg-type]


def test_groups_are_of_devices() -> None:
    names = ["cpu:0", "cpu:1"]
    with pytest.raises(
        ValueError, match=r"group_size 3 does not divide the number of devices that replicas share, 2: "
    ):
        replicax.MirroredStrategy(names, replicax.variables.GroupPartitioner(3), num_replicas=6)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with pytest.raises(
        ValueError, match=r"groups of logical devices.*got 3 replica\(s\) for 2 group\(s\) of 2 devices"
    ):
        replicax.StrategyExtended(devices, num_replicas=3)


def test_collectives_that_can_not_join_replicas_of_a_device() -> None:
    strategy = shared_strategy(4, 2)
    with strategy.scope():
        v = replicax.Variable(1.0, name="v")

    def of_groups(x: jax.Array) -> Any:
        v.assign(2.0)
        return lax.all_gather(x, REPLICA_AXIS, axis_index_groups=[[0, 1], [2, 3]])

    def of_unequal_groups(x: jax.Array) -> Any:
        return lax.psum(x, REPLICA_AXIS, axis_index_groups=[[0], [1, 2, 3]])

    def of_ragged_rows(x: jax.Array) -> Any:
        one = jnp.ones(4, jnp.int32)
        return lax.ragged_all_to_all(x, x, one, one, one, one, axis_name=REPLICA_AXIS)

    def on_both_sides(x: jax.Array) -> Any:
        kept = jax.new_ref(x)
        kept[...] += context().all_reduce("sum", kept[...])
        return kept[...]

    for step, message in (
        (of_groups, r"the collective all_gather at .*test_local_replicas.* one of groups"),
        (of_unequal_groups, r"groups of different sizes, \[\[0\], \[1, 2, 3\]\]"),
        (of_ragged_rows, r"the collective ragged_all_to_all at .*test_local_replicas.* can't join replicas that share"),
        (on_both_sides, r"a mutable array .*both before a collective and after it, at .*test_local_replicas"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy.run(step, args=(rows(strategy, 2),))
    assert float(v) == 1.0
