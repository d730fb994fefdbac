"""Watches the workers of an attempt: looks at them regularly, and makes those that hang print their stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from replicax.launcher.watchdog.hang_detection import Hang, find_hang
from replicax.launcher.watchdog.stragglers import StragglerWatch
from replicax.launcher.watchdog.worker_monitor import LONG_PATIENCE, Condition, WorkerMonitor, WorkerStatus
from replicax.workers.heartbeat_page import VARIABLE, new_page, path_of

INTERVAL = 0.25
"""Seconds between two looks, at least."""
MARGIN = 0.75
"""How many seconds before its limit a worker counts as hung: the next look may be that late."""
STACKS = 1.0
"""How many seconds workers have to print their stacks."""
NOTICE = 6.0
"""After how many times the timeout a worker that computes but makes no step is reported; then after twice that."""


class HangWatch:
    """The watch; see :mod:`replicax.launcher.watchdog`.

    Args:
      timeout: for how many seconds workers may show no progress, at least; ``None`` turns the watch off.
      is_alone: whether all workers are on this machine.
      say: prints a message for the user.
    """

    def __init__(self, timeout: float | None, is_alone: bool, say: Callable[[str], None]) -> None:
        self._timeout, self._is_alone, self._say = timeout, is_alone, say
        self._monitors: dict[int, WorkerMonitor] = {}
        self._files: list[int] = []
        self._looked_at = 0.0
        self._notices: dict[int, float] = {}
        self._stragglers = StragglerWatch()

    def variables(self, worker: int) -> dict[str, str]:
        """The variables for the environment of a worker that is about to start."""
        if self._timeout is None:
            return {}
        file, page = new_page()
        self._files.append(file)
        self._monitors[worker] = WorkerMonitor(worker, page, self._timeout, min(MARGIN, self._timeout / 4))
        return {VARIABLE: path_of(file)}

    def started(self, worker: int, process: int) -> None:
        """A worker's process has been started."""
        if worker in self._monitors:
            self._monitors[worker].process = process

    def look(self, alive: Iterable[int]) -> Hang | None:
        """Find workers that hang, among those that have not ended; call it often."""
        now = time.monotonic()
        if self._timeout is None or now - self._looked_at < INTERVAL:
            return None
        self._looked_at = now
        statuses = [self._monitors[worker].look(now) for worker in alive]
        for status in statuses:
            self._notice(status)
        trains = [one.worker for one in statuses if one.condition not in (Condition.UNKNOWN, Condition.ENDED)]
        monitors = {worker: self._monitors[worker] for worker in trains}
        are_on_cpu = all(monitor.is_on_cpu for monitor in monitors.values())
        slow = self._stragglers.look({worker: one.new_steps() for worker, one in monitors.items()}, are_on_cpu)
        if slow is not None:
            self._say(slow)
        return find_hang(statuses, self._timeout, self._is_alone)

    def _notice(self, status: WorkerStatus) -> None:
        assert self._timeout is not None
        after = self._notices.setdefault(status.worker, NOTICE * self._timeout)
        if not status.computes:
            self._notices[status.worker] = NOTICE * self._timeout
        elif status.computes >= after:
            self._notices[status.worker] = 2 * after
            self._say(
                f"worker {status.worker} has been computing for {status.computes:.0f} s {status.where}, and has not "
                "made another step; if all others wait for it, the launcher treats it as hung after "
                f"{LONG_PATIENCE * self._timeout:.0f} s. If that is right, compute in `with replicax.paused():`"
            )

    def ask_for_stacks(self, hang: Hang) -> float:
        """Make the workers that hang print their stacks; returns for how many seconds to wait for that."""
        asked = 0
        for status in hang.workers:
            monitor = self._monitors[status.worker]
            if status.condition is not Condition.STOPPED and monitor.pid and monitor.signal:
                with contextlib.suppress(OSError):
                    os.kill(monitor.pid, monitor.signal)
                    asked += 1
        return STACKS if asked else 0.0

    def close(self) -> None:
        """Free the pages, after the end of all workers."""
        for file in self._files:
            os.close(file)
        self._files.clear()
