"""Watches the workers of an attempt: looks at them regularly, finds those that hang, and makes them print stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from replicax.launcher.watchdog.stragglers import StragglerWatch
from replicax.launcher.watchdog.worker_monitor import Condition, WorkerMonitor, WorkerStatus
from replicax.workers.heartbeat_page import LONG, VARIABLE, HeartbeatPage, new_page

INTERVAL = 0.25
"""Seconds between two looks, at least."""
STACKS = 1.0
"""How many seconds workers have to print their stacks."""
NOTICE = 6.0
"""After how many times the timeout a worker that computes but makes no step is reported."""


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

    def those(condition: Condition) -> list[WorkerStatus]:
        return [status for status in statuses if status.condition is condition]

    def overdue(condition: Condition) -> list[WorkerStatus]:
        return [status for status in those(condition) if status.is_overdue]

    if stopped := overdue(Condition.STOPPED):
        return Hang(stopped, "its process is stopped (SIGSTOP)")
    inside, idle, computing = those(Condition.PROGRAM), overdue(Condition.HOST), overdue(Condition.COMPUTING)
    if computing and inside and len(computing) + len(inside) == len(statuses):
        return Hang(computing, "its Python computes, and makes no step for which the others wait")
    have_reasons = len(statuses) > len(idle) + len(inside) + len(those(Condition.ABSENT))
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
    behind = min(status.launched for status in inside)
    late = [status for status in inside if status.launched == behind]
    if len(late) < len(inside):
        return Hang(late, f"{why}, and it is behind the others")
    return Hang(inside, why, is_certain=len(inside) == 1)


class HangWatch:
    """The watch of an attempt; a ``timeout`` of ``None`` turns it off."""

    def __init__(self, timeout: float | None, is_alone: bool, say: Callable[[str], None]) -> None:
        self._timeout, self._is_alone, self._say = timeout, is_alone, say
        self._monitors: dict[int, WorkerMonitor] = {}
        self._files: list[int] = []
        self._looked_at = 0.0
        self._noticed: set[int] = set()
        self._stragglers = StragglerWatch()

    def variables(self, worker: int) -> dict[str, str]:
        """Return variables for the environment of a worker that is about to start."""
        if self._timeout is None:
            return {}
        file, path = new_page()
        self._files.append(file)
        self._monitors[worker] = WorkerMonitor(worker, HeartbeatPage.at(path), self._timeout, self._is_alone)
        return {VARIABLE: path}

    def look(self, processes: Mapping[int, int]) -> Hang | None:
        """Find workers that hang, among those that have not ended, with these processes; call it often."""
        now = time.monotonic()
        if self._timeout is None or now - self._looked_at < INTERVAL:
            return None
        self._looked_at = now
        statuses = [self._monitors[worker].look(now, process) for worker, process in processes.items()]
        for status in statuses:
            self._notice(status, self._timeout)
        if slow := self._stragglers.look({worker: self._monitors[worker].page.usage for worker in processes}, now):
            self._say(slow)
        return find_hang(statuses, self._timeout)

    def _notice(self, status: WorkerStatus, timeout: float) -> None:
        if status.condition is not Condition.COMPUTING or status.seconds < NOTICE * timeout:
            self._noticed.discard(status.worker)
        elif status.worker not in self._noticed:
            self._noticed.add(status.worker)
            self._say(
                f"worker {status.worker} has been computing for {status.seconds:.0f} s {status.where}, and has not "
                "made another step; if all others wait for it, the launcher treats it as hung after "
                f"{LONG * timeout:.0f} s. If that is right, compute in `with replicax.paused():`"
            )

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

    def close(self) -> None:
        """Free the pages, after the end of all workers."""
        for file in self._files:
            os.close(file)
        self._files.clear()
