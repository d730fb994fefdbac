"""Stragglers: workers for which all others wait, step after step.

Workers communicate in each step, so all take equally long for it. What each has measured
(:mod:`replicax.workers.step_timer`) shows how much longer one of them takes alone: the devices of a slow host are idle
between two steps for as long as the others wait for it, and on CPUs the processors of a worker that computes more work
for longer.

On a busy machine any worker may be very late for a moment. So a worker is named only if it is late even without its
worst moments. Input in bursts, where many steps on time follow a late one, looks like such moments, and is judged over
a longer time.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from replicax.workers.heartbeat_page import Usage

SLOW = 1.4
"""A worker is named from this ratio to the others' time on: 1.5, less a margin, as it may not have been slow for the
whole time."""
SURELY_SLOW = 1.2
"""And if it takes at least so many times as long without its worst moments."""
KEEPS_UP = 1.2
"""It keeps up again below this."""
CALM = 3.0
"""And after so many seconds."""
LEAST = 2e-3
"""Seconds of a step that are too short to name a worker."""
LEAST_COMPUTED = 20e-3
"""The same for computing: in a short step much of it keeps workers connected, most of all the chief."""
MOMENT_STEPS, MOMENT_SECONDS = 2, 0.2
"""A moment has at least so many steps, and takes so many seconds."""
WINDOWS = ((6, 2), (20, 1))
"""How many moments to judge, and how many of them, a worker's worst, may be late by chance."""


@dataclasses.dataclass(frozen=True)
class Lag:
    """How many seconds longer than the others a worker takes for a step."""

    period: float  # the seconds of the step
    on_host: float  # between two steps
    for_input: float  # of these, waiting for input
    computing: float  # inside a step

    @property
    def more(self) -> float:
        return self.on_host + self.computing

    @property
    def ratio(self) -> float:
        """How many times as long as the others it takes."""
        return self.period / max(self.period - self.more, self.period / 100)

    def __str__(self) -> str:
        if self.on_host < self.computing:
            return f"{self.computing:.3g} s more computing"
        what = "waiting for its input" if self.for_input > self.on_host / 2 else "on its host, between two steps"
        return f"{self.on_host:.3g} s more {what}"


NO_LAG = Lag(1.0, 0.0, 0.0, 0.0)


def lag_of(own: Usage, others: Sequence[Usage]) -> Lag:
    """How much longer a worker took than the others, per step.

    >>> from replicax.launcher.watchdog.stragglers import lag_of
    >>> from replicax.workers.heartbeat_page import Usage
    >>> equal = Usage(steps=10, sampled=3.0, idle=0.0, host=0.1, input=0.0, computed=2.0)
    >>> slow = equal._replace(idle=1.0, host=1.1, input=1.0)
    >>> lag = lag_of(slow, [equal, equal])
    >>> print(round(lag.ratio, 3), lag)
    1.5 0.1 s more waiting for its input
    """
    steps, sampled = own.steps, own.sampled

    def theirs(kind: str) -> float:
        """The others' seconds for something, in so many as this worker's."""
        return sampled * statistics.median(getattr(other, kind) / other.sampled for other in others)

    # No worker waits for a host that is ahead of its devices, however long it takes; and a worker that comes last but
    # takes no longer than the others is not slow.
    on_host = max(0.0, min(own.idle, own.host - theirs("host")))
    computing, inside = 0.0, sampled - own.idle
    # Where the processors do little for a step, the step is not computed by them.
    if own.computed >= inside / 3 > 0.0:
        computing = inside * max(0.0, 1.0 - theirs("computed") / own.computed)
    for_input = max(0.0, own.input - theirs("input"))
    return Lag(sampled / steps, on_host / steps, for_input / steps, computing / steps)


def _mean(lags: Sequence[Lag]) -> Lag:
    """Of the lags of several moments; each counts as much as its step takes."""
    lag = Lag(*(statistics.fmean(getattr(lag, field.name) for lag in lags) for field in dataclasses.fields(Lag)))
    computing = lag.computing if lag.computing >= LEAST_COMPUTED else 0.0
    return dataclasses.replace(lag, computing=computing) if lag.on_host + computing >= LEAST else NO_LAG


class StragglerWatch:
    """Names slow workers: once when found, and whenever that changes."""

    def __init__(self) -> None:
        self._last: Mapping[int, Usage] = {}
        self._moments: collections.deque[dict[int, Lag]] = collections.deque(maxlen=max(WINDOWS)[0])
        self._named: int | None = None
        self._seen_in = WINDOWS[0]
        self._slow_at = 0.0

    def look(self, usages: Mapping[int, Usage], now: float) -> str | None:
        """The message for the user, if there is one; given what all workers that train have spent their time on."""
        if usages.keys() != self._last.keys():
            self._last = usages
            self._moments.clear()
        moment = {
            worker: Usage(*(b - a for a, b in zip(self._last[worker], usage, strict=True)))
            for worker, usage in usages.items()
        }
        if len(moment) < 2 or any(u.steps < MOMENT_STEPS or u.sampled < MOMENT_SECONDS for u in moment.values()):
            return None
        self._last = usages
        self._moments.append({w: lag_of(u, [o for v, o in moment.items() if v != w]) for w, u in moment.items()})
        for window in WINDOWS:
            count, worst = window
            if len(self._moments) < count:
                continue
            lags = {w: [lags[w] for lags in list(self._moments)[-count:]] for w in moment}
            worker, lag = max(((w, _mean(own)) for w, own in lags.items()), key=lambda entry: entry[1].ratio)
            sure = _mean(sorted(lags[worker], key=lambda lag: lag.more)[: count - worst])
            is_slow = lag.ratio >= SLOW and sure.ratio >= SURELY_SLOW
            if is_slow and (worker != self._named or window == self._seen_in):
                before, self._named = self._named, worker
                self._slow_at, self._seen_in = now, window
                if before == worker:
                    return None
                return (
                    f"worker {worker} takes {lag.ratio:.1f} times as long as the others for a step: {lag}; "
                    "all others wait for it"
                )
            is_calm = lag.ratio < KEEPS_UP and now - self._slow_at >= CALM
            if self._named is not None and is_calm and window == self._seen_in:
                before, self._named = self._named, None
                self._moments.clear()  # the slow ones are over
                return f"worker {before} keeps up with the others again"
        return None
