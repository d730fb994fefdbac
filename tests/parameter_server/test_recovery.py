"""Servers die: others take their place, all go back to one version, and what was run since is run again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import replicax
from replicax.parameter_server import recovery, served_variables
from replicax.parameter_server.actors import ActorDiedError, NoRoomError
from tests.parameter_server.regression import batches, in_parts, mirrored, regression
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0


USUAL = ("push", "pull", "snapshot")


def dying(
    actors: ThreadActors, rng: random.Random, chance: float, most: int, methods: tuple[str, ...] = USUAL
) -> list[str]:
    """From now on processes of servers die at some of these calls; returns the list of these calls, which grows."""
    deaths: list[str] = []

    def mortal(actor: Any) -> None:
        def maybe_die(method: str, args: Any) -> None:
            if method in methods and len(deaths) < most and rng.random() < chance:
                deaths.append(method)
                actor.kill()

        if actor.kind.__name__ == "ShardServer":
            actor.before, actor.after = (
                (maybe_die, lambda *_: None) if rng.random() < 0.5 else (lambda *_: None, maybe_die)
            )

    start = actors.start

    def start_mortal(kind: type, *args: Any, env: Any) -> Any:
        actor = start(kind, *args, env=env)
        mortal(actor)
        return actor

    actors.start = start_mortal
    for actor in actors.actors:
        mortal(actor)
    return deaths


def spare(actors: ThreadActors) -> None:
    """No more deaths: after the end nothing is run again."""
    for actor in actors.actors:
        actor.before = actor.after = lambda *_: None


@pytest.fixture(autouse=True)
def many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FUNCTIONS", 6)
    monkeypatch.setattr(recovery, "_SHARE", 1e9)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_synchronous_run_has_the_result_of_one_without_faults(seed: int) -> None:
    steps = 12
    strategy = replicax.ParameterServerStrategy(
        num_workers=2, num_servers=2, mode="sync", variable_partitioner=replicax.variables.FixedShardsPartitioner(2)
    )
    model = regression(strategy)

    def train(*part: Any) -> Any:
        return strategy.run(model.step, args=part)

    with coordinator_of(strategy) as (coordinator, actors):
        deaths = dying(actors, random.Random(seed), 0.05, most=5)
        results = []
        for batch in batches(steps):
            results += [coordinator.schedule(train, args=part) for part in in_parts(batch, 2)]
        coordinator.join(timeout_seconds=WAIT)
        values = model.values
        assert int(model.iterations) == steps
        assert all(np.isfinite(loss) for loss in coordinator.fetch(results))
        spare(actors)
    assert len(deaths) >= 2
    for found, expected in zip(values, mirrored(2, steps).values, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def test_a_worker_forgets_what_servers_had_before_they_went_back() -> None:
    """The step adds another amount when it runs again, so that one version has two values."""
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")
    runs: list[None] = []

    def step() -> float:
        runs.append(None)
        w.assign_add(float(len(runs)))
        return float(w.value)

    with coordinator_of(strategy) as (coordinator, actors):
        first = coordinator.schedule(step).fetch(WAIT)
        [server] = actors.of("ShardServer")
        server.kill()
        assert coordinator.schedule(lambda: float(w.value)).fetch(WAIT) == float(w.value) == first + 1


def test_an_asynchronous_run_counts_each_function_once() -> None:
    strategy = replicax.ParameterServerStrategy(
        num_workers=3, num_servers=3, variable_partitioner=replicax.variables.FixedShardsPartitioner(3)
    )
    with strategy.scope():
        iterations = replicax.Variable(0, name="iterations")
        parts = replicax.Variable(np.zeros(6, np.float32), name="parts")

    def step() -> None:
        iterations.assign_add(1)
        parts.assign_add(np.ones(6, np.float32))

    with coordinator_of(strategy) as (coordinator, actors):
        deaths = dying(actors, random.Random(3), 0.05, most=10)
        for total in (20, 40, 60):
            for _ in range(20):
                coordinator.schedule(lambda: strategy.run(step))
            coordinator.join(WAIT)
            assert (int(iterations), parts.numpy().tolist()) == (total, [total] * 6)
            parts.assign_add(np.zeros(6, np.float32))  # by the program: another snapshot
        spare(actors)
    assert len(deaths) >= 5


@pytest.mark.parametrize("method", ["ready", "restore", "put", "keep", "snapshot"])
def test_servers_that_die_while_servers_go_back_are_had_back_too(method: str) -> None:
    """Also the process that has just been started, and one that has the state of another."""
    strategy, v, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        for _ in range(8):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        with strategy.scope():
            w = replicax.Variable(5.0, name="w")  # put again
        coordinator.schedule(lambda: w.assign_add(1.0)).fetch(WAIT)
        most = 1 if method == "ready" else 4  # those that have just been started are not asked
        deaths = dying(actors, random.Random(0), 1.0, most, methods=(method,))
        actors.of("ShardServer")[0].kill()
        for _ in range(8):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        assert deaths == [method] * most
        assert v.numpy().tolist() == [16.0] * 4
        assert float(w) == 6.0
        spare(actors)


def test_a_server_that_dies_when_it_gets_an_optimizer_is_had_back() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        w, optimizer = replicax.Variable(1.0, name="w"), replicax.Optimizer(optax.sgd(0.5))
    with coordinator_of(strategy) as (coordinator, actors):
        deaths = dying(actors, random.Random(0), 1.0, most=1, methods=("define",))
        coordinator.schedule(lambda: strategy.run(lambda: optimizer.apply_gradients([(np.float32(1), w)])))
        coordinator.join(WAIT)
        assert (float(w), deaths) == (0.5, ["define"])


def test_a_server_that_hangs_is_replaced_without_waiting_for_it_as_for_one_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_SECONDS_TO_ANSWER", 0.2)
    strategy, v, add = adding()
    go_on = threading.Event()

    def hang(method: str, args: Any) -> None:
        if method == "ready":
            go_on.wait(WAIT)

    def start_slowly(kind: type, *args: Any, env: Any) -> Any:
        actor = start(kind, *args, env=env)
        actor.before = lambda method, args: time.sleep(0.5) if method == "ready" else None
        return actor

    with coordinator_of(strategy) as (coordinator, actors):
        for _ in range(8):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        dead, hung = actors.of("ShardServer")
        start, actors.start = actors.start, start_slowly
        dead.kill()
        hung.before = hang
        began = time.monotonic()
        coordinator.schedule(add)
        try:
            coordinator.join(WAIT)
            assert time.monotonic() - began < WAIT / 2
            assert v.numpy().tolist() == [9.0] * 4
            assert hung.is_dead
        finally:
            go_on.set()


def adding() -> tuple[replicax.ParameterServerStrategy, replicax.Variable, Any]:
    """A variable on two servers, and a function that adds one to it."""
    strategy = replicax.ParameterServerStrategy(
        num_workers=1, num_servers=2, variable_partitioner=replicax.variables.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        v = replicax.Variable(np.zeros(4, np.float32), name="v")

    def step() -> None:
        v.assign_add(np.ones(4, np.float32))

    return strategy, v, lambda: strategy.run(step)


def close_without_values(coordinator: Any) -> None:
    """The servers can't be had back, and so not the values that they had in the end."""
    with pytest.raises(replicax.errors.WorkerError, match="values that this program has read last"):
        coordinator.close()


