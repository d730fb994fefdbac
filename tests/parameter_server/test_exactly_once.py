"""Workers die between and inside functions; what functions change is applied once."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import replicax
from replicax.parameter_server.actors import NoRoomError
from tests.chaos.servers import counting
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_is_replaced_and_its_function_counts_once(mode: Any, when: str) -> None:
    strategy = replicax.ParameterServerStrategy(
        num_workers=3, num_servers=2, mode=mode, variable_partitioner=replicax.variables.FixedShardsPartitioner(2)
    )
    iterations, parts, fn = counting(strategy, 4)
    rng = random.Random(0)
    with coordinator_of(strategy) as (coordinator, actors):
        start = actors.start

        def mortal(kind: type, *args: Any, env: Any) -> Any:
            actor = start(kind, *args, env=env)

            def maybe_die(method: str, args: Any) -> None:
                if method == "work" and rng.random() < 0.15:
                    actor.kill()

            if kind.__name__ == "StepWorker":
                setattr(actor, when, maybe_die)
            return actor

        actors.start = mortal
        for worker in actors.of("StepWorker"):
            worker.kill()
        lost = 0
        for _ in range(5):
            for _ in range(12):
                coordinator.schedule(fn)
            lost += coordinator.join(WAIT).workers_lost
        assert lost > 5
        steps = 60 if mode == "async" else 20
        assert int(iterations) == steps
        assert parts.numpy().tolist() == [60] * 4


def test_a_function_that_always_ends_its_worker_is_an_error() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, actors):
        start = actors.start

        def deadly(kind: type, *args: Any, env: Any) -> Any:
            actor = start(kind, *args, env=env)
            actor.before = lambda method, args: actor.kill() if method == "work" else None
            return actor

        actors.start = deadly
        actors.of("StepWorker")[0].kill()
        coordinator.schedule(lambda: 1)
        with pytest.raises(replicax.errors.WorkerError, match="it has ended its worker 10 times"):
            coordinator.join(WAIT)
        actors.start = start
        actors.of("StepWorker")[0].kill()
        assert coordinator.schedule(lambda: 2).fetch(WAIT) == 2


def test_a_function_whose_arguments_or_result_have_no_room_is_an_error_at_once() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: 1).fetch(WAIT)
        worker = actors.of("StepWorker")[0]

        def refuse(method: str, args: Any) -> None:
            worker.before = lambda method, args: None
            raise NoRoomError("no memory for it")

        worker.before = refuse
        with strategy.scope():
            v = replicax.Variable(3.0, name="v")
        coordinator.schedule(lambda: v.numpy())
        with pytest.raises(replicax.errors.WorkerError, match=r"scheduled function 1\) failed.*: no memory for it"):
            coordinator.join(WAIT)
        assert coordinator.schedule(lambda: v.numpy()).fetch(WAIT) == 3  # had no room, either


def test_a_result_that_can_not_be_pickled_is_an_error_of_its_function() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(threading.Lock)
        with pytest.raises(replicax.errors.WorkerError, match=r"scheduled function 0\) failed.*can't be sent .*lock"):
            coordinator.join(WAIT)
        assert coordinator.schedule(lambda: 3).fetch(WAIT) == 3


class UnreadableThing:
    """Can be pickled, but not be read where it is not wanted."""

    is_readable = False

    def __reduce__(self) -> Any:
        return _readable, ()


def _readable() -> UnreadableThing:
    if not UnreadableThing.is_readable:
        raise ModuleNotFoundError("No module named 'elsewhere'")
    return UnreadableThing()


def test_a_function_that_can_not_be_read_on_a_worker_says_so_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pickle is sent once; and what a worker can't read now, it may be able to read later."""
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        it, thing = replicax.Variable(1.0, name="it"), UnreadableThing()

    def fn() -> tuple[str, str]:
        return type(thing).__name__, it.name

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(2):
            coordinator.schedule(fn)
            with pytest.raises(
                replicax.errors.WorkerError, match=r"fn .*can't read it: ModuleNotFoundError: No module named"
            ):
                coordinator.join(WAIT)
        monkeypatch.setattr(UnreadableThing, "is_readable", True)
        assert coordinator.schedule(fn).fetch(WAIT) == ("UnreadableThing", "it")
