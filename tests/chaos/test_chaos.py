"""The short form of `make chaos`: a few faults that strike a real run, which must end as if nothing had happened."""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.chaos import verdict
from tests.chaos.faults import DAMAGES, FILL, KILL, PREEMPT, SPOTS, STOP, Amounts, alone, faults_of
from tests.chaos.records import Records
from tests.chaos.training import BATCH, EXAMPLES, STEPS_PER_EPOCH


@pytest.mark.soak  # tests/launcher and tests/checkpoint have each kind of fault by itself
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_struck_ends_as_if_nothing_had_happened(seed: int, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--short", "--seed", str(seed), "--folder", str(tmp_path)],
        cwd=processes.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the parameters are bit-identical to those of the run without faults" in done.stdout, done.stdout


def test_the_faults_are_those_of_the_issue_and_follow_from_the_seed() -> None:
    faults = faults_of(3, Amounts(), workers=3)
    assert faults == faults_of(3, Amounts(), workers=3)
    assert faults != faults_of(4, Amounts(), workers=3)
    kinds = collections.Counter(fault.kind for fault in faults)
    assert kinds == {KILL: 40, STOP: 10, PREEMPT: 20, FILL: 5, "": 1}
    damages = collections.Counter(fault.damage.how for fault in faults if fault.damage is not None)
    assert damages == dict.fromkeys(DAMAGES, 10)
    kills = [fault for fault in faults if fault.kind == KILL]
    assert collections.Counter(fault.phase for fault in kills) == dict.fromkeys(SPOTS, 5)
    assert sum(fault.worker == 0 for fault in kills) == 10
    assert [fault.kind for fault in alone(faults, 7)] == [KILL, faults[7].kind, ""]


# --- what finds faults would find them ------------------------------------------------------------------


def write_used(folder: pathlib.Path, steps: int) -> Records:
    """What two replicas use."""
    records = Records(folder, 0, 0)
    for step in range(1, steps + 1):
        first = (step - 1) % STEPS_PER_EPOCH * BATCH
        for replica in range(2):
            start = first + replica * BATCH // 2
            records.note_used(step, replica, list(range(start, start + BATCH // 2)))
    return records


def test_examples_that_come_twice_or_not_at_all_are_found(tmp_path: pathlib.Path) -> None:
    steps = STEPS_PER_EPOCH + 1
    records = write_used(tmp_path, steps)
    assert verdict.problems_of_examples(tmp_path, steps, 2) == []
    assert "there are 32 entries" in verdict.problems_of_examples(tmp_path, steps + 1, 2)[0]
    records.note_used(1, 0, list(range(BATCH // 2)))  # the same step again
    assert verdict.problems_of_examples(tmp_path, steps, 2) == []
    records.note_used(1, 0, list(range(1, BATCH // 2 + 1)))
    [problem] = verdict.problems_of_examples(tmp_path, steps, 2)
    assert problem == "step 1 has used other examples on replica 0 in attempt 0"
    assert EXAMPLES % BATCH == 0


def test_parameters_that_differ_in_a_bit_are_found(tmp_path: pathlib.Path) -> None:
    for name, value in (("struck", 1.0), ("reference", np.nextafter(np.float32(1), np.float32(2)))):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "result-0.npz", np.full(3, value, np.float32))
    [problem] = verdict.problems_of_result(tmp_path / "struck", tmp_path / "reference", 1)
    assert problem == "on worker 0 array arr_0 differs from the uninterrupted run's"
