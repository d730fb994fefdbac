"""The status of a worker as the launcher sees it from outside, and for how long it has lasted."""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from pathlib import Path

from replicax.workers.heartbeat_page import UNKNOWN, HeartbeatPage, Phase

MARGIN = 0.75
"""How many seconds before its limit a worker counts as hung: the next look may be that late."""
ARMED = 5
"""A worker is judged after so many calls of one program. Programs before its first step run once."""
STEPS_PATIENCE = 5.0
"""How many times as long as usual a step may take."""
LONG_PATIENCE = 30.0
"""How many times the timeout a worker has for work that is known to take long, if none of its threads computes."""
LONGEST_GAP = 1.0
"""Seconds between two looks that count, at most: what held up the launcher may have held up the workers."""
LEAST_SHARE = 1 / LONG_PATIENCE
"""A second counts at least this much for a worker that is ready to run but gets no processor; it counts only the part
for which it had one. A healthy worker on a busy machine is slow; it does not hang."""
MOST_FORGIVEN = LONG_PATIENCE
"""How many times the timeout the uncounted seconds may be in all since the last progress: a thread can wait for a disk
for ever."""
COMPUTES = 0.1
"""A thread that uses at least this part of a processor computes. One that waits and wakes up now and then uses 1%."""
WORKS = 0.02
"""A process whose threads use at least this part of a processor works."""
_TICKS = os.sysconf("SC_CLK_TCK")
_LONG = (Phase.COMPILE, Phase.INPUT, Phase.EVALUATION, Phase.SAVING, Phase.RESTORING, Phase.EXACT)


