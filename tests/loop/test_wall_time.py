"""Where the wall time went: the parts add up, for one attempt and for several."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
import types
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from replicax.loop import wall_time
from replicax.loop.attempt_times import NAME, Attempts, PastAttempt, added_up, read
from replicax.loop.endless_input import EndlessInput
from replicax.loop.steps_per_call import MEASURED, StepsPerCall
from replicax.loop.wall_time import LOST, WallTime, since_process_start, table
from replicax.workers import heartbeat
from replicax.workers.exchange import Alone
from replicax.workers.heartbeat_page import Phase
from replicax.workers.lockstep import Lockstep
from tests.conftest import strategy_of
from tests.simulated_workers import SimulatedWorkers, run


class Clock:
    """Stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_clock_always_runs_for_one_kind() -> None:
    clock = Clock()
    wall = WallTime(clock, began=-2.0)
    clock.now = 1.0
    with wall.on("saving"):
        clock.now = 4.0
        with wall.on("logging"):
            clock.now = 4.5
        clock.now = 5.0
    wall.switch("steps")
    clock.now = 6.0
    wall.count_as("compile")
    clock.now = 8.0
    with contextlib.suppress(KeyError), wall.on("evaluation"):
        clock.now = 8.25
        raise KeyError
    clock.now = 9.0
    wall.stop()
    clock.now = 100.0
    wall.stop()
    spent = {kind: seconds for kind, seconds in wall.seconds.items() if seconds}
    assert spent == {"start": 3.0, "saving": 3.5, "logging": 0.5, "compile": 1.0, "steps": 2.75, "evaluation": 0.25}
    assert sum(wall.seconds.values()) == 11.0
    assert wall.training == 2.75


def test_a_run_that_is_over_stays_so_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Phase] = []
    monkeypatch.setattr(heartbeat, "current", types.SimpleNamespace(switch=phases.append))
    wall = WallTime(Clock())
    wall.switch("steps")
    assert phases == [Phase.STEPS]
    wall.stop()
    assert wall.seconds["steps"] == wall.training == 0.0
    assert phases[-1] is Phase.START  # in which it may take as long as it wants


@pytest.mark.parametrize("is_at_a_prompt", [False, True])
def test_only_the_first_run_of_a_program_has_waited_for_its_start(
    monkeypatch: pytest.MonkeyPatch, is_at_a_prompt: bool
) -> None:
    monkeypatch.setattr(wall_time, "_has_run", False)
    if is_at_a_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.delattr(sys, "ps1", raising=False)
    assert (since_process_start() > 0) is not is_at_a_prompt
    assert since_process_start() == 0


def test_the_parts_of_a_run_add_up_to_its_wall_time(tmp_path: pathlib.Path) -> None:
    strategy = strategy_of(2)
    dataset = strategy.distribute_dataset([np.ones(4, np.float32)] * 5)

    class Slow(replicax.Callback):
        def on_evaluation(self, run: replicax.TrainingRun, step: int, values: object) -> None:
            time.sleep(0.05)

    def run_of(steps: int) -> replicax.TrainingRun:
        return replicax.train(
            replicax.compute_average_loss,
            dataset,
            steps,
            log_every=7,
            evaluate=lambda: time.sleep(0.1) or 1.0,
            evaluate_every=20,
            callbacks=[Slow()],
            logs=tmp_path,
            progress=False,
        )

    run_of(1)  # what comes before belongs to the first run of a process
    began = time.perf_counter()
    run = run_of(60)
    took = time.perf_counter() - began
    assert sum(run.wall_time.values()) == pytest.approx(took, abs=0.1)
    [attempt] = read(tmp_path / NAME)  # which has the last evaluation, too
    assert attempt.notes[-1][1]["evaluation"] == pytest.approx(run.wall_time["evaluation"], abs=1e-3)
    assert run.wall_time["evaluation"] >= 0.3
    assert 0.15 <= run.wall_time["callbacks"] < 0.3
    assert all(run.wall_time[kind] > 0 for kind in ("compile", "input", "steps", "logging"))


def test_what_a_step_takes_is_time_of_steps() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: time.sleep(0.02))
        return replicax.compute_average_loss(x)

    dataset = strategy_of(1).distribute_dataset([np.ones(4, np.float32)] * 10)
    run = replicax.train(step, dataset, 10, steps_per_call=1, progress=False)
    assert run.wall_time["steps"] >= 9 * 0.02  # the first is in a call that compiles


def test_what_comes_after_an_element_is_no_time_of_input() -> None:
    strategy, wall = strategy_of(1), WallTime()
    requests: Any = types.SimpleNamespace(check_wait=None, begin_call=lambda: None)
    dataset = strategy.distribute_dataset([np.ones(4, np.float32)])
    source = EndlessInput(dataset, strategy.extended.replicas, wall, requests, is_saved=False)
    for kind in ("steps", "evaluation"):  # the second element begins another pass
        wall.switch(kind)
        source.take(1, False)
        assert wall.switch("start") == kind
    source.close()


