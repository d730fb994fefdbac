"""Whatever ends a run on one worker ends it on all, after the same step; with real processes and real signals."""

from __future__ import annotations

import pytest

import replicax
from tests import processes
from tests.loop import workers_runs


def test_one_worker_that_stops_stops_all_after_the_same_step() -> None:
    first, second = processes.run(workers_runs.stops, workers=2, devices=2)
    assert first == second
    by_chief, by_other, interrupted, early, whole = first
    assert by_chief[0] == by_other[0] == "enough"
    assert interrupted[0] == "interrupt"
    assert min(by_chief[1], by_other[1], interrupted[1]) >= 50
    assert early == ("loss was no better than 1 (step 20) in 3 evaluations", 80)
    assert whole == (30, 5.5)


@pytest.mark.parametrize("when", ["before", "compile", "step", "evaluation"])
def test_sigterm_to_one_worker_ends_all_after_the_same_step(when: str) -> None:
    first, second = processes.run(workers_runs.preempted, when, workers=2, fresh=True)
    assert first == second
    assert first[0] == f"exit {replicax.EXIT_PREEMPTED}"
    if when == "before":
        assert first[1] <= 1
    if when == "step":
        assert first[1] >= 100
    if when == "evaluation":
        assert first[1] == 20
