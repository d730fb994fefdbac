from __future__ import annotations

import contextlib
from typing import Any

import jax
import pytest

from replicax.errors import DeadlockError, WorkerError
from replicax.workers.exchange import Alone
from replicax.workers.launch_log import Label
from replicax.workers.lockstep import Lockstep
from tests import simulated_workers
from tests.simulated_workers import SimulatedWorkers


def on_each(count: int, fn: Any, timeout: float = 20.0) -> list[Any]:
    """``fn(index, lockstep)`` on each of several workers; what it returned, or the error that it raised."""

    def one(worker: SimulatedWorkers) -> Any:
        try:
            return fn(worker.index, Lockstep(worker, timeout=timeout))
        except Exception as error:
            return error

    return simulated_workers.run(SimulatedWorkers.of(count), one)


def test_whoever_does_something_else_is_named() -> None:
    errors = on_each(2, lambda index, lockstep: lockstep.exchange(["creates", "runs"][index], 1, detail="x"))
    for error in errors:
        assert isinstance(error, DeadlockError)
        assert str(error).startswith("the workers do not do the same: worker 0 creates x; worker 1 runs x. All")


def test_whoever_does_not_come_is_named() -> None:
    def talk(index: int, lockstep: Lockstep) -> Any:
        return lockstep.exchange("creates", 1, timeout=0.05) if index == 0 else None

    error, _ = on_each(2, talk)
    assert isinstance(error, DeadlockError)
    assert str(error).startswith("worker 0 creates, and lockstep/0: waited 0.05 s for worker 1 of 2, who did not come")


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("error", [KeyError("gone"), Unpicklable(1, 2)], ids=["pickles", "does-not"])
def test_an_error_of_one_is_raised_by_all_and_they_stay_together(error: Exception) -> None:
    def talk(index: int, lockstep: Lockstep) -> Any:
        caught: Any = None
        if index == 1:
            with contextlib.suppress(Exception), lockstep.failing_together("replica 3 of 4"):
                raise error
            lockstep.fail(error, "replica 3 of 4")  # which they know already
            assert lockstep.is_known(error)
        else:
            try:
                lockstep.exchange("meets", 1)
            except Exception as found:
                caught = found
                lockstep.fail(found, "replica 0 of 4")  # it comes from another worker
        return caught, lockstep.exchange("goes on", index)

    (caught, after), (_, other_after) = on_each(2, talk)
    assert after == other_after == [0, 1]
    assert type(caught) is (KeyError if isinstance(error, KeyError) else WorkerError)
    assert str(error) in str(caught)
    [note] = caught.__notes__
    assert note.startswith("(raised by replica 3 of 4 on worker 1, at ")
    assert "test_lockstep.py" in note


def test_an_error_is_raised_although_the_service_that_would_tell_the_others_has_gone() -> None:
    def exchange(*args: Any, **kwargs: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")

    worker = SimulatedWorkers.of(2)[1]
    worker.exchange = exchange  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is full"), Lockstep(worker).failing_together("a restore"):
        raise OSError("the disk is full")


def test_workers_that_have_run_other_programs_before_are_told() -> None:
    def talk(index: int, lockstep: Lockstep) -> Any:
        labels = [Label(), Label()]
        for number in (0, 1, index, 0):  # the last is the same again
            lockstep.launches.begin(labels[number])
        return lockstep.exchange("meets", 1)

    for error in on_each(2, talk):
        assert isinstance(error, DeadlockError)
        assert str(error).startswith("the workers have not run the same programs: worker 0 has run 4 programs, ")


def test_an_error_that_no_worker_is_the_cause_of_is_raised_as_it_is() -> None:
    with pytest.raises(OSError, match="the disk is full"), Lockstep(Alone()).explaining("the step 'train'"):
        raise OSError("the disk is full")


def test_an_error_that_all_raise_is_told_to_nobody() -> None:
    def talk(index: int, lockstep: Lockstep) -> Any:
        error = lockstep.everywhere(ValueError("no"))
        lockstep.fail(error, "everybody")
        return lockstep.exchange("goes on", index)

    assert on_each(2, talk) == [[0, 1], [0, 1]]


def test_agree_finds_the_first_that_differs() -> None:
    assert on_each(3, lambda index, lockstep: lockstep.agree("counts", 5)) == [None] * 3
    assert on_each(3, lambda index, lockstep: lockstep.agree("counts", index // 2)) == [(0, 2)] * 3
