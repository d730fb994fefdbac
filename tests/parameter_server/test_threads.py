"""The program's threads and the dispatcher's look at variables at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import optax
import pytest

import replicax
from replicax.parameter_server import coordinator as coordinator_module, dispatcher
from replicax.parameter_server.actors import ActorDiedError
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0


def test_what_is_assigned_during_a_snapshot_is_not_lost() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v, w = replicax.Variable(1.0, name="v"), replicax.Variable(1.0, name="w")
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        coordinator.join(WAIT)
        assigning = threading.Thread(target=lambda: w.assign(5.0))

        def meanwhile(method: str, args: Any) -> None:
            if method == "snapshot":
                server.after = lambda *_: None
                assigning.start()
                time.sleep(0.1)  # it may have begun to send

        [server] = actors.of("ShardServer")
        server.after = meanwhile
        v.assign(10.0)  # there will be a snapshot now
        assigning.join(WAIT)
        server.kill()
        assert (float(v), float(w)) == (10.0, 5.0)


def test_reading_while_servers_recover_does_not_keep_optimizers_from_being_built() -> None:
    """Who reads holds the lock of variables, and waits for functions; one of those needs it to build an optimizer."""
    strategy = replicax.ParameterServerStrategy(num_workers=2)
    with strategy.scope():
        v, w = replicax.Variable(1.0, name="v"), replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.5))

    def train() -> None:
        _, gradients = replicax.value_and_grad(lambda: w * 1.0, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        coordinator.join(WAIT)
        slow = 0.3

        def wait_first(method: str, args: Any) -> None:
            if method == "work" and args[0].number == 0:
                time.sleep(slow)

        for worker in actors.of("StepWorker"):
            worker.before = wait_first
        actors.of("ShardServer")[0].kill()
        coordinator.schedule(lambda: strategy.run(train))
        assert float(v) == 2.0
        coordinator.join(WAIT)
        assert float(w) == 0.5


def test_threads_that_read_and_assign_see_what_was_there() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        v = replicax.Variable(np.zeros(8, np.float32), name="v")
        own = [replicax.Variable(0.0, name=f"own {i}") for i in range(3)]
    problems: list[str] = []

    def read_and_assign(mine: replicax.Variable) -> None:
        last = -1.0
        for number in range(30):
            values = v.numpy()
            if values.min() != values.max() or values[0] < last:
                problems.append(f"read {values} after {last}")
            last = float(values[0])
            mine.assign(float(number))
            if float(mine) != number:
                problems.append(f"{mine.name} has {float(mine)}, not {number}")

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(60):
            coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(np.ones(8, np.float32))))
        threads = [threading.Thread(target=read_and_assign, args=(mine,)) for mine in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        coordinator.join(WAIT)
        assert problems == []
        assert v.numpy().tolist() == [60.0] * 8


def test_a_coordinator_that_is_collected_on_its_own_thread_ends() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v = replicax.Variable(1.0, name="v")
    with coordinator_of(strategy) as (coordinator, actors):
        value = coordinator.schedule(lambda: time.sleep(0.1) or v.assign_add(1.0).name)
        value._future.add_done_callback(lambda _: coordinator._finalizer())
        coordinator._cluster.dispatcher._thread.join(WAIT)
        assert float(v) == 2.0
        assert not actors.of("StepWorker")


@pytest.mark.parametrize("waits_for", ["the end", "room"])
def test_closing_ends_the_wait_of_another_thread(monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
    monkeypatch.setattr(dispatcher, "_MOST_QUEUED", 2)
    strategy, ended = replicax.ParameterServerStrategy(num_workers=1), []

    def wait() -> None:
        try:
            for _ in range(3 if waits_for == "room" else 0):
                coordinator.schedule(lambda: 1)
            if waits_for == "the end":
                coordinator.join()
        except replicax.errors.WorkerError as error:
            ended.append(str(error))

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(lambda: time.sleep(1))
        joining = threading.Thread(target=wait, daemon=True)
        joining.start()
        time.sleep(0.1)  # it waits
        coordinator.close()
        joining.join(WAIT / 10)
        assert "closed" in ended[0]


@pytest.mark.parametrize(
    ("dies", "message"),
    [
        (False, "the coordinator can't go on: no worker has started within 0.2 seconds"),
        (True, "worker 0 has died in its start, the 5th in a row: it was killed"),
    ],
)
def test_workers_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch, dies: bool, message: str) -> None:
    class Failing(ThreadActors):
        def start(self, kind: type, *args: Any, env: Any) -> Any:
            actor = super().start(kind, *args, env=env)
            if kind.__name__ == "StepWorker":
                actor.before = lambda method, args: actor.kill() if dies else over.wait(WAIT)
            return actor

    over = threading.Event()
    monkeypatch.setattr(coordinator_module, "_make_actors", Failing)
    monkeypatch.setattr(dispatcher, "_LOOK", 0.1)
    with replicax.ClusterCoordinator(replicax.ParameterServerStrategy(num_workers=1)) as coordinator:
        if not dies:
            value = coordinator.schedule(lambda: 1)
            with pytest.raises(TimeoutError, match="after 0.01 seconds worker 0 is starting; 1 functions wait"):
                coordinator.join(0.01)
            with pytest.raises(TimeoutError, match=r"scheduled function 0\) has not been finished within 0.01 seconds"):
                value.fetch(0.01)
            monkeypatch.setattr(dispatcher, "_SECONDS_TO_START", 0.2)
        with pytest.raises(replicax.errors.WorkerError, match=message):
            coordinator.schedule(lambda: 1).fetch(WAIT)
        over.set()


def test_a_start_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(ThreadActors):
        def start(self, kind: type, *args: Any, env: Any) -> Any:
            actor = super().start(kind, *args, env=env)
            if kind.__name__ == "ShardServer":
                actor.kill()
            return actor

    monkeypatch.setattr(coordinator_module, "_make_actors", Failing)
    before = set(threading.enumerate())
    with pytest.raises(ActorDiedError, match="parameter server 0 has died"):
        replicax.ClusterCoordinator(replicax.ParameterServerStrategy())
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()] == []
