"""Whatever ends a run on one worker ends it on all, after the same step; with real processes and real signals."""

from __future__ import annotations

import pathlib

import pytest

import replicax
from tests import processes
from tests.loop import workers_runs


def test_one_worker_that_stops_stops_all_after_the_same_step() -> None:
    first, second = processes.run(workers_runs.stops, workers=2, devices=2)
    assert first == second
    by_chief, by_other, interrupted, early, at_start, whole = first
    assert by_chief[0] == by_other[0] == "enough"
    assert interrupted[0] == "interrupt"
    assert min(by_chief[1], by_other[1], interrupted[1]) >= 50
    assert by_chief[2] == by_other[2] == [{"loss": 3.5}]
    assert interrupted[2] == []
    assert early == ("loss was no better than 1 (step 20) in 3 evaluations", 80)
    assert at_start == ("done before", 0)
    assert whole == (30, 5.5)


@pytest.mark.parametrize(
    "when",
    [
        "evaluation",
        "input",
        *(
            pytest.param(when, marks=pytest.mark.soak)
            for when in ("before", "compile", "step", "run_steps", "last evaluation")
        ),
    ],
)
def test_sigterm_to_one_worker_ends_all_after_the_same_step(when: str) -> None:
    first, second = processes.run(workers_runs.preempted, when, workers=2, fresh=True)
    assert first == second
    assert first[0] == f"exit {replicax.EXIT_PREEMPTED}"
    if when == "before":
        assert first[1] <= 1
    if when in ("step", "run_steps"):
        assert first[1] >= 100
    if when == "run_steps":
        assert first[1] % 5 == 0  # no call is broken off in the middle
    if when == "input":
        assert 1 <= first[1] <= 15
    if when == "evaluation":
        assert first[1] == 20


def test_a_run_that_workers_have_left_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    """SIGTERM to worker 1 while it saves; the same run again; the whole run in one go."""
    parts, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    first, other = processes.run(workers_runs.saved, parts, "saving", 10**6, workers=2, devices=2, fresh=True)
    assert first == other
    how, steps, losses, _ = first
    assert how == f"exit {replicax.EXIT_PREEMPTED}"
    assert steps[:2] == [10, 20]
    at = steps[-1]
    expected, _ = processes.run(workers_runs.saved, whole, None, at + 25, workers=2, devices=2)
    resumed, other = processes.run(workers_runs.saved, parts, None, at + 25, workers=2, devices=2)
    assert resumed == other
    assert resumed[0] == f"resumed at {at}"
    assert resumed[3] == expected[3]
    logged = dict(expected[2])
    assert all(logged.get(step, loss) == loss for step, loss in [*losses, *resumed[2]])
    assert len(resumed[2]) >= 2
    rows = (tmp_path / "parts" / "train.csv").read_text().splitlines()[1:]  # which the chief alone writes
    numbers = [int(row.split(",")[0]) for row in rows]
    assert numbers == sorted({*numbers})


@pytest.mark.soak
def test_a_worker_that_gets_sigterm_while_it_restores(tmp_path: pathlib.Path) -> None:
    """The run ends at the first step that all can agree on."""
    processes.run(workers_runs.saved, str(tmp_path), None, 25, workers=2, devices=2)
    last, other = processes.run(workers_runs.saved, str(tmp_path), "restoring", 10**6, devices=2, fresh=True)
    assert last == other
    assert last[0] == f"exit {replicax.EXIT_PREEMPTED}"
    assert not last[1] or last[1][-1] > 25
