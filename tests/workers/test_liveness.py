"""Workers that fail, are interrupted, end or die: the scenarios of workers_liveness.py, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests import processes
from tests.compiler import HURRIED

SECONDS = 240


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, str]]]:
    """Of each scenario that is tested: the exit codes of its workers, and what they printed."""
    items: list[Any] = request.session.items
    scenarios = {item.callspec.params["scenario"] for item in items if "outcomes" in getattr(item, "fixturenames", ())}
    path = os.pathsep.join([str(processes.ROOT / "src"), str(processes.ROOT)])
    clean = {k: v for k, v in os.environ.items() if k != "NPROC"} | HURRIED
    program = [
        "-W",
        "error",
        "-m",
        "tests.workers.workers_liveness",
        str(SECONDS),
        str(tmp_path_factory.mktemp("ends")),
        *sorted(scenarios),
    ]
    done = subprocess.run(
        [sys.executable, *program],
        env=clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[tuple[int, str]]] = json.loads(done.stdout)
    return found


FULL = (
    r"worker {} of \d \(numbered from 0\) has failed: OSError: the disk is full \(raised at .*workers_liveness.py:\d+\)"
)
# Where the connection breaks, too, a worker may be told by its step before it is ended.
TOLD = f"WorkerError: (the step 'train' was broken off, as )?{FULL.format(0)}"
ENDED = r"worker 1 of 2 \(numbered from 0\) has ended its program, by its last line or sys.exit, while worker 0 "
PART = r"worker 1 of 2 .* has failed: its part of 'train' has failed at .*_liveness.py:(.|\n)*no such row"
ROW = r"^('no such row' \(raised by the step 'train' on worker 1, at .*\n){2}END\n"
GOES_ON = (
    r"the workers do not do the same: worker 0 runs 'train', as its program number 6, which needs this worker, and "
    r"worker 1, after 5 programs, runs a step after one that has failed \(its part of 'train' has failed at "
)
OTHERS = r"the workers do not run the same programs: number 9 is 'train' on worker 0, and 'evaluate' on worker 1"
UNLIKE = (
    "the workers have not run the same programs: worker 0 has run 9 programs, the last of them 'double'; "
    "worker 1 has run 9 programs, the last of them 'triple'; and now worker {} creates a variable 'another'"
)
SEEN = r"worker {} of \d \(numbered from 0\) has failed: its process has died \(process \d+ on .+\): it was killed, "
# A program may be broken off so early that the death has not been seen yet.
DIED = rf"({SEEN}|worker {{}} of \d \(numbered from 0\) gives no sign of life)".replace("{}", "{0}")
SHORTER = "the pass ends before element 2 on worker 1, but not on worker 0"
FILES = r"the workers were given different files: worker 0 has '.*\.py', and worker 1 has not"
ELSEWHERE = (
    r"the workers do not do the same: worker 0 runs 'train', as its program number 6, which needs this worker, and "
    r"worker 1, after 5 programs, creates a variable 'another'"
)


ENDS = [
    ("raises", 0, 1, f"CAUGHT WorkerError: (the step 'train' was broken off, as )?{FULL.format(2)}"),
    ("raises", 1, 1, f"CAUGHT WorkerError: (the step 'train' was broken off, as )?{FULL.format(2)}"),
    ("raises", 2, 1, "\nOSError: the disk is full"),
    ("raises while another reads", 0, 1, f"JaxRuntimeError: (.*\n)+the program was broken off, as {FULL.format(1)}"),
    ("raises while another reads", 1, 1, "\nOSError: the disk is full"),
    ("chief raises", 0, 1, "\nOSError: the disk is full"),
    ("chief raises", 1, 1, f"Replicax ends worker 1 of 3.*: 'train' can't come to its end, as {FULL.format(0)}|{TOLD}"),
    ("chief raises", 2, 1, rf"(It is here \(most recent call last\):\n|{TOLD})(.*\n)*.*worker.step\(10_000\)"),
    ("interrupted", 0, 1, "CAUGHT WorkerError: worker 1 of 2 .* has failed: it was interrupted, at .*_liveness.py:"),
    ("interrupted", 1, -signal.SIGINT, "\nKeyboardInterrupt"),
    ("interrupted in steps", 0, 1, "CAUGHT WorkerError: .*worker 1 of 2 .* has failed: it was interrupted, at "),
    ("interrupted in steps", 1, -signal.SIGINT, "\nKeyboardInterrupt"),
    ("exits", 0, 1, f"(CAUGHT WorkerError|Replicax ends worker 0).*{ENDED}"),
    ("exits", 1, 3, ""),
    ("catches", 0, 1, f"(CAUGHT WorkerError|Replicax ends worker 0).*{PART}"),
    ("catches", 1, 3, ""),
    ("catches and goes on", 0, 1, f"(CAUGHT WorkerError|Replicax ends worker 0).*{GOES_ON}"),
    ("catches and goes on", 1, 1, f"CAUGHT DeadlockError: {GOES_ON}"),
    ("nan on one", 0, 0, r"^invalid value \(nan\) .* \(raised by the step 'train' on worker 1, at .*\nEND\n"),
    ("nan on one", 1, 0, r"^invalid value \(nan\) .* tells its operation\. .*\nEND\n"),
    ("host fails on one", 0, 0, ROW),
    ("host fails on one", 1, 0, r"^('no such row' The variables that train writes .*\n){2}END\n"),
    ("host fails on one of three", 0, 0, ROW),
    ("host fails on one of three", 2, 0, ROW),
    ("all raise", 0, 1, "\nKeyError: 'the same everywhere'"),
    ("all raise", 1, 1, "\nKeyError: 'the same everywhere'"),
    ("killed", 0, 1, f"CAUGHT WorkerError: the step 'train' was broken off(, as |: ){DIED.format(1)}"),
    ("killed", 1, -signal.SIGKILL, ""),
    ("killed in a run", 0, 1, f"CAUGHT WorkerError: the step 'train' was broken off(, as |: ){DIED.format(1)}"),
    ("killed of three", 0, 1, f"CAUGHT WorkerError: .*{DIED.format(2)}"),
    ("killed of three", 1, 1, f"CAUGHT WorkerError: .*{DIED.format(2)}"),
    ("killed when waited for", 0, 1, f"CAUGHT WorkerError: {SEEN.format(2)}"),
    ("killed when waited for", 1, 1, f"CAUGHT WorkerError: {SEEN.format(2)}"),
    ("exits at once", 0, 1, f"CAUGHT WorkerError: {SEEN.format(1)}"),
    ("exits at once", 1, 0, ""),
    ("killed at the end", 0, 0, "^END\n"),
    ("shorter", 0, 1, f"^(a step\n){{2}}CAUGHT ValueError: {SHORTER}"),
    ("shorter", 1, 1, f"^(a step\n){{2}}CAUGHT ValueError: {SHORTER}"),
    ("other files", 0, 1, f"CAUGHT ValueError: .*{FILES}"),
    ("other files", 1, 1, f"CAUGHT ValueError: .*{FILES}"),
    ("other programs", 0, 1, f"(CAUGHT (Worker|Deadlock)Error|Replicax ends worker 0).*{OTHERS}"),
    ("alike but others", 0, 1, f"CAUGHT DeadlockError: {UNLIKE.format(0)}"),
    ("alike but others", 1, 1, f"CAUGHT DeadlockError: {UNLIKE.format(1)}"),
    ("elsewhere", 0, 1, f"(CAUGHT (Worker|Deadlock)Error|Replicax ends worker 0).*{ELSEWHERE}"),
    ("elsewhere", 1, 1, f"CAUGHT DeadlockError: {ELSEWHERE}"),
    ("ends earlier", 0, 0, r"^w is 0\.49\d+\nEND\n$"),
    ("ends earlier", 1, 0, r"^END\n$"),
    ("slow", 0, 0, r"^w is 0\.2\d+\nEND\n$"),
    ("slow", 1, 0, r"^w is 0\.2\d+\nEND\n$"),
]
MORE = {"interrupted in steps", "killed of three", "exits at once", "host fails on one of three"}
"""Much like interrupted, killed, killed when waited for, and host fails on one: for ``make soak``."""


@pytest.mark.parametrize(
    ("scenario", "worker", "code", "printed"),
    [pytest.param(*end, marks=[pytest.mark.soak] if end[0] in MORE else []) for end in ENDS],
)
def test_the_others_are_told(outcomes: Any, scenario: str, worker: int, code: int, printed: str) -> None:
    found, text = outcomes[scenario][worker]
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] Rank"))
    assert re.search(printed, text), text
    assert found == code, text


@pytest.mark.parametrize("scenario", ["chief killed", "chief killed when waited for"])
def test_the_others_end_with_the_chief(outcomes: Any, scenario: str) -> None:
    """The service is gone with it, so JAX ends them; but not before they have seen the death, or while they see it."""
    (code, _), *others = outcomes[scenario]
    assert code == -signal.SIGKILL
    for code, text in others:
        assert code in (1, -signal.SIGABRT), text
        assert re.search(f"{SEEN.format(0)}|worker 0 .*can't be reached|the JAX distributed service detected", text), (
            text
        )
