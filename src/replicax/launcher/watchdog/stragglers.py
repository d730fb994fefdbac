"""Stragglers: workers for which all others wait, step after step.

Workers meet in each step, so all take equally long for it. How much longer than the others one of them takes by itself
follows from what each has measured (:mod:`replicax.workers.step_samples`): the devices of a slow host have nothing to
do between two steps for as long as the others wait for it, and on CPUs the processors of one that computes more work
for longer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage

SLOW = 1.4
"""From how many times the others' time on a worker is named: 1.5, less what a measurement may be wrong by."""
KEEPS_UP = 1.2
"""And below which it keeps up again."""
LEAST = 1e-3
"""Seconds of a step that nobody is named for."""
LEAST_COMPUTED = 20e-3
"""The same for computing: of a quick step, much of it is what keeps workers connected, most of all the chief."""
SAMPLES = 5
"""How many steps must have been looked at."""
CONFIRMED = 3
"""How many times in a row the same worker must be found, each time by other steps."""
SECONDS = 3.0
"""And for how many seconds, at least: on a busy machine any worker may be late for a moment."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What a worker has measured of its steps, in seconds: medians, or a low and a high quartile.

    Attributes:
      samples: how many steps it has looked at so far.
      period: from step to step.
      waited: how much of the gap it waits for its input.
      wanted: for how long the threads of the devices work on a step, or would, had they the processors.
      gap: for how long its devices have nothing to do in between.
      computed: for how long processors work on a step.
      is_on_cpu: whether the devices are these processors.
    """

    samples: int
    period: float
    waited: float
    wanted: float
    gap: tuple[float, float]
    computed: tuple[float, float]
    is_on_cpu: bool

    @classmethod
    def of(cls, its_page: HeartbeatPage) -> StepTimes:
        """What is in a page."""
        numbers, seconds = its_page.numbers, its_page.seconds
        return cls(
            numbers[page.SAMPLES],
            seconds[page.PERIOD],
            seconds[page.WAITED],
            seconds[page.WANTED],
            (seconds[page.GAP_LOW], seconds[page.GAP_HIGH]),
            (seconds[page.COMPUTED_LOW], seconds[page.COMPUTED_HIGH]),
            bool(numbers[page.ON_CPU]),
        )


@dataclasses.dataclass(frozen=True)
class Lag:
    """How much longer a worker takes than the others.

    Attributes:
      worker: which.
      ratio: how many times as long.
      on_host: by how many seconds, between two steps.
      for_input: how many of these it waits for input.
      computing: by how many seconds, inside of a step.
    """

    worker: int
    ratio: float
    on_host: float
    for_input: float
    computing: float

    def __str__(self) -> str:
        parts = []
        if self.on_host >= self.computing:
            what = "waiting for its input" if self.for_input > self.on_host / 2 else "on its host, between two steps"
            parts.append(f"{self.on_host:.3g} s more {what}")
        else:
            parts.append(f"{self.computing:.3g} s more computing")
        return (
            f"worker {self.worker} takes {self.ratio:.1f} times as long as the others for a step: {', '.join(parts)}; "
            "all others wait for it"
        )


def slowest(times: Mapping[int, StepTimes]) -> Lag:
    """The worker that takes longest, of several.

    >>> from replicax.launcher.watchdog.stragglers import StepTimes, slowest
    >>> equal = StepTimes(9, 0.3, waited=0.0, wanted=0.2, gap=(0.0, 0.0), computed=(0.2, 0.2), is_on_cpu=True)
    >>> slow = StepTimes(9, 0.3, waited=0.1, wanted=0.2, gap=(0.1, 0.1), computed=(0.2, 0.2), is_on_cpu=True)
    >>> print(slowest({0: equal, 1: slow, 2: equal}))
    worker 1 takes 1.5 times as long as the others for a step: 0.1 s more waiting for its input; all others wait for it
    """
    period = statistics.median(one.period for one in times.values())
    lags = [_lag(worker, own, [o for w, o in times.items() if w != worker], period) for worker, own in times.items()]
    return max(lags, key=lambda lag: lag.ratio)


def _lag(worker: int, own: StepTimes, others: Sequence[StepTimes], period: float) -> Lag:
    # Three quarters of its steps against three quarters of theirs: on a busy machine medians differ by chance.
    on_host = max(0.0, own.gap[0] - statistics.median(other.gap[1] for other in others))
    for_input = max(0.0, own.waited - statistics.median(other.waited for other in others))
    inside = max(0.0, period - own.gap[0])
    computing = 0.0
    # Where the processors do little for a step, it does not consist of computing.
    if own.is_on_cpu and own.computed[0] > 0 and own.wanted >= inside / 2:
        theirs = statistics.median(other.computed[1] for other in others)
        computing = inside * max(0.0, 1.0 - theirs / own.computed[0])
        computing = computing if computing >= LEAST_COMPUTED else 0.0
    more = on_host + computing
    if more < LEAST:
        return Lag(worker, 1.0, on_host, for_input, computing)
    return Lag(worker, period / max(period - more, period / 100), on_host, for_input, computing)


class StragglerWatch:
    """Says who is slow: once when it is found, and when that changes."""

    def __init__(self) -> None:
        self._named: int | None = None
        self._suspect: int | None = None
        self._since = 0.0
        self._times = 0
        self._counted: dict[int, int] = {}

    def look(self, times: Mapping[int, StepTimes], now: float) -> str | None:
        """What is to be said, given the times of all workers that train, if anything is."""
        if len(times) < 2 or any(one.samples < SAMPLES or one.period <= 0 for one in times.values()):
            return None
        counted = {worker: one.samples for worker, one in times.items()}
        if any(count < self._counted.get(worker, 0) + 2 for worker, count in counted.items()):
            return None
        self._counted = counted
        lag = slowest(times)
        found = lag.worker if lag.ratio >= SLOW else None if lag.ratio < KEEPS_UP else self._named
        if found != self._suspect or not self._times:
            self._suspect, self._since, self._times = found, now, 0
        self._times += 1
        if found == self._named or self._times < CONFIRMED or now - self._since < SECONDS:
            return None
        before, self._named = self._named, found
        return str(lag) if found is not None else f"worker {before} keeps up with the others again"
