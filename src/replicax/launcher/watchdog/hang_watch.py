"""Finds workers that hang: reads the status of each from its page and the kernel, judges all, and asks for stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import glob
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax.launcher.watchdog.stragglers import StragglerWatch
from replicax.workers.heartbeat_page import FOREVER, LONG, UNKNOWN, VARIABLE, HeartbeatPage, Phase

STACKS = 1.0
"""How many seconds workers have to print their stacks."""
NOTICE = 6.0
"""After how many times the timeout a worker that computes but makes no step is reported."""
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
        found, where = self._condition(phase, state), self._where(phase)
        return WorkerStatus(self._worker, *found, page.launched, bool(page.in_callback), where)

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
        tasks = f"{self.page.pid}/task"
        threads = set(glob.glob(f"{tasks}/*", root_dir="/proc")) - {f"{tasks}/{self.page.timer}"}
        return any(_process(thread)[0] in ("R", "D") for thread in threads)


def _process(path: int | str) -> tuple[str, float]:
    """The kernel's letter for the state of a process or thread, ``"pid/task/thread"``, and its processor seconds."""
    try:
        fields = Path(f"/proc/{path}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):  # it is gone
        return "", 0.0


@dataclasses.dataclass(frozen=True)
class Hang:
    """Workers that hang, all for the same reason."""

    workers: Sequence[WorkerStatus]  # messages name the first
    why: str
    is_certain: bool = True  # whether each is known to be at fault; otherwise all wait, and the cause is unknown


def find_hang(statuses: Sequence[WorkerStatus], timeout: float) -> Hang | None:
    """Find the workers that hang, if any, from the statuses of those that have not ended.

    A stopped process hangs whatever others do. In all other conditions a worker may wait for another one in a way that
    the launcher can't see. So no worker is judged as long as another one makes progress or has a reason not to, unless
    that takes very long. A worker that computes in Python has that long, too: it may be in an endless loop, or do work
    that it has not announced.
    """
    found = {condition: [s for s in statuses if s.condition is condition] for condition in Condition}
    overdue = {condition: [s for s in those if s.is_overdue] for condition, those in found.items()}
    if stopped := overdue[Condition.STOPPED]:
        return Hang(stopped, "its process is stopped (SIGSTOP)")
    inside, idle, computing = found[Condition.PROGRAM], overdue[Condition.HOST], overdue[Condition.COMPUTING]
    if computing and inside and len(computing) + len(inside) == len(statuses):
        return Hang(computing, "its Python computes, and makes no step for which the others wait")
    have_reasons = len(statuses) > len(idle) + len(inside) + len(found[Condition.ABSENT])
    if idle:
        # Workers inside a program most probably wait for them, even if the duration of the program is unknown.
        if have_reasons or any(status.seconds < timeout / 2 for status in inside):
            idle = [status for status in idle if status.seconds >= LONG * timeout]
        return Hang(idle, "it neither runs a step nor uses its processor") if idle else None
    if have_reasons or not inside or not all(status.is_overdue for status in inside):
        return None
    called = [status for status in inside if status.in_callback]
    if called and (len(called) < len(inside) or len(inside) == 1):
        return Hang(called, "its program has called Python on the host, which does not return")
    why = "its program does not come to its end"
    late = [status for status in inside if status.launched == min(other.launched for other in inside)]
    if len(late) < len(inside):
        return Hang(late, f"{why}, and it is behind the others")
    return Hang(inside, why, is_certain=len(inside) == 1)


class HangWatch:
    """The watch of an attempt; with a ``timeout`` of 0 it only tells which worker's Python has ended first."""

    def __init__(self, timeout: float, is_alone: bool, say: Callable[[str], None]) -> None:
        self._timeout, self._is_alone, self._say = timeout, is_alone, say
        self._monitors: dict[int, WorkerMonitor] = {}
        self._noticed: set[int] = set()
        self._stragglers = StragglerWatch()

    def variables(self, worker: int) -> dict[str, str]:
        """Return variables for the environment of a worker that is about to start."""
        page = HeartbeatPage.new()
        self._monitors[worker] = WorkerMonitor(worker, page, self._timeout, self._is_alone)
        return {VARIABLE: page.path}

    def look(self, processes: Mapping[int, int]) -> Hang | None:
        """Find workers that hang, among those that have not ended, with these processes; call it regularly."""
        if not self._timeout:
            return None
        now = time.monotonic()
        statuses = [self._monitors[worker].look(now, process) for worker, process in processes.items()]
        for status in statuses:
            if status.condition is not Condition.COMPUTING or status.seconds < NOTICE * self._timeout:
                self._noticed.discard(status.worker)
            elif status.worker not in self._noticed:
                self._noticed.add(status.worker)
                self._say(
                    f"worker {status.worker} has been computing for {status.seconds:.0f} s {status.where}, and has not "
                    "made another step; if all others wait for it, the launcher treats it as hung after "
                    f"{LONG * self._timeout:.0f} s. If that is right, compute in `with replicax.paused():`"
                )
        if slow := self._stragglers.look({worker: self._monitors[worker].page.usage for worker in processes}, now):
            self._say(slow)
        return find_hang(statuses, self._timeout)

    def ended(self, worker: int) -> float:
        """Return when the Python of a worker told the others that it ends; 0 if it has not."""
        return self._monitors[worker].page.ended

    def ask_for_stacks(self, hang: Hang) -> float:
        """Make the workers that hang print their stacks; returns for how many seconds to wait for that."""
        asked = 0
        for status in hang.workers:
            page = self._monitors[status.worker].page
            if status.condition is not Condition.STOPPED and page.pid and page.signal:
                with contextlib.suppress(OSError):
                    os.kill(page.pid, page.signal)
                    asked += 1
        return STACKS if asked else 0.0
