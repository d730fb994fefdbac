"""The heartbeat's page: shared memory into which a worker writes its progress, for the launcher.

The launcher makes the page, an anonymous file, and names it in the worker's environment. The worker writes numbers of
8 bytes into it, each with one store: no lock, no system call, and nothing to wait for, on either side. Times are of
``time.monotonic``, which is the same clock in all processes of a machine.

This file imports nothing of JAX, because the launcher reads it, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "REPLICAX_HEARTBEAT"
"""Environment variable of a worker: the path of its page."""
SIZE = 4096

# Whole numbers, by their place.
PID, SIGNAL, THREAD, LAUNCHED, PHASE, STEP, RUNS, CALLS, FINISHED, CALLBACK, RECORDED, ON_CPU = range(12)
# Numbers of seconds, by their place.
PROGRESS, TICK, FINISHED_AT, EXPECTED, USUAL = range(32, 37)
# The name of the program, in bytes.
_NAME, _NAME_END = 1024, 1280
# The last steps, in a ring.
_STEPS, _KEPT = 160, 56

STEPS, START, END, PAUSED, RENDEZVOUS, EXACT, COMPILE, INPUT, EVALUATION, SAVING, RESTORING, LOGGING, CALLBACKS = range(
    13
)
EVALUATION_STEPS = 13
"""The phases of a worker."""

PHASES: Mapping[int, str] = {
    STEPS: "between two steps",
    START: "starting",
    END: "at its end",
    PAUSED: "in replicax.paused()",
    RENDEZVOUS: "waiting for the other workers",
    EXACT: "in a step on the per-replica executor",
    COMPILE: "compiling",
    INPUT: "waiting for its input",
    EVALUATION: "evaluating",
    EVALUATION_STEPS: "evaluating step by step",
    SAVING: "saving",
    RESTORING: "restoring",
    LOGGING: "logging",
    CALLBACKS: "in a callback",
}
"""The phases in words."""
UNKNOWN = -1.0
"""Value of ``EXPECTED`` for a program that has never ended: its duration is unknown."""


class StepRecord(NamedTuple):
    """One step, from the end of a program to the end of the next one; in seconds.

    Attributes:
      at: its end.
      period: its duration.
      gap: for how long the devices were idle after it.
      host: for how long the host was busy then, or waited for something other than its devices.
      waited: for how much of this it waited for input.
      computed: for how long processors worked on it.
    """

    at: float
    period: float
    gap: float
    host: float
    waited: float
    computed: float


class HeartbeatPage:
    """The numbers of one worker.

    Args:
      file: the descriptor of the page; may be closed afterwards.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, SIZE)
        whole = memoryview(self._memory)
        self.numbers = whole.cast("q")
        self.seconds = whole.cast("d")

    @property
    def name(self) -> str:
        """The program that was launched last."""
        return self._memory[_NAME:_NAME_END].rstrip(b"\0").decode(errors="replace")

    @name.setter
    def name(self, name: str) -> None:
        room = _NAME_END - _NAME
        self._memory[_NAME:_NAME_END] = name.encode(errors="replace")[:room].ljust(room, b"\0")

    def record(self, step: StepRecord) -> None:
        """Record a step."""
        count, seconds = self.numbers[RECORDED], self.seconds
        start = _place(count)
        for i, value in enumerate(step):
            seconds[start + i] = value
        self.numbers[RECORDED] = count + 1  # last: it makes the record valid

    def recorded(self, since: int) -> tuple[list[StepRecord], int]:
        """The steps from number ``since`` on that are still there, and how many there were in all."""
        count = self.numbers[RECORDED]
        found = [(i, self._at(_place(i))) for i in range(max(since, count - _KEPT), count)]
        oldest = self.numbers[RECORDED] - _KEPT  # older ones, and perhaps this one, have been overwritten meanwhile
        return [step for i, step in found if i > oldest], count

    def _at(self, start: int) -> StepRecord:
        return StepRecord(*self.seconds[start : start + len(StepRecord._fields)])


def _place(step: int) -> int:
    return _STEPS + step % _KEPT * len(StepRecord._fields)


def new_page() -> tuple[int, HeartbeatPage]:
    """A page for a worker that is about to be started, and the descriptor by which it finds it."""
    file = os.memfd_create("replicax-heartbeat")
    os.ftruncate(file, SIZE)
    return file, HeartbeatPage(file)


def path_of(file: int) -> str:
    """The path by which other processes open the page whose descriptor is ``file`` here."""
    return f"/proc/{os.getpid()}/fd/{file}"


def claimed_page(path: str) -> HeartbeatPage | None:
    """The page at ``path``, for this process alone; ``None`` if another one has it, or it can't be reached.

    A worker may start processes, which inherit its environment.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, as the file stays open
        return HeartbeatPage(file)
    except (OSError, ValueError):
        os.close(file)
        return None
