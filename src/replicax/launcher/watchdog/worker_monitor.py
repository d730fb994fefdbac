"""The status of a worker as the launcher sees it from outside, and for how long it has lasted."""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from pathlib import Path

from replicax.workers.heartbeat_page import FOREVER, LONG, UNKNOWN, HeartbeatPage, Phase

STEPS_PATIENCE = 5.0
"""How many times as long as usual a step may take."""
LONGEST_GAP = 1.0
"""Seconds between two looks that count, at most: what held up the launcher may have held up the workers."""
ACTIVE = 0.05
"""A thread or process that uses at least this part of a processor is active. Waking up now and then takes 1%."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Condition(enum.Enum):
    """The state that a worker seems to be in."""

    ABSENT = "waits for the others, with a deadline of its own; or has not reported yet"
    EXCUSED = "is not expected to show progress"
    PROGRAM = "is inside a program"
    COMPUTING = "is between two steps, and may compute in Python"
    HOST = "is outside of programs"
    STOPPED = "is stopped"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker at one time."""

    worker: int
    condition: Condition
    seconds: float = 0.0  # for which it has shown no activity of the kind that its condition has
    limit: float = FOREVER  # for how long it may
    launched: int = 0  # programs
    in_callback: bool = False  # whether it is in Python that its program called
    where: str = ""  # in which phase and program

    @property
    def is_overdue(self) -> bool:
        return self.seconds >= self.limit


class WorkerMonitor:
    """Monitors a worker, which may show no progress for ``timeout`` seconds or longer.

    If there are workers on other hosts (not ``is_alone``), it may wait for one that can't be seen from here.
    """

    def __init__(self, worker: int, page: HeartbeatPage, timeout: float, is_alone: bool) -> None:
        self.page = page
        self._worker, self._timeout, self._is_alone = worker, timeout, is_alone
        self._looked_at = time.monotonic()
        self._progress: tuple[float, str] | None = None
        self._used = (0.0, 0.0)  # seconds of processors, by its process and by its thread
        # For how many seconds it has shown no progress, and no activity meanwhile; and how many were not counted.
        self._still = self._quiet = self._forgiven = 0.0

    def look(self, now: float, process: int) -> WorkerStatus:
        """Read its status at ``now``. Its page does not name the ``process`` before that imports Replicax."""
        page, phase = self.page, list(Phase)[self.page.phase]
        state, used = _process(page.pid or process)
        self._count(now, phase, state, used)
        condition, seconds, limit = self._condition(phase, state)
        where = self._where(phase)
        return WorkerStatus(self._worker, condition, seconds, limit, page.launched, bool(page.in_callback), where)

    def _count(self, now: float, phase: Phase, state: str, used: float) -> None:
        """Add the time since the last look to what has been without progress, or begin anew."""
        page = self.page
        elapsed = max(now - self._looked_at, 1e-3)
        before, self._used = self._used, (used, _process(f"{page.pid}/task/{page.thread}")[1])
        of_process, of_thread = ((b - a) / elapsed for a, b in zip(before, self._used, strict=True))
        self._looked_at, gap = now, min(elapsed, LONGEST_GAP)
        progress = (page.progress, state if state in ("T", "t") else "")  # stopped, or held by a debugger
        if progress != self._progress:
            self._progress, self._still, self._quiet, self._forgiven = progress, 0.0, 0.0, 0.0
            return
        if self._still >= self._timeout / 4 and self._forgiven < LONG * self._timeout and self._waits_for_machine():
            counts = gap * min(1.0, max(of_process, 1 / LONG))
            self._forgiven += gap - counts
            gap = counts
        is_active = (of_thread if phase.patience == 1.0 else of_process) >= ACTIVE
        self._still += gap
        self._quiet = 0.0 if is_active else self._quiet + gap

    def _condition(self, phase: Phase, state: str) -> tuple[Condition, float, float]:
        """Return what the worker seems to do, for how long already, and for how long it may."""
        page, longest = self.page, LONG * self._timeout
        usual = longest if page.expected == UNKNOWN else max(self._timeout, STEPS_PATIENCE * page.expected)
        if state == "T":
            return Condition.STOPPED, self._still, self._timeout
        if not page.pid or state in ("", "Z", "X") or phase is Phase.RENDEZVOUS:
            return Condition.ABSENT, 0.0, FOREVER
        if state == "t" or phase.patience == FOREVER:
            return Condition.EXCUSED, 0.0, FOREVER
        # A worker that compiles is inside the launch of that program, and not in a program with a usual duration.
        if page.running and phase is not Phase.COMPILE:
            return Condition.PROGRAM, self._still, usual if self._is_alone else max(usual, longest)
        limit = longest if phase.patience == LONG else usual
        if phase is Phase.STEPS and self._quiet < limit:
            return Condition.COMPUTING, self._still - self._quiet, longest
        return Condition.HOST, self._quiet, limit

    def _where(self, phase: Phase) -> str:
        page = self.page
        if not page.launched:
            return phase.words
        name = page.name.decode(errors="replace")
        place = f"{'in' if page.running else 'after'} run {page.runs:,} of {name!r}"
        return place if phase is Phase.STEPS else f"{phase.words}, {place}"

    def _waits_for_machine(self) -> bool:
        """Return whether a thread waits for a processor, memory or a disk."""
        try:
            threads = set(os.listdir(f"/proc/{self.page.pid}/task")) - {str(self.page.timer)}
        except OSError:
            return False
        return any(_process(f"{self.page.pid}/task/{thread}")[0] in ("R", "D") for thread in threads)


def _process(path: int | str) -> tuple[str, float]:
    """The kernel's letter for the state of a process or of a thread, ``"pid/task/thread"``, and its processor seconds.

    Both are empty if it is gone.
    """
    try:
        fields = Path(f"/proc/{path}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return "", 0.0