def test_a_snapshot_is_kept_until_the_next_one_is_whole() -> None:
    """And the neighbour of a server that has taken the place of another has its state, too."""
    strategy, v, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        kept: list[list[int]] = []

        def note() -> list[int]:
            return [state.ended.below for state in actors.of("ShardServer")[0].object._kept]

        def die(method: str, args: Any) -> None:
            if method == "keep" and len(kept) == 1:
                kept.append(note())
                actors.of("ShardServer")[1].kill()

        for number in range(14):
            if number == 7:  # there is one snapshot, and the next one fails between its parts
                kept.append(note())
                actors.of("ShardServer")[0].after = die
            coordinator.schedule(add).fetch(WAIT)
        assert kept[0] != kept[1][-1:]
        assert kept[1][:1] == kept[0]
        assert v.numpy().tolist() == [14.0] * 4
        for server in actors.of("ShardServer"):
            assert server.call("ready").result(WAIT)
            assert len(server.object._kept) == 1


def test_a_snapshot_that_is_lost_is_an_error_at_once() -> None:
    strategy, v, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        for _ in range(8):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        before = len(actors.actors)
        for state in coordinator._cluster.dispatcher._recovery._states:
            state.is_lost = True
        actors.of("ShardServer")[0].kill()
        with pytest.raises(
            replicax.errors.WorkerError, match=r"snapshot is lost, with all machines that had it.*checkpoint"
        ):
            v.numpy()
        assert len(actors.actors) == before + 1
        close_without_values(coordinator)


