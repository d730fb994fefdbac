"""The synchronous mode: a group of scheduled functions is a step, with the result of MirroredStrategy."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.conftest import strategy_of
from tests.parameter_server.regression import Regression, batches, in_parts, mirrored, regression
from tests.parameter_server.thread_actors import coordinator_of, wait_until_ready

STEPS = 8


def trained(strategy: replicax.ParameterServerStrategy, tx: Any = None) -> Regression:
    model = regression(strategy, tx)

    def train(*part: Any) -> Any:
        return strategy.run(model.step, args=part)

    with coordinator_of(strategy) as (coordinator, _):
        for batch in batches(STEPS):
            for part in in_parts(batch, strategy.num_workers):
                coordinator.schedule(train, args=part)
        coordinator.join(timeout_seconds=100)
    return model


@pytest.mark.parametrize(
    ("workers", "servers", "devices", "partitioner", "tx"),
    [
        (2, 1, 1, None, None),
        (2, 1, 1, None, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))),
        (4, 3, 1, replicax.variables.FixedShardsPartitioner(2), None),
        (2, 2, 2, lambda shape, dtype: [1, 2] if len(shape) == 2 else [1] * len(shape), None),
    ],
    ids=["2-workers", "a-norm-over-all-variables", "split-by-rows", "2-devices-a-worker"],
)
def test_it_equals_mirrored_strategy(workers: int, servers: int, devices: int, partitioner: Any, tx: Any) -> None:
    strategy = replicax.ParameterServerStrategy(
        num_workers=workers,
        num_servers=servers,
        variable_partitioner=partitioner,
        mode="sync",
        devices_per_worker=devices,
    )
    assert strategy.num_replicas_in_sync == workers * devices
    model, reference = trained(strategy, tx), mirrored(workers * devices, STEPS, tx)
    assert int(model.iterations) == int(reference.iterations) == STEPS
    for found, expected in zip(model.values, reference.values, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def test_replicas_are_numbered_and_assignments_combined_over_all_workers() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=3, mode="sync", devices_per_worker=2)
    with strategy.scope():
        kinds = {
            how: replicax.Variable(10.0, name=how, aggregation=how) for how in ("sum", "mean", "only_first_replica")
        }
        added = replicax.Variable(1.0, aggregation="sum")
        rows = replicax.Variable(np.zeros((6, 1), np.float32), aggregation="sum")

    def step() -> tuple[Any, int]:
        replica = replicax.get_replica_context()
        mine = jnp.float32(replica.replica_id_in_sync_group)
        for v in kinds.values():
            v.assign(mine + 1)
        added.assign_add(mine)
        own = replica.replica_id_in_sync_group[None]
        rows.scatter_add(replicax.IndexedSlices(mine[None, None], own, rows.shape))
        return mine, replica.num_replicas_in_sync

    with coordinator_of(strategy) as (coordinator, _):
        results = [coordinator.schedule(lambda: strategy.run(step)) for _ in range(3)]
        coordinator.join(timeout_seconds=100)
        fetched = coordinator.fetch(results)
        assert [[float(part) for part in parts] for parts, _ in fetched] == [[0, 1], [2, 3], [4, 5]]
        assert {count for _, count in fetched} == {6}
        assert {how: float(v) for how, v in kinds.items()} == {"sum": 21.0, "mean": 3.5, "only_first_replica": 1.0}
        assert float(added) == 16.0
        assert rows.numpy().ravel().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("partial", ["exact", "pad"])
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_replicas_of_a_worker_may_have_batches_of_other_sizes(executor: Any, partial: Any) -> None:
    """Each of two workers divides three examples over two replicas; the mean is over all six examples."""
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode="sync", devices_per_worker=2)
    one_process = strategy_of(4)
    model, reference = regression(strategy), regression(one_process)
    with strategy.scope():
        places = replicax.Variable(0.0, aggregation="sum")

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        places.assign_add(10.0 ** replicax.get_replica_context().replica_id_in_sync_group.astype(np.float32))
        return model.step(x, y)

    def train(*part: Any) -> Any:
        [local] = strategy.distribute_dataset([part], replicax.InputOptions(partial_batch=partial))
        return strategy.run(step, args=local, options=replicax.RunOptions(executor))

    with coordinator_of(strategy) as (coordinator, _):
        for batch in batches(3, size=6):
            for part in in_parts(batch, 2):
                coordinator.schedule(train, args=part)
        coordinator.join(timeout_seconds=100)
    for batch in one_process.distribute_dataset(list(batches(3, size=6))):
        one_process.run(reference.step, args=batch)
    assert float(places) == 3 * 1111.0
    for found, expected in zip(model.values, reference.values, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def totalling() -> tuple[replicax.ParameterServerStrategy, replicax.Variable, Any]:
    """A sum on servers, and a function that adds to it."""
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode="sync")
    with strategy.scope():
        total = replicax.Variable(0.0, aggregation="sum")

    def add(x: float) -> None:
        strategy.run(lambda x: total.assign_add(x), args=(x,))

    return strategy, total, add


def test_a_last_step_of_fewer_functions_is_made_by_join() -> None:
    strategy, total, add = totalling()
    with coordinator_of(strategy) as (coordinator, _):
        for x in (1.0, 2.0, 4.0):
            coordinator.schedule(add, args=(x,))
        coordinator.join(timeout_seconds=100)
        assert float(total) == 7.0
        for x in (8.0, 16.0):
            coordinator.schedule(add, args=(x,))
        coordinator.join(timeout_seconds=100)
        assert float(total) == 31.0


@pytest.mark.parametrize("dies", [None, "StepWorker", "ShardServer"])
def test_a_step_with_a_function_that_fails_does_not_count(dies: str | None) -> None:
    """Also if the worker of another function dies, or the server that is told."""
    strategy, total, add = totalling()
    with coordinator_of(strategy) as (coordinator, actors):
        held = threading.Event()
        wait_until_ready(coordinator)
        [server], worker = actors.of("ShardServer"), actors.of("StepWorker")[1]

        def hold(method: str, args: Any) -> None:
            if method == "work" and held.wait(100) and dies == "StepWorker":
                worker.kill()

        worker.before = hold
        server.before = lambda method, args: server.kill() if (method, dies) == ("break_off", "ShardServer") else None
        failing = coordinator.schedule(lambda: 1 // 0)
        beside = coordinator.schedule(add, args=(100.0,))
        waiting = coordinator.schedule(add, args=(1000.0,))
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            failing.fetch(100)
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.done()
        # The other function of the step is running still; these are steps of their own.
        results = [coordinator.schedule(add, args=(x,)) for x in (1.0, 2.0, 4.0)]
        held.set()
        coordinator.join(timeout_seconds=100)
        assert coordinator.fetch(results) == [None] * 3
        for value in [waiting, beside] if dies == "StepWorker" else [waiting]:
            with pytest.raises(replicax.errors.WorkerError, match="was not run"):
                value.fetch(100)
        assert dies == "StepWorker" or beside.fetch() is None
        assert float(total) == 7.0


def test_collectives_inside_a_step_and_gradients_that_are_reduced_already_are_refused() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode="sync")
    with strategy.scope():
        v, optimizer = replicax.Variable(1.0), replicax.Optimizer(optax.sgd(1.0))

    here = replicax.get_replica_context
    with coordinator_of(strategy) as (coordinator, _):
        for step, message in (
            (lambda: here().all_reduce("sum", 1.0), "all_reduce was asked for .* meet only on the servers"),
            (lambda: here().all_gather(jnp.ones(1), axis=0), "all_gather was asked for"),
            (lambda: here().merge_call(lambda strategy, x: x, args=(1.0,)), "merge_call was asked for"),
            (lambda: optimizer.apply_gradients([(v * 1.0, v)], aggregate=False), "so none can be reduced already"),
            (lambda: optimizer.apply_gradients([(v * 1.0, v)], False), "so none can be reduced already"),
        ):
            coordinator.schedule(lambda step=step: strategy.run(step))
            with pytest.raises(replicax.errors.WorkerError, match=message):
                coordinator.join(timeout_seconds=100)


def test_outside_a_step_a_function_combines_the_replicas_of_its_own_worker() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode="sync", devices_per_worker=2)

    def combined() -> Any:
        mine = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group[None])
        return strategy.reduce("sum", mine), strategy.reduce("mean", mine, axis=0), strategy.gather(mine, axis=0)

    with coordinator_of(strategy) as (coordinator, _):
        first, second = coordinator.fetch([coordinator.schedule(combined) for _ in range(2)])
    assert [np.ravel(found).tolist() for found in first] == [[1], [0.5], [0, 1]]
    assert [np.ravel(found).tolist() for found in second] == [[5], [2.5], [2, 3]]


@pytest.mark.parametrize(("parts", "count"), [([2, 1], 6 + 4), ([1, 1], 6 + 4), ([1, 2], 2 * (6 + 4))])
def test_rows_of_a_table_are_sent_as_rows(parts: list[int], count: int) -> None:
    """Of a gradient as IndexedSlices only the rows go to the servers, and each server gets its own."""
    strategy = replicax.ParameterServerStrategy(
        num_workers=2, num_servers=2, mode="sync", variable_partitioner=lambda shape, dtype: parts[: len(shape)]
    )

    def build(strategy: replicax.Strategy) -> tuple[Any, Any]:
        with strategy.scope():
            table = replicax.Variable(np.arange(24, dtype=np.float32).reshape(8, 3), name="table")
            optimizer = replicax.Optimizer(optax.adagrad(0.5))

        def step(ids: jax.Array) -> None:
            rows = replicax.IndexedSlices(jnp.ones((ids.shape[0], 3)), ids, table.shape)
            optimizer.apply_gradients([(rows, table)])

        return table, step

    ids = [np.array([0, 7, 7, -1, 3, 4, 0, 1], np.int32), np.array([0, 1, 2, 3], np.int32)]  # the last: of one half
    table, step = build(strategy)
    with coordinator_of(strategy) as (coordinator, actors):
        sent: list[Any] = []
        for server in actors.of("ShardServer"):
            server.before = lambda method, args: sent.append(args[0]) if method == "push" else None
        found = []
        for batch in ids:
            for part in in_parts((batch,), 2):
                coordinator.schedule(lambda x: strategy.run(step, args=(x,)), args=part)
            coordinator.join(timeout_seconds=100)
            found.append(table.numpy())
    rows = [change for push in sent for change in push.changes.values()]
    assert all(isinstance(r, tuple) for r in rows)
    assert sum(len(indices) for indices, _ in rows) == count  # row 7, which comes three times, is one

    reference = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    expected, step = build(reference)
    for batch, values in zip(reference.distribute_dataset(ids), found, strict=True):
        reference.run(step, args=(batch,))
        np.testing.assert_allclose(values, expected.numpy(), rtol=1e-6)
