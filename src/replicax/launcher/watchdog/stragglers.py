"""Stragglers: workers for which all others wait, step after step.

Workers communicate in each step, so all take equally long for it. What each has measured
(:mod:`replicax.workers.step_timer`) shows how much longer one of them takes alone: the devices of a slow host are idle
between two steps for as long as the others wait for it, and on CPUs the processors of a worker that computes more work
for longer.

On a busy machine any worker may be very late for a moment. So a worker is named only if it is late without its worst
steps, too. Input that comes in bursts looks the same, one late step and then many in time, so it is judged over a
longer time.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from replicax.workers.heartbeat_page import StepRecord

SLOW = 1.4
"""A worker is named from this ratio to the others' time on: 1.5, less a margin, as some steps in the window may not be
slow yet."""
SURELY_SLOW = 1.2
"""And if it takes at least so many times as long without its worst steps."""
KEEPS_UP = 1.2
"""It keeps up again below this."""
LEAST = 2e-3
"""Seconds of a step that are too short to name a worker."""
LEAST_COMPUTED = 20e-3
"""The same for computing: in a short step much of it keeps workers connected, most of all the chief."""
QUICK = 15e-3
"""Shorter steps are judged over a longer time: a moment has many of them."""
KEPT = 400
"""How many steps of a worker are kept."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps to judge.

    Attributes:
      steps: at least so many.
      seconds: and those of so many seconds.
      worst: the part of a worker's steps, the worst, that may be late by chance.
      of_quick: whether the window is for short steps, rather than for all others.
    """

    steps: int
    seconds: float
    worst: float
    of_quick: bool = False

    def of(self, steps: Sequence[StepRecord], period: float, now: float) -> list[StepRecord]:
        """The steps of a worker in this window; none if most of them are missing."""
        since = now - max(self.steps * period, self.seconds)
        found = [step for step in steps if step.at >= since]
        return found if len(found) >= 0.7 * self.steps else []


WINDOWS = (Window(14, 0.5, 1 / 4), Window(100, 5.0, 1 / 20), Window(14, 3.0, 1 / 2, of_quick=True))
CALM = 3.0
"""After how many seconds without a slow step a worker keeps up again."""


@dataclasses.dataclass(frozen=True)
class Lag:
    """How much longer a worker takes than the others.

    Attributes:
      worker: its number.
      ratio: how many times as long it takes.
      sure: the same without its worst steps.
      on_host: how many seconds longer, between two steps.
      for_input: how many of these it waits for input.
      computing: how many seconds longer, inside a step.
    """

    worker: int
    ratio: float
    sure: float
    on_host: float
    for_input: float
    computing: float

    @property
    def is_slow(self) -> bool:
        """Whether to name the worker."""
        return self.ratio >= SLOW and self.sure >= SURELY_SLOW

    def __str__(self) -> str:
        if self.on_host >= self.computing:
            what = "waiting for its input" if self.for_input > self.on_host / 2 else "on its host, between two steps"
            more = f"{self.on_host:.3g} s more {what}"
        else:
            more = f"{self.computing:.3g} s more computing"
        return (
            f"worker {self.worker} takes {self.ratio:.1f} times as long as the others for a step: {more}; "
            "all others wait for it"
        )


def slowest(steps: Mapping[int, Sequence[StepRecord]], worst: float, are_on_cpu: bool) -> Lag:
    """The slowest of several workers.

    Args:
      steps: the last ones of each worker; at least one.
      worst: the part of a worker's steps, the worst, that may be late by chance.
      are_on_cpu: whether the processors do the devices' work.

    >>> from replicax.launcher.watchdog.stragglers import slowest
    >>> from replicax.workers.heartbeat_page import StepRecord
    >>> equal = [StepRecord(at=0.3 * i, period=0.3, gap=0.0, host=0.01, waited=0.0, computed=0.2) for i in range(14)]
    >>> slow = [step._replace(gap=0.1, host=0.11, waited=0.1) for step in equal]
    >>> print(slowest({0: equal, 1: slow, 2: equal}, worst=0.2, are_on_cpu=True))
    worker 1 takes 1.5 times as long as the others for a step: 0.1 s more waiting for its input; all others wait for it
    """
    period = statistics.median(_mean(step.period for step in own) for own in steps.values())
    lags = [
        _lag(worker, own, [other for w, other in steps.items() if w != worker], period, worst, are_on_cpu)
        for worker, own in steps.items()
    ]
    return max(lags, key=lambda lag: lag.ratio)


def _lag(
    worker: int,
    own: Sequence[StepRecord],
    others: Sequence[Sequence[StepRecord]],
    period: float,
    worst: float,
    are_on_cpu: bool,
) -> Lag:
    # No worker waits for a host that is ahead of its devices, however long it takes; and a worker that comes last but
    # takes no longer than the others is not slow.
    theirs = statistics.median(_mean(step.host for step in other) for other in others)
    gap = _mean(step.gap for step in own)
    on_host = max(0.0, min(gap, _mean(step.host for step in own) - theirs))
    kept = max(1, len(own) - round(worst * len(own) + 0.5))
    best_gaps, best_hosts = sorted(step.gap for step in own)[:kept], sorted(step.host for step in own)[:kept]
    surely = max(0.0, min(sum(best_gaps), sum(best_hosts) - kept * theirs)) / kept
    waited = statistics.median(_mean(step.waited for step in other) for other in others)
    for_input = max(0.0, _mean(step.waited for step in own) - waited)
    computing = 0.0
    inside = max(0.0, period - gap)
    least, _ = _quartiles([step.computed for step in own])
    # Where the processors do little for a step, the step is not computed by them.
    if are_on_cpu and least >= inside / 3:
        most = statistics.median(_quartiles([step.computed for step in other])[1] for other in others)
        computing = inside * max(0.0, 1.0 - most / least) if least > 0 else 0.0
        computing = computing if computing >= LEAST_COMPUTED else 0.0
    more = on_host + computing
    if more < LEAST:
        return Lag(worker, 1.0, 1.0, on_host, for_input, computing)
    return Lag(worker, _times(period, more), _times(period, surely + computing), on_host, for_input, computing)


def _times(period: float, more: float) -> float:
    """The ratio of the step time to the step time without ``more`` seconds."""
    return period / max(period - more, period / 100)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    quarter = (len(ordered) - 1) // 4
    return ordered[quarter], ordered[-1 - quarter]


class StragglerWatch:
    """Names slow workers: once when found, and whenever that changes."""

    def __init__(self) -> None:
        self._steps: dict[int, collections.deque[StepRecord]] = {}
        self._named: int | None = None
        self._seen_in: Window | None = None
        self._slow_at = 0.0

    def look(self, new: Mapping[int, Sequence[StepRecord]], are_on_cpu: bool) -> str | None:
        """The message for the user, if there is one.

        Args:
          new: the steps of all workers that train, since the last look.
          are_on_cpu: whether the processors do the devices' work.
        """
        for worker, steps in new.items():
            self._steps.setdefault(worker, collections.deque(maxlen=KEPT)).extend(steps)
        for worker in set(self._steps) - set(new):
            del self._steps[worker]
        if len(new) < 2 or not any(new.values()) or not all(self._steps[worker] for worker in new):
            return None
        now = min(steps[-1].at for steps in self._steps.values())  # the steps of all workers are known until then
        for window in WINDOWS:
            lag = self._slowest(window, now, are_on_cpu)
            if lag is not None and lag.is_slow and (lag.worker != self._named or window is self._seen_in):
                self._slow_at, before = now, self._named
                self._named, self._seen_in = lag.worker, window
                return None if before == lag.worker else str(lag)
            if lag is not None and lag.ratio < KEEPS_UP and window is self._seen_in:
                return self._keeps_up(now)
        return None

    def _keeps_up(self, now: float) -> str | None:
        if self._named is None or now - self._slow_at < CALM:
            return None
        before, self._named = self._named, None
        for steps in self._steps.values():
            steps.clear()  # the slow ones are over
        return f"worker {before} keeps up with the others again"

    def _slowest(self, window: Window, now: float, are_on_cpu: bool) -> Lag | None:
        """The slowest worker in a window; ``None`` if there are too few steps."""
        periods = [statistics.median(step.period for step in list(own)[-9:]) for own in self._steps.values()]
        period = statistics.median(periods)
        if (period < QUICK) is not window.of_quick:
            return None
        steps = {w: window.of(own, period, now) for w, own in self._steps.items()}
        return slowest(steps, window.worst, are_on_cpu) if all(steps.values()) else None