def test_what_a_later_attempt_did_not_go_on_from_is_lost() -> None:
    first = PastAttempt(
        0, [(0, {"start": 1.0}), (10, {"start": 1.0, "steps": 5.0}), (14, {"start": 1.0, "steps": 7.5})]
    )
    second = PastAttempt(
        10, [(10, {"start": 2.0}), (20, {"start": 2.0, "steps": 6.0}), (21, {"start": 2.0, "steps": 7.0})]
    )

    def of(resumed_at: int) -> dict[str, float]:
        return {kind: s for kind, s in added_up([first, second, PastAttempt(resumed_at)]).items() if s}

    assert of(20) == {"start": 3.0, "steps": 11.0, LOST: 3.5}
    # The checkpoint of step 20 was broken: all of the second attempt was in vain, but for what came before its steps.
    assert of(10) == {"start": 3.0, "steps": 5.0, LOST: 9.5}
    assert of(0) == {"start": 1.0, LOST: 16.5}
    for resumed_at in (20, 10, 0):
        assert sum(of(resumed_at).values()) == 17.5


def test_attempts_know_of_those_before(tmp_path: pathlib.Path) -> None:
    first = Attempts(tmp_path / "new", 0, goes_on=True)
    first.note(0, {"start": 1.0})
    first.note(10, {"start": 1.0, "steps": 4.0})
    first.note(15, {"start": 1.0, "steps": 6.0})
    with (tmp_path / "new" / NAME).open("a") as file:
        file.write('\n{"step": 16, "seco')  # it was killed
    second = Attempts(tmp_path / "new", 10, goes_on=True)
    second.note(10, {"start": 3.0})
    total = second.total({"start": 3.0, "steps": 2.0})
    assert {kind: s for kind, s in total.items() if s} == {"start": 4.0, "steps": 6.0, LOST: 2.0}
    assert "lost work        2.0 s   16.7%" in table(total, attempts=2)
    assert [a.resumed_at for a in read(tmp_path / "new" / NAME)] == [0, 10]
    assert Attempts(tmp_path / "new", 4, goes_on=False).before == []
    assert [a.resumed_at for a in read(tmp_path / "new" / NAME)] == [4]
    assert Attempts(None, 0, goes_on=True).total({"steps": 1.0}) == {"steps": 1.0}


# --- how many steps go to the devices at once -----------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "size", "left", "chosen"),
    [
        (0.0005, 100, 10**5, 25),
        (0.001, 100, 10**5, 10),
        (0.01, 100, 10**5, 1),
        (0.0005, 100, 10**4, 1),
        (0.0005, 12 * 2**20, 10**5, 5),
    ],
)
def test_steps_are_joined_if_they_are_small_and_many(seconds: float, size: int, left: int, chosen: int) -> None:
    clock = Clock()
    calls = StepsPerCall(None, [100, 50], Lockstep(Alone()), clock)
    for number in range(MEASURED + 2):
        assert calls.next(1000) == 1
        clock.now += 3.0 if number == 0 else 1.0 if number == 6 else seconds  # to compile; and a busy moment
        calls.ran(None, size, left)
    assert calls.next(1000) == chosen
    assert calls.next(chosen - 1 or 1) == 1
    for _ in range(8):  # no later call is waited for
        calls.ran(types.SimpleNamespace(block_until_ready=pytest.fail), size, left)


def test_a_slower_worker_joins_as_many_steps_as_the_chief() -> None:
    def chosen(worker: SimulatedWorkers) -> int:
        clock = Clock()
        calls = StepsPerCall(None, [100], Lockstep(worker), clock)
        for _ in range(MEASURED + 2):
            clock.now += 0.001 * (1 + worker.index)
            calls.ran(None, 100, 10**5)
        return calls.next(1000)

    assert run(SimulatedWorkers.of(2), chosen) == [20, 20]


def test_lines_that_are_no_attempts_are_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / NAME
    lines = [
        '{"step": 1, "seconds": {}}',
        '{"resumed_at": 3}',
        "[" * 100_000,
        "7",
        '{"step": 4}',
        '{"step": 5, "seconds": [1]}',
        '{"resumed_at": "x"}',
        '{"resumed_at": Infinity}',
    ]
    path.write_text("\n".join([*lines, '{"step": 6, "seconds": {"steps": 1.5}}']))
    assert read(path) == [PastAttempt(3, [(6, {"steps": 1.5})])]


def test_attempts_in_what_is_no_file(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match=rf"{NAME}, which has the times .*: it is no regular file; remove it"):
        Attempts(tmp_path, 0, goes_on=True)
