"""What one scheduled function returns is an argument of the next."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of, wait_until_ready

WAIT = 100.0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_function_waits_for_what_it_uses(mode: Any) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode=mode)

    def slowly(x: Any) -> Any:
        time.sleep(0.05)
        return {"array": np.asarray(x) + 1}

    def both(found: Any, more: Any) -> Any:
        return found["array"], more[0]["array"]

    with coordinator_of(strategy) as (coordinator, _):
        first = coordinator.schedule(slowly, args=(np.array([1.0, 2.0]),))
        second = coordinator.schedule(lambda: first)  # not an argument, but captured
        third = coordinator.schedule(both, args=(first,), kwargs={"more": [second]})
        coordinator.join(WAIT)
        assert [found.tolist() for found in third.fetch()] == [[2.0, 3.0]] * 2


def test_it_comes_again_with_a_function_that_is_run_again() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, actors):
        first = coordinator.schedule(lambda: 20)
        first.fetch(WAIT)
        actors.of("StepWorker")[0].kill()
        assert coordinator.schedule(lambda x: x + 1, args=(first,)).fetch(WAIT) == 21


def test_results_that_will_never_come_are_errors() -> None:
    strategy, other = (replicax.ParameterServerStrategy(num_workers=1) for _ in range(2))
    with coordinator_of(strategy) as (coordinator, _), coordinator_of(other) as (elsewhere, _):
        failed = coordinator.schedule(lambda: 1 // 0)
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.join(WAIT)
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.schedule(lambda x: x, args=(failed,))
        foreign = elsewhere.schedule(lambda: 1)
        with pytest.raises(ValueError, match=r"another coordinator's function.*pass its value, from fetch\(\)"):
            coordinator.schedule(lambda x: x, args=(foreign,))
        assert coordinator.schedule(lambda x: x, args=(foreign.fetch(WAIT),)).fetch(WAIT) == 1


def test_a_captured_result_that_has_failed_is_an_error_at_each_schedule() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, _):
        begin = threading.Event()
        _events["begin"] = begin
        failed = coordinator.schedule(_fail_later)

        def use() -> Any:
            return failed

        waiting = coordinator.schedule(use)
        begin.set()
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.join(WAIT)
        with pytest.raises(replicax.errors.WorkerError, match="was not run"):
            waiting.fetch(WAIT)
        _events["begin"] = hold = threading.Event()
        coordinator.schedule(_wait)  # so the worker is busy
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.schedule(use)
        hold.set()
        assert coordinator.schedule(lambda: 1).fetch(WAIT) == 1


def test_a_result_that_fails_after_the_error_of_its_step_was_raised_cancels_what_waits_for_it() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2, mode="sync")
    with coordinator_of(strategy) as (coordinator, _):
        wait_until_ready(coordinator)
        begin = threading.Event()
        _events["begin"] = begin
        first = coordinator.schedule(lambda: 1 // 0)
        second = coordinator.schedule(_fail_later)
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            first.fetch(WAIT)
        with pytest.raises(replicax.errors.WorkerError, match="ZeroDivisionError"):
            coordinator.done()
        waiting = coordinator.schedule(lambda x: x, args=(second,))
        after = coordinator.schedule(lambda: 1)
        begin.set()
        with pytest.raises(replicax.errors.WorkerError, match="was not run.*ZeroDivisionError"):
            waiting.fetch(WAIT)
        assert after.fetch(WAIT) == 1


_events: dict[str, threading.Event] = {}
"""What functions wait for: workers are threads of this process."""


def _wait() -> None:
    _events["begin"].wait(WAIT)


def _fail_later() -> None:
    _wait()
    1 // 0  # noqa: B018
