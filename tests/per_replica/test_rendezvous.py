"""The collectives of the replicas of several workers, which are threads here; real ones are in ``tests/strategies``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import replicax
from replicax.errors import DeadlockError
from replicax.per_replica.rendezvous import Rendezvous
from replicax.workers.lockstep import Lockstep
from tests import simulated_workers
from tests.simulated_workers import SimulatedWorkers


def conduct(step: Callable[[int, Callable[..., list[Any]]], Any], replicas: Sequence[int]) -> list[Any]:
    """What each worker gets when so many replicas of it run ``step(replica, exchange)``: results, or an error."""
    firsts = [sum(replicas[:w]) for w in range(len(replicas))]

    def work(worker: SimulatedWorkers) -> Any:
        first = firsts[worker.index]
        rendezvous: Any = None

        def of(replica: int) -> Callable[[], Any]:
            return lambda: step(replica, lambda *args, **kw: rendezvous.exchange(replica, *args, **kw))

        functions = {r: of(r) for r in range(first, first + replicas[worker.index])}
        rendezvous = Rendezvous(functions, sum(replicas), Lockstep(worker, timeout=20.0))
        try:
            return rendezvous.run()
        except Exception as error:
            return error

    return simulated_workers.run(SimulatedWorkers.of(len(replicas)), work)


@pytest.mark.parametrize("replicas", [[4], [2, 2], [1, 3], [1, 1, 2]], ids=str)
def test_all_replicas_meet_in_their_order(replicas: list[int]) -> None:
    def step(replica: int, exchange: Any) -> Any:
        return [exchange("sum", replica), exchange("sum", replica * 10), replica]

    results = [r for theirs in conduct(step, replicas) for r in theirs]
    assert results == [[[0, 1, 2, 3], [0, 10, 20, 30], replica] for replica in range(4)]


@pytest.mark.parametrize("replicas", [[2, 2], [1, 3], [1, 1, 2]], ids=str)
def test_who_is_elsewhere_is_named_on_every_worker(replicas: list[int]) -> None:
    for step, message in [
        (
            lambda r, exchange: exchange("gather" if r == 3 else "sum", r),
            r"replica 3 is in gather at .* \(on worker \d\)",
        ),
        (lambda r, exchange: None if r == 3 else exchange("sum", r), r"replica 3 has returned \(on worker \d\)"),
    ]:
        for error in conduct(step, replicas):
            assert isinstance(error, DeadlockError)
            with pytest.raises(DeadlockError, match=message):
                raise error


@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_error_in_one_replica_ends_all(when: int) -> None:
    def step(replica: int, exchange: Any) -> None:
        for i in range(3):
            if replica == 1 and i == when:
                raise KeyError("no such thing")
            exchange("sum", i)

    ours, theirs = conduct(step, [2, 1])
    assert type(ours) is type(theirs) is KeyError
    assert ours.__notes__ == ["(raised by replica 1 of 3)"]
    assert theirs.__notes__[0].startswith("(raised by replica 1 of 3 on worker 0, at ")


def test_a_timeout_ends_the_wait_for_another_worker() -> None:
    def step(replica: int, exchange: Any) -> None:
        if replica == 2:
            time.sleep(0.5)
        exchange("sum", replica, 0.1)

    ours, theirs = conduct(step, [2, 1])
    assert isinstance(ours, DeadlockError)
    assert "replica 0 is, for at most 0.1 s, in sum at " in str(ours)
    assert "for worker 1 of 2, who did not come" in str(ours)
    assert "worker 1 came too late, when worker 0 gave up" in str(theirs)


def test_an_interrupt_ends_a_replica_that_would_go_on(pair: replicax.Strategy) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyError(number)

    def step() -> None:
        while True:
            time.sleep(1e-3)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyError), replicax.debug():
            pair.run(step)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica ")]
