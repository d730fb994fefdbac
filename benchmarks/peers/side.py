"""One training of one peer, in a process of its own: does what lines of standard input say, and answers each with JSON.

``python -m benchmarks.peers.side PEER PROBLEM REPLICAS``. The process that measures loads none of the libraries.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import problem
from benchmarks.peers.roster import BY_NAME

LAST_CHECKED = 10
"""The step whose loss has to be that of the others; so has the first, where it is a dispatch of its own."""


def main() -> None:
    """Begin, then serve: ``first``, ``block SECONDS`` and ``memory``."""
    answers = _take_standard_output()
    name, problem_name, replicas = sys.argv[1:]
    begun = time.perf_counter()
    training = BY_NAME[name].start(problem(problem_name), int(replicas))
    _answer(answers, {"ready_s": time.perf_counter() - begun, "parameters": training.parameters})
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "first":
            _answer(answers, first(training))
        elif command == "block":
            _answer(answers, block(training, float(rest[0])))
        else:
            _answer(answers, memory(training))
    training.close()
    sys.stdout.flush()
    os._exit(0)  # some libraries leave threads that don't end


def first(training: Training) -> dict[str, Any]:
    """The first call, and all until the tenth step, dispatch by dispatch; the losses of the steps that are checked."""
    losses = {}
    begun = time.perf_counter()
    calls = []
    for done in range(training.stride, LAST_CHECKED + 1, training.stride):
        losses[done] = training.steps(training.stride)
        calls.append(time.perf_counter() - begun)
    checked = {str(step): losses[step] for step in (1, LAST_CHECKED) if step in losses}
    return {"first_s": calls[0], "ten_s": calls[-1], "losses": checked}


def block(training: Training, seconds: float) -> dict[str, Any]:
    """The time of a step, and that of the processors, in a row of steps that takes about ``seconds``."""
    begun = time.perf_counter()
    training.steps(training.stride)  # the others have emptied the caches
    estimate = max(time.perf_counter() - begun, 1e-5)
    count = max(1 if training.stride > 1 else 2, round(seconds / estimate)) * training.stride
    begun, worked = time.perf_counter(), _processor_time(training)
    training.steps(count)
    spent, worked = time.perf_counter() - begun, _processor_time(training) - worked
    return {"steps": count, "step_s": spent / count, "processor_s": worked / count}


def memory(training: Training) -> dict[str, Any]:
    """Peak of the resident memory, and what of it no other process shares (shares of what is shared, now), in bytes."""
    processes = (os.getpid(), *training.children)
    return {
        "processes": len(processes),
        "peak": sum(_kibibytes(f"/proc/{pid}/status", "VmHWM") for pid in processes) * 1024,
        "proportional": sum(_kibibytes(f"/proc/{pid}/smaps_rollup", "Pss") for pid in processes) * 1024,
    }


def _processor_time(training: Training) -> float:
    """Seconds of processors that all processes have used."""
    ticks = 0
    for pid in (os.getpid(), *training.children):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _kibibytes(path: str, name: str) -> int:
    [line] = [line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def _take_standard_output() -> Any:
    """Standard output for answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: Any, what: dict[str, Any]) -> None:
    print(json.dumps(what), file=answers, flush=True)


if __name__ == "__main__":
    main()
