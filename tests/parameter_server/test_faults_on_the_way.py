"""Workers and servers that die, errors, snapshots and results, while what functions have changed is on its way."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.parameter_server.actors import ActorDiedError
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0
MANY = 12


def with_servers(servers: int, **settings: Any) -> tuple[replicax.ParameterServerStrategy, Any]:
    settings = {"num_workers": 1, "variable_partitioner": replicax.variables.FixedShardsPartitioner(servers)} | settings
    strategy = replicax.ParameterServerStrategy(num_servers=servers, **settings)
    with strategy.scope():
        return strategy, replicax.Variable(np.zeros(2, np.float32), name="v")


class Striking:
    """Does something at the push of one function, before the server makes its change; once."""

    def __init__(self, actors: ThreadActors, server: int, function: int, strike: Any) -> None:
        self.server = actors.of("ShardServer")[server]
        self.function = function
        self.strike = strike
        self.has_struck = threading.Event()
        self.server.before = self._before

    def _before(self, method: str, args: Any) -> None:
        if method == "push" and args[0].function == self.function and not self.has_struck.is_set():
            self.has_struck.set()
            self.strike()


@pytest.mark.parametrize("arrives", [False, True])
def test_a_worker_that_dies_while_a_change_is_on_its_way_makes_it_once(arrives: bool) -> None:
    strategy, v = with_servers(2)

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        [worker] = actors.of("StepWorker")

        def strike() -> None:
            worker.kill()  # the other server has its part
            if not arrives:
                raise ActorDiedError("it was lost on the way")

        striking = Striking(actors, 1, 5, strike)
        for _ in range(1, MANY):
            coordinator.schedule(fn)
        report = coordinator.join(WAIT)
        assert striking.has_struck.is_set()
        assert report.workers_lost == 1
        assert v.numpy().tolist() == [MANY, MANY]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_server_that_dies_with_changes_on_their_way_has_all_of_them_again(mode: Any) -> None:
    strategy, v = with_servers(2, num_workers=2, mode=mode, devices_per_worker=1)

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with strategy.scope():
        v = replicax.Variable(np.zeros(2, np.float32), name="v", aggregation="sum")
    with coordinator_of(strategy) as (coordinator, actors):
        striking = Striking(actors, 0, 6, lambda: striking.server.kill())
        for _ in range(MANY):
            coordinator.schedule(fn)
        coordinator.join(WAIT)
        assert striking.has_struck.is_set()
        assert v.numpy().tolist() == [MANY, MANY]


def test_a_change_that_a_server_can_not_make_is_an_error_of_its_function_once() -> None:
    strategy, v = with_servers(2)

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    def strike() -> None:
        raise MemoryError("no room for it")

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        Striking(actors, 1, 4, strike)
        values: list[Any] = []

        def all_scheduled() -> None:
            for number in range(1, MANY):
                if number == 4:
                    coordinator.join(WAIT)
                    assert v.numpy().tolist() == [4, 4]  # from now on only what changes is fetched
                values.append(coordinator.schedule(fn))
            coordinator.join(WAIT)

        with pytest.raises(replicax.errors.WorkerError, match=r"scheduled function 4\) failed.*no room for it"):
            all_scheduled()
        coordinator.join(WAIT)
        failed = [value for value in values if "failed" in repr(value)]
        done = 1 + len(values) - len(failed)
        for value in failed:
            with pytest.raises(replicax.errors.WorkerError, match="no room for it"):
                value.fetch(WAIT)
        assert v.numpy().tolist() == [done + 1, done]  # the other server had made its part of the fourth


def test_a_function_fails_whose_server_has_died_meanwhile() -> None:
    strategy, v = with_servers(1)

    def fn(fails: bool) -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))
        if fails:
            raise KeyError("it always fails")

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn, args=(False,)).fetch(WAIT)
        striking = Striking(actors, 0, 1, lambda: striking.server.kill())
        coordinator.schedule(fn, args=(True,))
        with pytest.raises(replicax.errors.WorkerError, match="it always fails"):
            coordinator.join(WAIT)
        assert striking.has_struck.is_set()
        coordinator.schedule(fn, args=(False,)).fetch(WAIT)
        assert v.numpy().tolist() == [3, 3]


def test_join_and_snapshots_wait_for_changes_on_their_way() -> None:
    strategy, v = with_servers(1)
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")
    arrives = threading.Event()

    def fn() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        Striking(actors, 0, 1, lambda: arrives.wait(WAIT))
        coordinator.schedule(fn)
        with pytest.raises(TimeoutError, match=r"worker 0 runs .*scheduled function 1"):
            coordinator.join(0.1)
        threading.Timer(0.05, arrives.set).start()
        w.assign(5.0)  # a snapshot is due, but not before the change has been made
        coordinator.join(WAIT)
        for _ in range(2, MANY):
            coordinator.schedule(fn)
        coordinator.join(WAIT)
        actors.of("ShardServer")[0].kill()
        assert v.numpy().tolist() == [MANY, MANY]
        assert float(w) == 5.0


def test_who_uses_a_result_sees_what_its_function_has_changed() -> None:
    strategy, v = with_servers(1)

    def change(_: Any) -> int:
        strategy.run(lambda: v.assign_add(jnp.ones(2)))
        return 1

    with coordinator_of(strategy) as (coordinator, actors):
        result = coordinator.schedule(change, args=(0,))

        def slow(method: str, args: Any) -> None:
            if method == "push":
                time.sleep(0.01)

        actors.of("ShardServer")[0].before = slow
        for number in range(2, MANY):
            seen = coordinator.schedule(lambda _: v.numpy(), args=(result,))
            result = coordinator.schedule(change, args=(result,))
            assert seen.fetch(WAIT).tolist() >= [number - 1] * 2
        coordinator.join(WAIT)


def test_a_dataset_reads_variables_while_a_change_is_on_its_way() -> None:
    strategy, v = with_servers(1)

    def fn(iterator: Any) -> float:
        found = next(iterator)
        strategy.run(lambda: v.assign_add(jnp.ones(2)))
        return found

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(3):
            iterator = iter(coordinator.create_per_worker_dataset(lambda: [float(v.numpy()[0])] * MANY))
            values = [coordinator.schedule(fn, args=(iterator,)) for _ in range(MANY)]
            assert len({value.fetch(WAIT) for value in values}) == 1
        coordinator.join(WAIT)
        assert v.numpy().tolist() == [3 * MANY, 3 * MANY]