def test_values_that_have_no_room_at_the_end_are_logged_if_no_caller_gets_the_error(caplog: Any) -> None:
    strategy, _, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(add)
        coordinator.join(WAIT)

        def refuse(method: str, args: Any) -> None:
            if method == "pull":
                raise NoRoomError("no memory for it")

        actors.of("ShardServer")[0].before = refuse
        coordinator._finalizer()  # as at the end of the program
    assert "no memory for it. Variables have the values that this program has read last" in caplog.text


def test_nothing_is_started_where_the_engine_has_ended(caplog: Any) -> None:
    strategy, v, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(add).fetch(WAIT)
        before = len(actors.actors)
        actors.has_ended = True
        actors.of("ShardServer")[0].kill()
        with pytest.raises(replicax.errors.WorkerError, match="servers can't go on: the engine has ended"):
            v.numpy()
        assert len(actors.actors) == before
        coordinator._finalizer()
    assert caplog.text == ""  # the program has been told


def test_servers_may_die_again_and_again_and_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_MOST_RECOVERIES", 2)  # without a function that ends in between
    strategy, v, add = adding()
    with coordinator_of(strategy) as (coordinator, actors):
        for _ in range(3):
            for _ in range(3):
                coordinator.schedule(add)
            coordinator.join(WAIT)
            actors.of("ShardServer")[1].kill()
    assert v.numpy().tolist() == [9.0] * 4


def test_functions_that_are_run_again_take_further_elements() -> None:
    """As the documentation says: an iterator goes on from where it is, and so a finite one may end too early."""
    strategy, v, _ = adding()

    def take(iterator: Any) -> int:
        strategy.run(lambda: v.assign_add(np.ones(4, np.float32)))
        return next(iterator)

    with coordinator_of(strategy) as (coordinator, actors):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10)))
        first = [coordinator.schedule(take, args=(iterator,)) for _ in range(3)]
        coordinator.join(WAIT)
        actors.of("ShardServer")[0].kill()
        assert v.numpy().tolist() == [3.0] * 4
        assert coordinator.fetch(first) == [0, 1, 2]
        assert coordinator.schedule(take, args=(iterator,)).fetch(WAIT) == 6
        for _ in range(4):
            coordinator.schedule(take, args=(iterator,))
        with pytest.raises(replicax.errors.WorkerError, match="StopIteration"):
            coordinator.join(WAIT)


RUNS: list[int] = []


@pytest.mark.parametrize("groups", [1, 2], ids=["async", "sync"])
def test_functions_that_had_ended_run_again_beside_one_that_fails_then(groups: int) -> None:
    """Only its own step does not count, and functions that had not ended are cancelled."""
    strategy = replicax.ParameterServerStrategy(
        num_workers=groups, num_servers=2, mode="async" if groups == 1 else "sync"
    )
    with strategy.scope():
        v, w = (replicax.Variable(0.0, name=name, aggregation="sum") for name in ("v", "w"))

    def fails_later() -> None:
        from tests.parameter_server.test_recovery import RUNS

        RUNS.append(1)
        if len(RUNS) > 1:
            raise KeyError("it fails when it runs again")
        v.assign_add(1.0)

    def add() -> None:
        w.assign_add(1.0)

    def schedule_again() -> None:
        for _ in range(groups):
            coordinator.schedule(add)
        coordinator.join(WAIT)

    RUNS.clear()
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fails_later)
        for _ in range(2 * groups - 1):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        assert (float(v), float(w)) == (1.0, 2 * groups - 1)
        for server in actors.of("ShardServer"):
            server.kill()
        with pytest.raises(replicax.errors.WorkerError, match="it fails when it runs again"):
            schedule_again()
        coordinator.join(WAIT)
        assert (float(v), float(w)) == (0.0, groups)


def both(strategy: replicax.Strategy) -> tuple[replicax.Variable, replicax.Variable, Callable[[], None]]:
    """A number and a vector, perhaps on different servers, and a function that adds 1 to both."""
    with strategy.scope():
        v, w = replicax.Variable(1.0, name="v"), replicax.Variable(np.zeros(2, np.float32), name="w")

    def step() -> None:
        v.assign_add(1.0)
        w.assign_add(np.ones(2, np.float32))

    def add() -> None:
        strategy.run(step)

    return v, w, add


