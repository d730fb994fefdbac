"""What a run must have done, and whether it has: every claim is checked against what the processes have noted."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tests.chaos import launch
from tests.chaos.faults import FILL, KILL, PREEMPT, STOP, Fault
from tests.chaos.records import read_records, read_used
from tests.chaos.training import BATCH, EXAMPLES, STEPS_PER_EPOCH

EXIT_PREEMPTED = 75


def problems_of_attempts(folder: Path, faults: Sequence[Fault], workers: int) -> dict[int, list[str]]:
    """What went wrong, by attempt: each fault has struck, and the attempt has begun and ended as it should."""
    found: dict[int, list[str]] = collections.defaultdict(list)
    by_attempt: dict[int, dict[str, list[dict]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for entry in read_records(folder):
        by_attempt[entry["attempt"]][entry["what"]].append(entry)
    said = launch.said(folder)
    for attempt in by_attempt.keys() - {fault.number for fault in faults}:
        found[attempt].append(f"there was an attempt too many: {_cause(said.get(attempt, []))}")
    for fault in faults:
        entries, say = by_attempt[fault.number], found[fault.number].append
        lines = said.get(fault.number, [])
        cause = _cause(lines)
        if late := [line for line in lines if "have not ended in time" in line]:
            say(late[0])
        if fault.kind and len(entries["struck"]) != 1:
            say(f"the fault has struck {len(entries['struck'])} times; the attempt ended by: {cause}")
            continue
        if fault.damage is not None and len(entries["damaged"]) != 1:
            say("no checkpoint was damaged")
        [newest] = [entry["newest"] for entry in entries["prepared"]] or [None]
        for entry in entries["resumed"]:
            if entry["step"] != newest:
                say(f"worker {entry['worker']} went on from step {entry['step']}; the newest whole one was {newest}")
        found[fault.number] += _problems_of_end(fault, cause, entries, workers)
    return {attempt: problems for attempt, problems in found.items() if problems}


def _cause(lines: list[str]) -> str:
    """What the launcher has said of the worker that was the cause of an attempt's end."""
    return next((line for line in lines if line.startswith("worker ")), "nothing")


def _problems_of_end(fault: Fault, cause: str, entries: dict[str, list[dict]], workers: int) -> Iterable[str]:
    if fault.kind == KILL and not (f"worker {fault.worker} of" in cause and "signal 9 (SIGKILL" in cause):
        yield f"the launcher names another cause: {cause}"
    if fault.kind == STOP and f"worker {fault.worker} of" not in cause:
        yield f"the launcher names another cause: {cause}"
    if fault.kind == PREEMPT:
        # Before it is connected a worker has nothing to save, and just ends.
        if fault.phase == "start" and fault.spot != "connected":
            if "to be started again" not in cause:
                yield f"this was taken for a fault: {cause}"
            return
        codes = [entry["code"] for entry in entries["left"]]
        if codes != [EXIT_PREEMPTED] * workers:
            yield f"the workers ended with the codes {codes}: {cause}; {_errors(entries)}"
        if len({entry["step"] for entry in entries["ended"]}) > 1:
            yield f"the workers ended at steps {[entry['step'] for entry in entries['ended']]}"
    if fault.kind == FILL and not ("CheckpointError" in (said := _errors(entries)) and "No space left" in said):
        yield f"no worker says that the disk is full: {said}; {cause}"


def _errors(entries: dict[str, list[dict]]) -> str:
    return "; ".join(f"worker {entry['worker']}: {entry['error']}" for entry in entries["failed"]) or "no errors"


def problems_of_examples(folder: Path, steps: int, replicas: int) -> list[str]:
    """Whether each step has used the same examples in every attempt that made it, and an epoch has each once."""
    by_place: dict[tuple[int, int], list[int]] = {}
    problems = []
    for attempt, step, replica, examples in read_used(folder):
        before = by_place.setdefault((step, replica), examples)
        if before != examples:
            problems.append(f"step {step} has used other examples on replica {replica} in attempt {attempt}")
    if set(by_place) != {(step, replica) for step in range(1, steps + 1) for replica in range(replicas)}:
        problems.append(f"there are {len(by_place)} entries of examples, and should be {steps} × {replicas}")
        return problems
    for first in range(1, steps + 1, STEPS_PER_EPOCH):
        used = [by_place[s, r] for s in range(first, min(first + STEPS_PER_EPOCH, steps + 1)) for r in range(replicas)]
        numbers = sorted(number for examples in used for number in examples)
        expected = EXAMPLES if first + STEPS_PER_EPOCH <= steps + 1 else (steps + 1 - first) * BATCH
        if len(numbers) != expected or len(set(numbers)) != expected:
            problems.append(f"the epoch from step {first} on has {len(set(numbers))} examples in {len(numbers)} places")
    return problems


def problems_of_result(folder: Path, reference: Path, workers: int) -> list[str]:
    """Whether variables, slots and counter are those of the uninterrupted run on all workers, bit by bit."""
    problems = []
    with np.load(reference / "result-0.npz") as expected:
        for worker in range(workers):
            path = folder / f"result-{worker}.npz"
            if not path.exists():
                problems.append(f"worker {worker} has not come to the end")
                continue
            with np.load(path) as values:
                for name in expected.files:
                    if values[name].tobytes() != expected[name].tobytes():
                        problems.append(f"on worker {worker} array {name} differs from the uninterrupted run's")
    used = {(s, r): e for _, s, r, e in read_used(folder)}
    if used != {(s, r): e for _, s, r, e in read_used(reference)}:
        problems.append("the uninterrupted run has used other examples")
    return problems
