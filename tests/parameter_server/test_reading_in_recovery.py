"""The program reads while servers go back: it sees all that it knows to have been done."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.parameter_server import recovery
from tests.parameter_server.test_recovery import adding
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0
A_WHILE = 0.3


def in_thread(pool: concurrent.futures.Executor, v: replicax.Variable) -> concurrent.futures.Future[Any]:
    return pool.submit(lambda: v.numpy().tolist())


def test_a_read_in_which_servers_go_back_is_repeated() -> None:
    """The step adds another amount when it runs again, so what was read before is not what there is."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")
    runs: list[None] = []

    def step() -> None:
        runs.append(None)
        v.assign_add(float(len(runs)))

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(step).fetch(WAIT)
        home = coordinator._cluster.home
        pull = home.servers.pull

        def pull_before(*args: Any) -> Any:
            home.servers.pull, found = pull, pull(*args)
            actors.of("ShardServer")[1].kill()
            home.restore_servers()
            return found

        home.servers.pull = pull_before
        assert float(v) == 2.0


def test_a_read_waits_until_what_was_fetched_has_been_run_again() -> None:
    strategy, v, add = adding()
    went_back, go_on = threading.Event(), threading.Event()

    def hold(method: str, args: Any) -> None:
        if method == "work" and len(actors.of("ShardServer")) == 2:
            went_back.set()
            go_on.wait(WAIT)

    with coordinator_of(strategy) as (coordinator, actors), concurrent.futures.ThreadPoolExecutor() as pool:
        coordinator.schedule(add).fetch(WAIT)
        actors.of("ShardServer")[0].kill()
        actors.of("StepWorker")[0].before = hold
        coordinator.schedule(add)
        try:
            assert went_back.wait(WAIT)
            reading = in_thread(pool, v)
            with pytest.raises(concurrent.futures.TimeoutError):
                reading.result(A_WHILE)
        finally:
            go_on.set()
        assert reading.result(WAIT) in ([1.0] * 4, [2.0] * 4)
        coordinator.join(WAIT)
        assert v.numpy().tolist() == [2.0] * 4


def test_what_is_read_just_before_servers_go_back_is_not_taken_for_what_is_there_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions are counted from the snapshot on, so that another value may have the same number."""
    monkeypatch.setattr(recovery, "_FUNCTIONS", 2)
    monkeypatch.setattr(recovery, "_SHARE", 1e9)
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")
        w = replicax.Variable(np.zeros(2, np.float32), name="w")

    def assign_next(numbers: Any) -> None:
        number = next(numbers)
        strategy.run(lambda: v.assign(number))

    with coordinator_of(strategy) as (coordinator, actors):
        numbers = iter(coordinator.create_per_worker_dataset(lambda: map(float, range(1, 9))))
        for _ in range(3):  # a snapshot is taken after two
            coordinator.schedule(assign_next, args=(numbers,)).fetch(WAIT)
        cluster = coordinator._cluster
        [mine], [other] = (cluster.home.definitions.shards[variable.number].servers[:1] for variable in (v, w))
        assert mine != other
        restore = cluster.servers.restore

        def read_and_restore(*args: Any) -> None:
            cluster.home._refresh(v.slot)
            restore(*args)

        cluster.servers.restore = read_and_restore
        actors.of("ShardServer")[other].kill()
        assert w.numpy().tolist() == [0.0] * 2
        assert float(v) == 4.0
