"""What functions read and change travels while the worker computes for others; nothing is lost by it."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0
MANY = 12  # more than all workers run until one of them is done


def one_worker(**settings: Any) -> tuple[replicax.ParameterServerStrategy, Any]:
    strategy = replicax.ParameterServerStrategy(num_workers=1, **settings)
    with strategy.scope():
        return strategy, replicax.Variable(np.zeros(2, np.float32), name="v")


def worker_of(actors: ThreadActors) -> Any:
    [actor] = actors.of("StepWorker")
    return actor


has_overtaken = threading.Event()
"""Set by a function on a worker, which here is a thread."""


def test_the_next_function_computes_before_the_changes_of_the_last_are_made() -> None:
    strategy, v = one_worker()
    has_overtaken.clear()

    def fn(number: int) -> None:
        from tests.parameter_server import test_overlap

        if number == 1:
            time.sleep(0.05)  # meanwhile the next one's variables come
        strategy.run(lambda: v.assign_add(jnp.ones(2)))
        if number == 2:
            test_overlap.has_overtaken.set()

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)  # now it is known what it reads, and how long it takes
        coordinator.join(WAIT)
        overtaken: list[bool] = []

        def hold(method: str, args: Any) -> None:
            if method == "push" and not overtaken:
                overtaken.append(has_overtaken.wait(10))

        actors.of("ShardServer")[0].before = hold
        for number in range(1, MANY):
            coordinator.schedule(fn, args=(number,))
        coordinator.join(WAIT)
        assert v.numpy().tolist() == [MANY, MANY]
    assert overtaken == [True]


def test_what_the_next_function_reads_is_pulled_while_the_last_one_computes() -> None:
    strategy, v = one_worker()
    running = threading.Event()
    pulled = threading.Event()

    def fn(number: int) -> Any:
        value = strategy.run(lambda: v * 1.0)
        if number == 1:
            time.sleep(0.05)
        return value

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)
        pulls: list[int] = []

        def counted(method: str, args: Any) -> None:
            if method == "pull":
                pulls.append(1)
                if running.is_set():
                    pulled.set()

        actors.of("ShardServer")[0].before = counted
        running.set()
        values = [coordinator.schedule(fn, args=(number,)) for number in range(1, MANY)]
        coordinator.join(WAIT)
        assert len(pulls) <= MANY - 1  # one for each function, and none besides
        assert all(value.fetch(WAIT).tolist() == [0, 0] for value in values)
    assert pulled.is_set()


@pytest.mark.parametrize("bound", [0, 1, None])
def test_the_bound_of_staleness_holds(bound: int | None) -> None:
    strategy, v = one_worker(max_staleness=bound)

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(30):
            coordinator.schedule(fn)
        report = coordinator.join(WAIT)
        assert v.numpy().tolist() == [30, 30]
    assert bound is None or report.staleness_p99 <= bound


def test_a_function_sees_what_it_has_changed() -> None:
    strategy, v = one_worker(num_servers=2, variable_partitioner=replicax.FixedShardsPartitioner(2))
    with strategy.scope():
        table = replicax.Variable(np.zeros((4, 2), np.float32), name="table")

    def fn() -> Any:
        before = v.numpy()
        for _ in range(3):
            strategy.run(lambda: v.assign_add(jnp.ones(2)))
        v.assign_add(jnp.ones(2))
        strategy.run(lambda: v.assign(v * 2.0))
        strategy.run(lambda: table.assign_add(jnp.ones((4, 2)) * v[0]))
        return before, v.numpy(), table[np.array([1, 3])], table.numpy()

    with coordinator_of(strategy) as (coordinator, _):
        expected = np.zeros(2, np.float32)
        total = 0.0
        for value in [coordinator.schedule(fn) for _ in range(MANY)]:
            before, after, rows, whole = value.fetch(WAIT)
            assert after.tolist() == ((before + 4) * 2).tolist()
            total += after[0]
            assert rows.tolist() == [[total, total]] * 2
            assert whole.tolist() == [[total, total]] * 4
            expected = (expected + 4) * 2
        coordinator.join(WAIT)
        assert v.numpy().tolist() == expected.tolist()


def test_a_function_that_has_been_sent_ahead_is_not_run_after_an_error() -> None:
    strategy, v = one_worker()

    def fn(number: int) -> None:
        if number == 5:
            time.sleep(0.05)
            raise KeyError("the fifth")
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)
        values = []
        for number in range(1, MANY):
            try:
                values.append(coordinator.schedule(fn, args=(number,)))
            except replicax.WorkerError:
                break
        else:
            with pytest.raises(replicax.WorkerError, match="the fifth"):
                coordinator.join(WAIT)
        coordinator.join(WAIT)
        assert v.numpy().tolist() == [5, 5]
        for value in values[5:]:
            with pytest.raises(replicax.WorkerError, match=r"was not run: .*the fifth"):
                value.fetch(WAIT)
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)
        assert v.numpy().tolist() == [6, 6]


def test_what_a_process_had_when_it_died_is_run_again() -> None:
    strategy, v = one_worker()

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        coordinator.join(WAIT)
        deaths: list[int] = []
        had: list[int] = []

        def dies(method: str, args: Any) -> None:
            if method == "work":
                had.append(args[0].number)
                if len(had) == 4:
                    deaths.append(1)
                    worker.kill()

        worker = worker_of(actors)
        worker.after = dies
        for _ in range(MANY):
            coordinator.schedule(fn)
        report = coordinator.join(WAIT)
        assert v.numpy().tolist() == [MANY + 1, MANY + 1]
    assert deaths
    assert report.workers_lost == 1


def test_a_copy_that_a_step_has_written_is_no_version_of_the_servers() -> None:
    """A worker runs again what another has done: its own copy has the change twice, and must not be kept."""
    strategy, v = one_worker()

    def fn() -> Any:
        return strategy.run(lambda: v.assign_add(jnp.ones(2)).read_value())

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        coordinator.join(WAIT)
        worker = worker_of(actors)
        worker.after = lambda method, args: worker.kill()  # the servers have made its change, and nobody knows
        coordinator.schedule(fn).fetch(WAIT)
        assert coordinator.schedule(lambda: v.numpy()).fetch(WAIT).tolist() == [2, 2]
        assert coordinator.schedule(fn).fetch(WAIT).tolist() == [3, 3]