class Condition(enum.Enum):
    """What a worker seems to do."""

    UNKNOWN = "has not reported yet"
    BUSY = "makes progress, or has a reason not to"
    RENDEZVOUS = "waits for the others, with a deadline of its own"
    ENDED = "has reached the end of its program"
    WAITING = "is inside a program"
    IDLE = "does nothing on the host, and the devices are idle"
    MUTE = "no longer runs Python"
    STOPPED = "is stopped"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker at one time."""

    worker: int
    condition: Condition
    seconds: float = 0.0  # for which it has shown no progress
    limit: float = 0.0  # for how long it may, in this condition
    launched: int = 0  # programs
    in_callback: bool = False  # whether it is in Python that its program called
    where: str = ""  # after which step, and in which program
    computes: float = 0.0  # for how many seconds, without progress

    @property
    def is_overdue(self) -> bool:
        return self.seconds >= self.limit


class WorkerMonitor:
    """Monitors a worker, which may show no progress for ``timeout`` seconds or longer.

    Its page comes without a process if it never imports Replicax; ``process`` is the one that was started.
    """

    def __init__(self, worker: int, page: HeartbeatPage, timeout: float) -> None:
        self.page, self.process = page, 0
        self._worker, self._timeout = worker, timeout
        self._margin = min(MARGIN, timeout / 4)
        self._looked_at = time.monotonic()
        self._progress: tuple[float, ...] = ()
        self._tick = 0.0
        self._cpu: tuple[float, float] | None = None
        # For how many seconds there has been no progress; nor activity of the kind that its phase has; its process has
        # been stopped; its Python has not run; nor its process computed meanwhile. And how many were not counted.
        self._still = self._quiet = self._stopped = self._silent = self._mute = self._forgiven = 0.0

    def look(self, now: float) -> WorkerStatus:
        """Read its status at ``now``."""
        gap = min(now - self._looked_at, LONGEST_GAP)
        self._looked_at = now
        pid = self.page.pid or self.process
        state = _process(pid)[0] if pid else ""
        self._stopped = self._stopped + gap if state == "T" else 0.0
        if state in ("", "Z", "X", "t"):  # it is gone, or a debugger holds it
            self._still = self._quiet = self._silent = self._mute = 0.0
        elif self.page.pid:
            self._count(now, gap)
        condition, seconds, limit = self._condition(state)
        return WorkerStatus(
            self._worker,
            condition,
            seconds,
            limit - self._margin,
            self.page.launched,
            bool(self.page.in_callback),
            self._where(),
            self._still - self._quiet if condition is Condition.BUSY and self.page.phase == Phase.STEPS else 0.0,
        )

    def _count(self, now: float, gap: float) -> None:
        """Add ``gap`` to the times without progress, or reset them."""
        page = self.page
        of_thread, of_process = self._usage(gap)
        if 0.0 <= of_process < 1.0 and self._forgiven < MOST_FORGIVEN * self._timeout and _could_go_on(page.pid):
            counts = gap * max(of_process, LEAST_SHARE)
            self._forgiven += gap - counts
            gap = counts
        last = max(page.progress, page.finished_at)
        progress = (last, page.launched, page.finished, page.phase)
        self._still, self._quiet = self._still + gap, self._quiet + gap
        if progress != self._progress:
            self._progress, self._forgiven = progress, 0.0
            self._still = self._quiet = max(0.0, min(gap, now - last))
        self._silent = self._silent + gap if page.tick == self._tick else 0.0
        self._mute = self._mute + gap if self._silent and of_process < WORKS else 0.0
        self._tick = page.tick
        if of_process >= WORKS if page.phase in _LONG else of_thread >= COMPUTES:
            self._quiet = 0.0

    def _usage(self, gap: float) -> tuple[float, float]:
        """Processor use of its thread and of its process since the last look; negative if that is not known."""
        before, self._cpu = self._cpu, None
        if self._still < min(LONGEST_GAP, self._timeout / 4) and not self._mute:
            return -1.0, -1.0
        pid = self.page.pid
        self._cpu = _process(f"{pid}/task/{self.page.thread}")[1], _process(pid)[1]
        if before is None or not gap:
            return -1.0, -1.0
        return (self._cpu[0] - before[0]) / gap, (self._cpu[1] - before[1]) / gap

    def _condition(self, state: str) -> tuple[Condition, float, float]:
        """What it seems to do, for how long already, and for how long it may."""
        page = self.page
        longest = LONG_PATIENCE * self._timeout
        usual = max(self._timeout, STEPS_PATIENCE * page.expected)
        if self._stopped:
            return Condition.STOPPED, self._stopped, usual
        if not page.pid or state in ("", "Z", "X"):  # it has not imported Replicax yet, or never will; or it is gone
            return Condition.UNKNOWN, 0.0, longest
        if page.phase == Phase.END:
            return Condition.ENDED, 0.0, longest
        if state == "t" or page.phase in (Phase.START, Phase.PAUSED) or page.calls < ARMED:
            return Condition.BUSY, 0.0, longest
        if self._mute >= usual - self._margin:
            return Condition.MUTE, self._mute, usual
        if self._silent >= longest:  # a thread that computes holds Python's lock
            return Condition.MUTE, self._silent, longest
        if page.phase == Phase.RENDEZVOUS:
            return Condition.RENDEZVOUS, self._still, longest
        # A worker that compiles is inside the launch of that program, and not in a program with a usual duration.
        if page.launched > page.finished and page.phase != Phase.COMPILE and not self._mute:
            return Condition.WAITING, self._still, longest if page.expected == UNKNOWN else usual
        limit = longest if page.phase in _LONG else usual
        is_over = self._quiet >= limit - self._margin
        return (Condition.IDLE if is_over else Condition.BUSY), self._quiet, limit

    def _where(self) -> str:
        page, phase = self.page, list(Phase)[self.page.phase]
        if not page.pid:
            return Phase.START.words
        if not page.launched:
            return phase.words
        runs = f"run {page.runs:,} of "
        place = f"after step {page.step:,}" if page.step >= 0 else f"after {runs}{page.name!r}"
        if page.launched > page.finished:
            place = f"in {page.name!r}, " + (place if page.step >= 0 else f"{runs}it")
        return place if phase is Phase.STEPS else f"{phase.words}, {place}"


def _process(path: int | str) -> tuple[str, float]:
    """The kernel's letter for the state of a process or of a thread, ``"pid/task/thread"``, and its processor seconds.

    Both are empty if it is gone.
    """
    try:
        fields = Path(f"/proc/{path}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return "", 0.0


def _could_go_on(pid: int) -> bool:
    """Whether a thread of a process waits for the machine: for a processor, memory or a disk."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(_process(f"{pid}/task/{thread}")[0] in ("R", "D") for thread in threads)