@pytest.mark.parametrize("groups", [None, 2], ids=["async", "sync"])
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_what_the_program_assigns_comes_after_what_had_ended(has_snapshot: bool, groups: int | None) -> None:
    """Also if a server dies again when it gets that."""
    mode = "async" if groups is None else "sync"
    strategy = replicax.ParameterServerStrategy(num_workers=groups or 1, num_servers=2, mode=mode)
    v, w, add = both(strategy)

    def add_all(coordinator: Any) -> None:
        for _ in range(groups or 1):
            coordinator.schedule(add)

    def die(server: Any) -> None:
        def hook(method: str, args: Any) -> None:
            if method == "snapshot":
                server.kill()

        server.before = hook

    def start_mortal(kind: type, *args: Any, env: Any) -> Any:
        server = start(kind, *args, env=env)

        def hook(method: str, args: Any) -> None:
            if method == "put" and not deaths and any(np.all(value == 5.0) for value, _ in args[0].values()):
                deaths.append(method)
                server.kill()

        server.before = hook
        return server

    deaths: list[str] = []
    with coordinator_of(strategy) as (coordinator, actors):
        start, actors.start = actors.start, start_mortal
        add_all(coordinator)
        coordinator.join(WAIT)
        if has_snapshot:
            v.assign(10.0)
            add_all(coordinator)
            coordinator.join(WAIT)
        else:
            assert float(v) == 2.0
        for server in actors.of("ShardServer"):
            die(server)
        v.assign(5.0)  # has a snapshot taken
        add_all(coordinator)
        assert float(v) in (5.0, 6.0)
        coordinator.join(WAIT)
        assert float(v) == 6.0
        assert w.numpy().tolist() == [3.0 if has_snapshot else 2.0] * 2
        assert deaths == ["put"]


def test_functions_begin_with_what_the_program_has_assigned_before_them() -> None:
    """Also a second value, for which no snapshot is taken, as no function has run since the first."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    v, w, add = both(strategy)
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(add)
        coordinator.join(WAIT)
        v.assign(10.0)
        v.assign(5.0)
        deaths = dying(actors, random.Random(0), 1.0, most=2, methods=("snapshot",))
        for _ in range(7):  # the last one has a snapshot taken
            coordinator.schedule(add)
        coordinator.join(WAIT)
        assert deaths == ["snapshot"] * 2
        assert (float(v), w.numpy().tolist()) == (12.0, [8.0] * 2)


def test_a_value_that_is_assigned_beside_a_function_is_there_for_the_next_one() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2)
    v, _, add = both(strategy)
    runs, go_on = threading.Event(), threading.Event()

    def hold(method: str, args: Any) -> None:
        if method == "work" and args[0].number == 1:
            runs.set()
            go_on.wait(WAIT)

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(add)
        coordinator.join(WAIT)
        v.assign(3.0)  # has a snapshot taken
        for worker in actors.of("StepWorker"):
            worker.before = hold
        coordinator.schedule(lambda: None)
        assert runs.wait(WAIT)
        v.assign(5.0)
        added = coordinator.schedule(add)
        time.sleep(0.05)
        assert not added.is_finished  # first there will be a snapshot, with the value
        go_on.set()
        added.fetch(WAIT)
        actors.of("ShardServer")[0].kill()
        assert float(v) == 6.0


def test_a_call_that_always_ends_a_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the function that runs again ends well each time. A value that is assigned is sent again, too."""
    monkeypatch.setattr(recovery, "_MOST_RECOVERIES", 5)
    monkeypatch.setattr(served_variables, "_MOST_DEATHS", 2)
    strategy, v, _ = adding()
    deadly = ["pull"]

    def start_mortal(kind: type, *args: Any, env: Any) -> Any:
        def hook(method: str, args: Any) -> None:
            if method in deadly and (method == "pull" or 7.0 in args[0][v.number][0]):
                server.kill()

        server = start(kind, *args, env=env)
        server.before = hook
        return server

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: v.assign_add(np.ones(4, np.float32)).name).fetch(WAIT)
        start, actors.start = actors.start, start_mortal
        for server in actors.of("ShardServer"):
            server.kill()
        with pytest.raises(ActorDiedError, match="parameter server . has died: it was killed"):
            v.numpy()
        deadly[0] = "put"
        assert v.numpy().tolist() == [1.0] * 4
        with pytest.raises(replicax.errors.WorkerError, match="died 5 times without a function finished in between"):
            v.assign(np.full(4, 7.0))
        close_without_values(coordinator)


def test_servers_that_always_die_are_an_error() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v = replicax.Variable(1.0, name="v")
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        coordinator.join(WAIT)
        dying(actors, random.Random(0), 1.0, most=1000)
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        with pytest.raises(replicax.errors.WorkerError, match=r"servers can't go on: .*Restore .* from a checkpoint"):
            coordinator.join(WAIT)
        assert [actor.kind.__name__ for actor in actors.actors].count("ShardServer") == 1 + 10  # and ten times another
        close_without_values(coordinator)
