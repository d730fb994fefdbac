"""ClusterCoordinator: functions are run, results come back, and errors are raised once."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.loop import Precision, accumulated
from replicax.parameter_server import coordinator as coordinator_module
from tests.parameter_server.regression import batches, regression
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


@pytest.fixture
def strategy() -> replicax.ParameterServerStrategy:
    return replicax.ParameterServerStrategy(num_workers=2, num_servers=2)


def test_every_function_is_run_once(strategy: replicax.ParameterServerStrategy) -> None:
    model = regression(strategy, optax.sgd(0.01))
    [batch] = batches(1)
    with coordinator_of(strategy) as (coordinator, _):
        results = [coordinator.schedule(lambda *b: strategy.run(model.step, args=b), args=batch) for _ in range(30)]
        report = coordinator.join(timeout_seconds=WAIT)
        assert coordinator.done()
        losses = coordinator.fetch({"losses": results, "other": 3})
        assert int(model.iterations) == report.functions == sum(report.by_worker.values()) == 30
        assert losses["other"] == 3
        assert losses["losses"][0] > losses["losses"][-1] > 0
        assert coordinator.join().functions == 0


def test_values_come_back_as_numpy_arrays() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, devices_per_worker=2)
    with strategy.scope():
        v = replicax.Variable([1.0, 2.0])

    def fn() -> Any:
        mine = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group)
        others = {"text": "text", "none": None, "key": jax.random.key(3)}
        return {"mine": mine, "total": strategy.reduce("sum", mine), "variable": v, **others}

    with coordinator_of(strategy) as (coordinator, actors):
        found = coordinator.schedule(fn).fetch(WAIT)
        [server], [worker] = actors.of("ShardServer"), actors.of("StepWorker")
    assert server.env["JAX_PLATFORMS"] == "cpu"
    assert (worker.env["JAX_PLATFORMS"], worker.env["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")
    assert worker.args[1].jax["jax_numpy_dtype_promotion"] == "strict"  # as in this process
    assert worker.args[1].jax.keys() >= {"jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"}
    assert [int(part) for part in found["mine"]] == [0, 1]
    assert type(found["total"]) is np.ndarray
    assert found["total"] == 1
    assert found["variable"].tolist() == [1.0, 2.0]
    assert (found["text"], found["none"]) == ("text", None)
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_the_program_reads_and_assigns_what_the_servers_have(strategy: replicax.ParameterServerStrategy) -> None:
    with strategy.scope():
        v = replicax.Variable(np.zeros(3, np.float32), name="v")
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(jnp.ones(3)))).fetch(WAIT)
        assert v.numpy().tolist() == [1, 1, 1]
        v.assign([5.0, 6.0, 7.0])
        coordinator.schedule(lambda: strategy.run(lambda: v.assign(v * 2))).fetch(WAIT)
        assert v.numpy().tolist() == [10, 12, 14]
        assert v.value is v.value  # what has not changed is not fetched again
        coordinator.schedule(lambda: v.assign_sub(jnp.ones(3))).fetch(WAIT)  # outside of any step
        assert coordinator.schedule(lambda: v.numpy()).fetch(WAIT).tolist() == [9, 11, 13]
        coordinator.schedule(lambda: v.assign(jnp.ones(3)).name).fetch(WAIT)
        assert v.numpy().tolist() == [1, 1, 1]
        coordinator.join(WAIT)
        coordinator.schedule(lambda: jax.jit(lambda: v.assign_add(jnp.ones(3)).shape[0])())
        with pytest.raises(replicax.errors.WorkerError, match=r"was read inside jax\.jit, outside a step"):
            coordinator.join(WAIT)
        with strategy.scope():
            late = replicax.Variable(4.0, name="late")
        coordinator.schedule(lambda: strategy.run(lambda: late.assign_add(v[0]))).fetch(WAIT)
    coordinator.close()  # again, which does nothing
    assert repr(coordinator) == f"ClusterCoordinator({strategy!r}, closed)"
    assert float(late) == 5.0  # and is here when the servers are gone
    assert v.assign([1.0, 2.0, 3.0]).numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_rows_that_are_looked_up_come_alone(dim: int | None) -> None:
    def partitioner(shape: tuple[int, ...], dtype: Any) -> list[int]:
        return [2 if d == dim else 1 for d in range(len(shape))]

    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2, variable_partitioner=partitioner)
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    with strategy.scope():
        table = replicax.Variable(values, name="table")

    def look_up(ids: Any) -> Any:
        return table[ids]

    ids = np.array([[5, 0, 5], [2, -1, 3]])
    with coordinator_of(strategy) as (coordinator, actors):
        calls: list[tuple[str, Any]] = []
        for server in actors.of("ShardServer"):
            server.before = lambda method, args: calls.append((method, args))
        assert coordinator.schedule(look_up, args=(ids,)).fetch(WAIT).tolist() == values[ids].tolist()
        assert coordinator.schedule(look_up, args=(2,)).fetch(WAIT).tolist() == values[2].tolist()
        unsigned = coordinator.schedule(look_up, args=(np.array([5, 1], np.uint8),)).fetch(WAIT)
        assert unsigned.tolist() == values[[5, 1]].tolist()
        none = coordinator.schedule(look_up, args=(np.zeros((0, 2), np.int32),)).fetch(WAIT)
        assert (none.shape, none.dtype) == ((0, 2, 4), np.float32)
        asked = [args[1] for method, args in calls if method == "rows"]
        assert {method for method, _ in calls} <= {"rows", "ready", "snapshot", "put"}
        assert sum(map(len, asked[: 2 if dim is not None else 1])) == (8 if dim == 1 else 4)  # each row once
        coordinator.schedule(look_up, args=(np.array([6]),))
        with pytest.raises(replicax.errors.WorkerError, match=r"the index 6 at \[0\] is out of range"):
            coordinator.join(WAIT)
        assert coordinator.schedule(lambda: table[1:3]).fetch(WAIT).tolist() == values[1:3].tolist()
        assert coordinator.schedule(lambda: strategy.run(lambda: table[0] + 1)).fetch(WAIT).tolist() == [1, 2, 3, 4]


class Counter:
    """Things to schedule whose attributes change."""

    def __init__(self) -> None:
        self.number, self.seen = 0, [0]

    def method(self) -> Any:
        return self.number, self.seen

    def __call__(self) -> Any:
        return self.method()


def test_a_function_gets_what_it_uses_as_it_is_when_it_is_scheduled() -> None:
    counter, array = Counter(), np.zeros(2)

    def captures() -> Any:
        return counter.number, counter.seen, array.tolist()

    functions = [captures, counter.method, counter, functools.partial(Counter.method, counter)]
    with coordinator_of(replicax.ParameterServerStrategy(num_workers=1)) as (coordinator, actors):
        for _ in range(3):
            found = [coordinator.schedule(fn).fetch(WAIT) for fn in functions]
            assert found == [(counter.number, counter.seen, array.tolist()), *[counter.method()] * 3]
            counter.number += 1
            counter.seen.append(counter.number)
            array[0] += 1
        [worker] = actors.of("StepWorker")
        for _ in range(3):
            assert coordinator.schedule(captures).fetch(WAIT)[0] == 3
        assert len(worker.object._functions) == 3 * len(functions) + 1  # each is kept as long as it stays the same


def test_a_large_function_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_KEPT_FUNCTIONS", 2)
    table = np.arange(2**16)
    with coordinator_of(replicax.ParameterServerStrategy(num_workers=1)) as (coordinator, actors):
        stored: list[Any] = []
        store = actors.store
        actors.store = lambda data: stored.append(data) or store(data)
        for offset, count in ((0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):  # one that was used last is kept
            shifted = table + offset
            assert coordinator.schedule(lambda x: int(shifted[x]), args=(3,)).fetch(WAIT) == 3 + offset  # noqa: B023
            assert len(stored) == count


def test_an_error_is_raised_once_with_the_worker_and_the_line() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)

    def fails() -> None:
        raise KeyError("the key")

    with coordinator_of(strategy) as (coordinator, _):
        failed = coordinator.schedule(fails)
        with pytest.raises(
            replicax.errors.WorkerError, match=r"fails .*failed on worker \d at .*test_coordinator\.py:\d+"
        ) as raised:
            coordinator.join(WAIT)
        assert isinstance(raised.value.__cause__, KeyError)
        assert "Traceback" in "".join(raised.value.__notes__)
        with pytest.raises(replicax.errors.WorkerError, match="KeyError"):
            failed.fetch(WAIT)
        assert coordinator.done()  # raised once
        assert coordinator.schedule(lambda: 7).fetch(WAIT) == 7


def test_the_next_schedule_raises_it_too_and_so_does_done(strategy: replicax.ParameterServerStrategy) -> None:
    with coordinator_of(strategy) as (coordinator, _):
        for call in (lambda: coordinator.schedule(lambda: 1), coordinator.done):
            failed = coordinator.schedule(lambda: 1 // 0)
            for call_again in (lambda: failed.fetch(WAIT), call):  # noqa: B023
                with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
                    call_again()
            coordinator.join(WAIT)


def test_an_iterator_is_each_workers_own(strategy: replicax.ParameterServerStrategy) -> None:
    def dataset() -> Any:
        def numbers(ctx: replicax.InputContext) -> Any:
            assert (ctx.num_input_pipelines, ctx.num_replicas_in_sync) == (2, 1)
            return [np.full(1, ctx.input_pipeline_id * 100 + i) for i in range(50)]

        assert replicax.has_strategy()  # it is made in the strategy's scope
        return strategy.distribute_datasets_from_function(numbers)

    with coordinator_of(strategy) as (coordinator, _):
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        with pytest.raises(replicax.errors.ContextError, match="outside of a scheduled function"):
            list(iterator)
        found = coordinator.fetch([coordinator.schedule(lambda i: next(i), args=(iterator,)) for _ in range(20)])
        numbers = sorted(int(x[0]) for x in found)
        firsts, seconds = [n for n in numbers if n < 100], [n - 100 for n in numbers if n >= 100]
        assert firsts == list(range(len(firsts)))
        assert seconds == list(range(len(seconds)))
        again = iter(coordinator.create_per_worker_dataset(dataset))
        assert int(coordinator.schedule(next, args=(again,)).fetch(WAIT)[0]) % 100 == 0


def test_a_function_that_begins_again_gets_the_same_elements_and_only_those() -> None:
    """The first that needs the optimizer runs twice: it has to be built for the variables first."""
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def train(numbers: Any) -> Any:
        number = next(numbers)
        strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(number), w)]))
        return number

    with coordinator_of(strategy) as (coordinator, _):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10)))
        found = [coordinator.schedule(next, args=(iterator,))]
        found += [coordinator.schedule(train, args=(iterator,)) for _ in range(2)]
        assert coordinator.fetch(found) == [0, 1, 2]
        assert coordinator.schedule(list, args=(iterator,)).fetch(WAIT) == [*range(3, 10)]
    assert float(w) == -3.0


@pytest.mark.parametrize(("returned", "named"), [(None, "None; does it lack its return?"), (7, "int")])
def test_a_dataset_fn_that_returns_no_dataset_is_named(
    strategy: replicax.ParameterServerStrategy, returned: Any, named: str
) -> None:
    with coordinator_of(strategy) as (coordinator, _):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: returned))
        coordinator.schedule(next, args=(iterator,))
        named = f": TypeError: create_per.* {re.escape(named)}"
        with pytest.raises(replicax.errors.WorkerError, match=named) as raised:
            coordinator.join(WAIT)
        assert "can't read it" not in str(raised.value)


def test_what_can_not_be_sent_is_named(strategy: replicax.ParameterServerStrategy) -> None:
    lock = threading.Lock()
    other = replicax.Variable(1.0, name="other")

    def uses_lock() -> None:
        lock.acquire()

    with coordinator_of(strategy) as (coordinator, _):
        with pytest.raises(TypeError, match=r"the scheduled function 'uses_lock' can't be sent to workers: .*lock"):
            coordinator.schedule(uses_lock)
        with pytest.raises(TypeError, match="an argument of the scheduled function"):
            coordinator.schedule(print, args=(lock,))
        with pytest.raises(ValueError, match=r"variable 'other' .* belongs to .*inside this strategy's scope"):
            coordinator.schedule(lambda: other.numpy())
        with pytest.raises(TypeError, match="ClusterCoordinator is not for workers"):
            coordinator.schedule(lambda: coordinator.join())
        with pytest.raises(TypeError, match="uses_lock: a step with a loss scale .* compute in 'bf16'"):
            coordinator.schedule(Precision("fp16")(uses_lock))
        for call, what in ((coordinator.schedule, "fn"), (coordinator.create_per_worker_dataset, "dataset_fn")):
            with pytest.raises(TypeError, match=f"{what} must be callable"):
                call(3)
        with pytest.raises(ValueError, match=r"a scheduled function uses .*Strategy.*, but runs under ParameterServer"):
            coordinator.schedule(print, args=(other.strategy,))
        with pytest.raises(replicax.errors.ContextError, match=r"schedule was called inside a step"):
            other.strategy.run(lambda: coordinator.schedule(uses_lock))
        result = coordinator.schedule(lambda: 1)
        with pytest.raises(ValueError, match=r"dataset_fn uses RemoteValue\(.*: use its value, from fetch\(\)"):
            coordinator.create_per_worker_dataset(lambda: [result])
        assert coordinator.join(WAIT).functions == 1


def test_mistakes_on_a_worker_are_explained(strategy: replicax.ParameterServerStrategy) -> None:
    with strategy.scope():
        v, rows = replicax.Variable(1.0, name="v"), replicax.Variable(np.zeros((2, 1), np.float32), name="rows")
        optimizer = replicax.Optimizer(optax.sgd(1.0))
    row = replicax.IndexedSlices(np.ones((1, 1), np.float32), np.array([0]), (2, 1))

    def creates() -> None:
        replicax.Variable(1.0)

    def applies(times: int, **extra: Any) -> None:
        for _ in range(times):
            optimizer.apply_gradients([(jnp.ones(()), v)], **extra)

    def both() -> None:
        v.assign_add(1.0)
        v.assign(3.0)

    def assigns_and_adds() -> None:
        rows.assign(jnp.full((2, 1), 5.0))
        rows.scatter_add(row)

    with coordinator_of(strategy) as (coordinator, _):
        for fn, message in [
            (creates, "creates a variable"),
            (lambda: strategy.run(creates), "creates a variable"),
            (lambda: strategy.run(both), "assign the final value only"),
            (lambda: strategy.run_steps(both, None, 2), r"run_steps was called in a scheduled function"),
            (lambda: strategy.run(accumulated(both, 2)), "both adds up .*schedule a function for each micro-batch"),
            (lambda: strategy.run(lambda: applies(2)), "apply_gradients was called twice in one step: .* Add the grad"),
            (lambda: strategy.run(lambda: applies(1, value=1.0)), r"further arguments \(value\) can't be used with p"),
            (lambda: optimizer.state, "state was read in a scheduled function, but the servers have it"),
            (lambda: rows.scatter_add(row), "scatter_add outside a step is not for variables on parameter servers"),
            (lambda: strategy.run(lambda: rows.scatter_update(row)), "scatter_update is not for .*: use scatter_add"),
        ]:
            coordinator.schedule(fn)
            with pytest.raises(replicax.errors.WorkerError, match=message):
                coordinator.join(WAIT)
        assert float(v) == 1.0
        for _ in range(2):
            coordinator.schedule(lambda: strategy.run(lambda: rows.scatter_add(row))).fetch(WAIT)
        coordinator.schedule(lambda: strategy.run(lambda: rows.scatter_sub(row))).fetch(WAIT)
        assert rows.numpy().tolist() == [[1.0], [0.0]]
        coordinator.schedule(lambda: strategy.run(assigns_and_adds)).fetch(WAIT)
        assert rows.numpy().tolist() == [[6.0], [5.0]]
        coordinator.schedule(lambda: strategy.run(lambda: applies(1))).fetch(WAIT)
        coordinator.schedule(lambda: strategy.run(lambda: optimizer.apply_gradients([(jnp.ones((2, 1)), rows)])))
        with pytest.raises(replicax.errors.WorkerError, match=r"built for the variables \['v .*gradients of \['rows"):
            coordinator.join(WAIT)


def test_what_is_added_across_replicas_is_added_on_the_servers() -> None:
    """Not assigned: another worker may have added in the meantime."""
    strategy = replicax.ParameterServerStrategy(num_workers=2)
    with strategy.scope():
        v, w = replicax.Variable(1.0, name="v"), replicax.Variable(1.0, name="w")

    def step() -> None:
        def merge(_: replicax.Strategy) -> None:
            v.assign_add(1.0)
            v.assign_add(2.0)
            w.assign(5.0)
            w.assign_add(1.0)

        replicax.get_replica_context().merge_call(merge)

    def add_then_assign() -> None:
        v.assign_add(1.0)
        replicax.get_replica_context().merge_call(lambda _: v.assign(3.0))

    with coordinator_of(strategy) as (coordinator, actors):
        pushes: list[Any] = []
        for server in actors.of("ShardServer"):
            server.before = lambda method, args: pushes.append(args[0]) if method == "push" else None
        for _ in range(3):
            coordinator.schedule(lambda: strategy.run(step))
        coordinator.join(WAIT)
        assert (float(v), float(w)) == (10.0, 6.0)
        assert [sorted(kind for kind, _ in push.changes) for push in pushes] == [["added", "assigned"]] * 3
        coordinator.schedule(lambda: strategy.run(add_then_assign))
        with pytest.raises(replicax.errors.WorkerError, match="assign the final value only"):
            coordinator.join(WAIT)


def only_if_all_are_finite(gradients: Any, _: Any) -> Any:
    finite = [jnp.isfinite(gradient).all() for gradient in jax.tree_util.tree_leaves(gradients)]
    return jax.lax.cond(jnp.stack(finite).all(), lambda: gradients, lambda: jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize(
    ("tx", "parts", "message"),
    [
        (optax.clip_by_global_norm(1.0), 1, r"on several servers: its update of .* depends on variable"),
        (optax.clip_by_block_rms(1.0), 2, "to parts of variable .* as in optax.lamb or optax.adafactor"),
        (optax.apply_if_finite(optax.sgd(0.1), 3), 1, "can't be applied on several servers"),
        (optax.stateless(only_if_all_are_finite), 1, r"on several servers: its update of variable .* depends on"),
    ],
)
def test_an_optimizer_that_needs_the_whole_is_refused_on_several_servers(tx: Any, parts: int, message: str) -> None:
    partitioner = replicax.variables.FixedShardsPartitioner(parts)
    strategy = replicax.ParameterServerStrategy(num_servers=2, variable_partitioner=partitioner)
    model = regression(strategy, optax.chain(tx, optax.sgd(0.1)))
    [batch] = batches(1)
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(lambda *b: strategy.run(model.step, args=b), args=batch)
        with pytest.raises(replicax.errors.WorkerError, match=message):
            coordinator.join(WAIT)
        assert coordinator.schedule(lambda: 2).fetch(WAIT) == 2  # others go on
        with pytest.raises(replicax.errors.WorkerError, match=message):
            coordinator.schedule(lambda *b: strategy.run(model.step, args=b), args=batch).fetch(WAIT)


def test_in_the_program_that_schedules_nothing_runs(strategy: replicax.ParameterServerStrategy) -> None:
    for call in (
        lambda: strategy.run(lambda: 1),
        lambda: strategy.run_steps(lambda ctx: 1, iter([]), 1),
        lambda: strategy.distribute_dataset([np.zeros(2)]),
    ):
        with pytest.raises(replicax.errors.ContextError, match=r"chedule|create_per_worker_dataset"):
            call()
    with strategy.scope(), pytest.raises(ValueError, match="no copy for each replica"):
        replicax.Variable(1.0, synchronization="on_read")
    with strategy.scope(), pytest.raises(TypeError, match=r"'key' .*: parameter servers keep no random keys.*fold_in"):
        replicax.Variable(jax.random.key(0), name="key", trainable=False)


def test_a_strategy_has_one_coordinator_at_a_time(strategy: replicax.ParameterServerStrategy) -> None:
    with coordinator_of(strategy) as (coordinator, _):
        with pytest.raises(ValueError, match="has a coordinator already"):
            replicax.ClusterCoordinator(strategy)
        coordinator.close()
        for call in (lambda: coordinator.schedule(lambda: 1), coordinator.join, coordinator.done):
            with pytest.raises(replicax.errors.ContextError, match="has been closed"):
                call()

    def fails() -> None:
        with coordinator_of(strategy) as (coordinator, actors):
            started.append(actors)
            assert coordinator.schedule(lambda: 2).fetch(WAIT) == 2
            raise ZeroDivisionError

    started: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert not started[0].of("StepWorker")
    lost = pytest.raises(replicax.errors.WorkerError, match="values that this program has read last")
    with lost, coordinator_of(strategy) as (coordinator, actors):
        actors.has_ended = True
        actors.of("ShardServer")[0].kill()
    with pytest.raises(TypeError, match="expected a ParameterServerStrategy"):
        replicax.ClusterCoordinator(replicax.MirroredStrategy(["cpu:0"]))


def test_counts_come_from_the_resolver() -> None:
    cluster = replicax.cluster.ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1", "d:1"], "ps": ["e:1", "f:1"]})
    resolver = replicax.cluster.SimpleClusterResolver(cluster)
    strategy = replicax.ParameterServerStrategy(resolver)
    assert (strategy.num_workers, strategy.num_servers, strategy.cluster_resolver) == (3, 2, resolver)
    with pytest.raises(ValueError, match=r"num_workers is 2, but the cluster resolver has 3"):
        replicax.ParameterServerStrategy(resolver, num_workers=2)
    with pytest.raises(ValueError, match="no job 'ps'"):
        replicax.ParameterServerStrategy(
            replicax.cluster.SimpleClusterResolver(replicax.cluster.ClusterSpec({"worker": ["a:1"]}))
        )
    given = replicax.ParameterServerStrategy(max_staleness=0)
    assert repr(given) == "ParameterServerStrategy(2 workers, 1 servers, mode='async', max_staleness=0)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster_resolver": {"worker": 2}}, "cluster_resolver must be a replicax.cluster.ClusterResolver"),
        ({"mode": "both"}, "must be 'async' or 'sync'"),
        ({"num_workers": 0}, "num_workers must be an int of at least 1"),
        ({"num_servers": 1.5}, "num_servers must be an int"),
        ({"devices_per_worker": 0}, "devices_per_worker must be an int of at least 1"),
        ({"max_staleness": -1}, "max_staleness must be an int of at least 0"),
        ({"mode": "sync", "max_staleness": 1}, "nothing is stale"),
        ({"variable_partitioner": 3}, "a partitioner is a function"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replicax.ParameterServerStrategy(**arguments)
