"""What one scheduled function returns is an argument of the next."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of

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
