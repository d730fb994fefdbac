"""Wall time: where the time of a run went, added up so that nothing is left over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from replicax.system.process_age import process_age
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase

LOST = "lost work"

_MEANINGS = {
    "start": "before the loop: Python, imports, building the model",
    "restoring": "reading the checkpoint",
    "compile": "calls that trace or compile the step",
    "input": "waiting for the dataset",
    "steps": "running steps, and waiting for their values",
    "evaluation": "evaluation, its own compilation too",
    "saving": "waiting for checkpoints to be copied or written",
    "logging": "fetching, writing and showing numbers",
    "callbacks": "your callbacks",
    LOST: "done by earlier attempts after the checkpoint",
}

KINDS_OF_WORK = tuple(kind for kind in _MEANINGS if kind != LOST)
"""What time is spent on, in the order of the table. Lost work is added to it by :mod:`replicax.loop.attempt_times`."""

_PHASES = {kind: Phase[kind.upper()] for kind in KINDS_OF_WORK}


class WallTime:
    """A clock that always runs for one kind of work: the kinds' times add up to the wall time by construction.

    The first kind, ``"start"``, began at ``began``, or begins now.

    >>> times = iter([0.0, 2.0, 2.5, 6.0])
    >>> wall = WallTime(clock=lambda: next(times))
    >>> wall.switch("input"), wall.switch("steps")
    ('start', 'input')
    >>> wall.stop()
    >>> {kind: seconds for kind, seconds in wall.seconds.items() if seconds}
    {'start': 2.0, 'input': 0.5, 'steps': 3.5}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, began: float | None = None) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(KINDS_OF_WORK, 0.0)
        self._kind = "start"
        self._since = clock() if began is None else began
        self._stopped = False

    def switch(self, kind: str) -> str:
        """Count the time from now on as spent on ``kind``; returns the kind until now."""
        now = self._clock()
        before = self._kind
        self._seconds[before] += now - self._since
        self._since, self._kind = now, kind
        if not self._stopped:
            heartbeat.switch(_PHASES[kind])
        return before

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Count the time of a ``with`` block as spent on ``kind``."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def count_as(self, kind: str) -> None:
        """Count the time since the last switch as spent on ``kind`` after all."""
        now = self._clock()
        self._seconds[kind] += now - self._since
        self._since = now

    def stop(self) -> None:
        """Stop the clock, at the end of the run."""
        if not self._stopped:
            self.switch(self._kind)
            moment = self._since
            self._clock = lambda: moment
            self._stopped = True
            heartbeat.switch(Phase.START)  # there are no more steps to wait for

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each kind of work, until now."""
        self.switch(self._kind)
        return dict(self._seconds)

    @property
    def training(self) -> float:
        """The seconds until now that steps have taken, and what they have waited for."""
        self.switch(self._kind)
        return self._seconds["input"] + self._seconds["steps"]


# --- the table ------------------------------------------------------------------------------------------


def table(seconds: Mapping[str, float], attempts: int = 1) -> str:
    """Return the table that is printed at the end of a run.

    >>> print(table({"start": 1.0, "steps": 6.5, "saving": 0.0, "lost work": 2.5}, attempts=2))
    wall time of 2 attempts
      start            1.0 s   10.0%  before the loop: Python, imports, building the model
      steps            6.5 s   65.0%  running steps, and waiting for their values
      lost work        2.5 s   25.0%  done by earlier attempts after the checkpoint
      total           10.0 s
    """
    total = sum(seconds.values())
    lines = [f"wall time of {attempts} attempts" if attempts > 1 else "wall time"]
    for kind, spent in seconds.items():
        if spent >= 0.05:
            lines.append(f"  {kind:10} {spent:9.1f} s  {spent / total:6.1%}  {_MEANINGS[kind]}")
    lines.append(f"  {'total':10} {total:9.1f} s")
    return "\n".join(lines)


# --- the start of the process ---------------------------------------------------------------------------

_has_run = False


def since_process_start() -> float:
    """Return the seconds since this process began; 0 at later calls, and where that is not known.

    A second run of a process did not wait for its start, and neither did one that is started at a prompt.
    """
    global _has_run
    is_first, _has_run = not _has_run, True
    return process_age() if is_first and not hasattr(sys, "ps1") else 0.0
