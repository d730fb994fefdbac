"""The watch over the workers of an attempt: looks at them now and then, and makes those that hang show their stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from replicax.launcher.watchdog.stragglers import StragglerWatch
from replicax.launcher.watchdog.verdict import Hang, verdict
from replicax.launcher.watchdog.vital_signs import LONG_PATIENCE, Condition, VitalSigns, WorkerMonitor
from replicax.workers.heartbeat_page import VARIABLE, new_page, path_of

INTERVAL = 0.25
"""Seconds between two looks, at least."""
MARGIN = 0.75
"""How many seconds before its limit a worker is taken for one that hangs: the next look may come that late."""
STACKS = 1.0
"""For how many seconds workers are given to print their stacks."""
NOTICE = 6.0
"""After how many times the timeout it is said that a worker computes and makes no steps; then after twice as many."""


class HangWatch:
    """The watch; see :mod:`replicax.launcher.watchdog`.

    Args:
      timeout: for how many seconds workers may show no progress, at least; ``None`` if nobody is to watch.
      is_alone: whether all workers are on this machine.
      say: tells the user something.
    """

    def __init__(self, timeout: float | None, is_alone: bool, say: Callable[[str], None]) -> None:
        self._timeout, self._is_alone, self._say = timeout, is_alone, say
        self._monitors: dict[int, WorkerMonitor] = {}
        self._files: list[int] = []
        self._looked_at = 0.0
        self._notices: dict[int, float] = {}
        self._stragglers = StragglerWatch()

    def variables(self, worker: int) -> dict[str, str]:
        """What a worker that is about to be started needs in its environment."""
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
        """Who hangs, of the workers that have not ended; to be asked often."""
        now = time.monotonic()
        if self._timeout is None or now - self._looked_at < INTERVAL:
            return None
        self._looked_at = now
        signs = [self._monitors[worker].look(now) for worker in alive]
        for one in signs:
            self._notice(one)
        trains = [one.worker for one in signs if one.condition not in (Condition.UNKNOWN, Condition.ENDED)]
        monitors = {worker: self._monitors[worker] for worker in trains}
        are_on_cpu = all(monitor.is_on_cpu for monitor in monitors.values())
        slow = self._stragglers.look({worker: one.new_steps() for worker, one in monitors.items()}, are_on_cpu)
        if slow is not None:
            self._say(slow)
        return verdict(signs, self._timeout, self._is_alone)

    def _notice(self, signs: VitalSigns) -> None:
        assert self._timeout is not None
        after = self._notices.setdefault(signs.worker, NOTICE * self._timeout)
        if not signs.computes:
            self._notices[signs.worker] = NOTICE * self._timeout
        elif signs.computes >= after:
            self._notices[signs.worker] = 2 * after
            self._say(
                f"worker {signs.worker} has been computing for {signs.computes:.0f} s {signs.where}, and has not made "
                f"another step; it is taken for one that hangs after {LONG_PATIENCE * self._timeout:.0f} s, if all "
                "others wait for it. If that is right, compute in `with replicax.paused():`"
            )

    def ask_for_stacks(self, hang: Hang) -> float:
        """Make the workers that hang print what they are doing; for how many seconds to wait for it."""
        asked = 0
        for signs in hang.workers:
            monitor = self._monitors[signs.worker]
            if signs.condition is not Condition.STOPPED and monitor.pid and monitor.signal:
                with contextlib.suppress(OSError):
                    os.kill(monitor.pid, monitor.signal)
                    asked += 1
        return STACKS if asked else 0.0

    def close(self) -> None:
        """All workers have ended."""
        for file in self._files:
            os.close(file)
        self._files.clear()
