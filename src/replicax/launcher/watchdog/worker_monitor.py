"""The status of a worker as the launcher sees it from outside, and for how long it has lasted."""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from pathlib import Path

from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage, StepRecord

ARMED = 5
"""A worker is judged after so many calls of one program. Programs before its first step run once."""
STEPS_PATIENCE = 5.0
"""How many times as long as usual a step may take."""
LONG_PATIENCE = 30.0
"""How many times the timeout a worker has for work that is known to take long, if none of its threads computes."""
LONGEST_GAP = 1.0
"""Seconds between two looks that count, at most: what held up the launcher may have held up the workers, or the
launcher itself may have."""
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
_LONG = frozenset({page.COMPILE, page.INPUT, page.EVALUATION, page.SAVING, page.RESTORING, page.EXACT})


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
    """The status of a worker at one time.

    Attributes:
      worker: its number.
      condition: what it seems to do.
      seconds: for how long it has shown no progress.
      limit: for how long it may, in this condition.
      launched: how many programs it has launched.
      finished: how many of them have ended, as far as it knows.
      in_callback: whether it is in Python that its program called.
      phase: the phase that it reports.
      where: after which step, and in which program, in words.
      computes: for how many seconds it has been computing without progress.
    """

    worker: int
    condition: Condition
    seconds: float = 0.0
    limit: float = 0.0
    launched: int = 0
    finished: int = 0
    in_callback: bool = False
    phase: int = page.START
    where: str = ""
    computes: float = 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether it has shown no progress for longer than it may."""
        return self.seconds >= self.limit


class WorkerMonitor:
    """Monitors one worker.

    Args:
      worker: its number.
      its_page: the page that it writes into.
      timeout: for how many seconds it may show no progress, at least.
      margin: how many seconds before its end a limit counts as over, because the next look may be late.

    Attributes:
      process: the id of the process that was started; 0 before.
    """

    def __init__(self, worker: int, its_page: HeartbeatPage, timeout: float, margin: float) -> None:
        self._worker, self._page, self._timeout, self._margin = worker, its_page, timeout, margin
        self.process = 0
        self._looked_at = time.monotonic()
        self._progress: tuple[float, ...] = ()
        self._tick = 0.0
        self._steps = 0  # how many recorded steps have been read
        self._cpu: tuple[float, float] | None = None
        self._still = self._stopped = self._mute = self._silent = self._idle = self._lazy = self._computing = 0.0
        self._forgiven = 0.0

    @property
    def pid(self) -> int:
        """The process that claimed the page; 0 if none has."""
        return self._page.numbers[page.PID]

    @property
    def signal(self) -> int:
        """The signal that makes it print its stacks; 0 if there is none."""
        return self._page.numbers[page.SIGNAL]

    @property
    def is_on_cpu(self) -> bool:
        """Whether its devices are the processors."""
        return bool(self._page.numbers[page.ON_CPU])

    def new_steps(self) -> list[StepRecord]:
        """The steps that it has recorded since the last call."""
        steps, self._steps = self._page.recorded(self._steps)
        return steps

    def look(self, now: float) -> WorkerStatus:
        """Read its status at ``now``."""
        gap = min(now - self._looked_at, LONGEST_GAP)
        self._looked_at = now
        numbers, seconds = self._page.numbers, self._page.seconds
        if not numbers[page.PID]:  # it has not imported Replicax yet, or never will
            self._stopped = self._stopped + gap if self.process and _state(self.process) == "T" else 0.0
            if self._stopped:
                limit = self._timeout - self._margin
                return WorkerStatus(
                    self._worker, Condition.STOPPED, self._stopped, limit, where=page.PHASES[page.START]
                )
            return WorkerStatus(self._worker, Condition.UNKNOWN)
        state = _state(self.pid)
        if state in ("", "Z", "X", "t"):  # it is gone, or a debugger holds it
            self._still = self._stopped = self._mute = self._silent = self._idle = self._lazy = 0.0
            return WorkerStatus(self._worker, Condition.UNKNOWN if state != "t" else Condition.BUSY)
        self._count(now, gap, state)
        launched, finished, phase = numbers[page.LAUNCHED], numbers[page.FINISHED], numbers[page.PHASE]
        condition, since, limit = self._condition(launched, finished, phase, seconds[page.EXPECTED])
        return WorkerStatus(
            self._worker,
            condition,
            since,
            limit - self._margin,
            launched,
            finished,
            bool(numbers[page.CALLBACK]),
            phase,
            self._where(launched, finished, phase),
            self._computing if condition is Condition.BUSY and phase == page.STEPS else 0.0,
        )

    def _count(self, now: float, gap: float, state: str) -> None:
        """Add ``gap`` to the times without progress, or reset them."""
        numbers, seconds = self._page.numbers, self._page.seconds
        self._stopped = self._stopped + gap if state == "T" else 0.0
        usage = self._usage(gap)
        of_thread, of_process = usage or (0.0, 0.0)
        if usage and of_process < 1.0 and self._forgiven < MOST_FORGIVEN * self._timeout and _could_go_on(self.pid):
            counts = gap * max(of_process, LEAST_SHARE)
            self._forgiven += gap - counts
            gap = counts
        last = max(seconds[page.PROGRESS], seconds[page.FINISHED_AT])
        progress = (last, numbers[page.LAUNCHED], numbers[page.FINISHED], numbers[page.PHASE])
        if progress != self._progress:
            self._progress = progress
            self._still = self._idle = self._lazy = max(0.0, min(gap, now - last))
            self._computing = self._forgiven = 0.0
        else:
            self._still += gap
            self._idle += gap
            self._lazy += gap
        tick = seconds[page.TICK]
        self._silent = self._silent + gap if tick == self._tick else 0.0
        self._mute = self._mute + gap if self._silent else 0.0
        self._tick = tick
        if of_thread >= COMPUTES:
            self._idle = 0.0
            self._computing += gap
        if of_process >= WORKS:
            self._mute = self._lazy = 0.0

    def _usage(self, gap: float) -> tuple[float, float] | None:
        """Processor use of its thread and of its process since the last look; ``None`` if that is not known."""
        before, self._cpu = self._cpu, None
        if self._still < min(LONGEST_GAP, self._timeout / 4) and not self._mute:
            return None
        self._cpu = _processor_seconds(self.pid, self._page.numbers[page.THREAD])
        if before is None or not gap:
            return None
        of_thread, of_process = ((a - b) / gap for a, b in zip(self._cpu, before, strict=True))
        return of_thread, of_process

    def _condition(self, launched: int, finished: int, phase: int, expected: float) -> tuple[Condition, float, float]:
        """What it seems to do, for how long already, and for how long it may."""
        usual = max(self._timeout, STEPS_PATIENCE * self._page.seconds[page.USUAL])
        longest = LONG_PATIENCE * self._timeout
        if self._stopped:
            return Condition.STOPPED, self._stopped, usual
        if phase == page.END:
            return Condition.ENDED, 0.0, 0.0
        if phase in (page.START, page.PAUSED) or self._page.numbers[page.CALLS] < ARMED:
            return Condition.BUSY, 0.0, longest
        if self._mute >= usual - self._margin:
            return Condition.MUTE, self._mute, usual
        if self._silent >= longest:  # a thread that computes holds Python's lock
            return Condition.MUTE, self._silent, longest
        if phase == page.RENDEZVOUS:
            return Condition.RENDEZVOUS, self._still, longest
        # A worker that compiles is inside the launch of that program, and not in a program with a usual duration.
        if launched > finished and phase != page.COMPILE and not self._mute:
            limit = longest if expected == page.UNKNOWN else max(self._timeout, STEPS_PATIENCE * expected)
            return Condition.WAITING, self._still, limit
        if phase in _LONG:
            is_over = self._lazy >= longest
            return (Condition.IDLE if is_over else Condition.BUSY), self._lazy, longest
        is_over = self._idle >= usual - self._margin
        return (Condition.IDLE if is_over else Condition.BUSY), self._idle, usual

    def _where(self, launched: int, finished: int, phase: int) -> str:
        numbers = self._page.numbers
        step, name = numbers[page.STEP], self._page.name
        if not launched:
            return page.PHASES[phase]
        place = f"after step {step:,}" if step >= 0 else f"after run {numbers[page.RUNS]:,} of {name!r}"
        if launched > finished:
            place = f"in {name!r}, " + (f"after step {step:,}" if step >= 0 else f"run {numbers[page.RUNS]:,} of it")
        return place if phase == page.STEPS else f"{page.PHASES[phase]}, {place}"


def _state(process: int | str) -> str:
    """The kernel's letter for the state of a process or of a thread, ``"pid/task/thread"``; ``""`` if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _could_go_on(pid: int) -> bool:
    """Whether a thread of a process waits for the machine: for a processor, memory or a disk."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(_state(f"{pid}/task/{thread}") in ("R", "D") for thread in threads)


def _processor_seconds(pid: int, thread: int) -> tuple[float, float]:
    """For how many seconds a thread, and its whole process, have had a processor.

    The thread's time includes the time in which it was ready to run but other threads had the processor.
    """
    of_thread = of_process = 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        of_process = (int(fields[11]) + int(fields[12])) / _TICKS
        ran, waited, *_ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        of_thread = (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError, IndexError):  # a kernel without scheduler statistics
        with_times = f"/proc/{pid}/task/{thread}/stat"
        try:
            fields = Path(with_times).read_text().rpartition(")")[2].split()
            of_thread = (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, IndexError, ValueError):
            pass
    return of_thread, of_process
