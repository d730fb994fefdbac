"""Stragglers: workers for which all others wait, step after step.

Workers communicate in each step, so all take equally long for it. What each has measured
(:mod:`replicax.workers.heartbeat`) shows how much longer one of them takes alone: the devices of a slow host are idle
between two steps for as long as the others wait for it, and on CPUs the processors of a worker that computes more work
for longer.

On a busy machine any worker may be very late for a moment. So a worker is named only if it is late in each third of a
window. Input in bursts, where many steps on time follow a late one, is late in each third of a longer window.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Mapping

from replicax.workers.heartbeat_page import Usage

SLOW, SURELY_SLOW = 1.4, 1.2
"""A worker is named if it takes so many times as long as the others in a window, and so many times in each third of it:
1.5, less a margin, as it may not have been slow for the whole time."""
CALM = 3.0
"""It keeps up again if it has not been slow for so many seconds."""
LEAST, LEAST_COMPUTED = 2e-3, 20e-3
"""Seconds of a step that are too few to name a worker, and of computing: in a short step much of it keeps workers
connected, most of all the chief."""
MOMENT_STEPS, MOMENT_SECONDS = 2, 0.2
"""A moment has at least so many steps, and takes so many seconds."""
WINDOWS = 6, 18
"""How many moments to judge."""


def lag_of(worker: int, spent: Mapping[int, Usage]) -> tuple[float, str]:
    """Return how many times as long as the others a worker takes for a step, and how much longer for what."""
    own = spent[worker]
    steps, seconds = own.launched, own.sampled

    def theirs(kind: str) -> float:
        """The others' seconds for something, in so many as this worker's."""
        others = [usage for other, usage in spent.items() if other != worker]
        return seconds * statistics.median(getattr(usage, kind) / usage.sampled for usage in others)

    # No worker waits for a host that is ahead of its devices, however long it takes; and a worker that comes last but
    # takes no longer than the others is not slow.
    on_host = max(0.0, min(own.idle, own.host - theirs("host")))
    computing, inside = 0.0, seconds - own.idle
    # Where the processors do little for a step, the step is not computed by them.
    if own.computed >= inside / 3 > 0.0:
        computing = inside * max(0.0, 1.0 - theirs("computed") / own.computed)
    if computing < LEAST_COMPUTED * steps:
        computing = 0.0
    more = on_host + computing
    ratio = seconds / max(seconds - more, seconds / 100) if more >= LEAST * steps else 1.0
    if on_host < computing:
        return ratio, f"{computing / steps:.3g} s more computing"
    is_input = own.input - theirs("input") > on_host / 2
    doing = "waiting for its input" if is_input else "on its host, between two steps"
    return ratio, f"{on_host / steps:.3g} s more {doing}"


class StragglerWatch:
    """Names slow workers: once when found, and whenever that changes."""

    def __init__(self) -> None:
        self._moments: collections.deque[Mapping[int, Usage]] = collections.deque(maxlen=max(WINDOWS) + 1)  # their ends
        self._named: int | None = None
        self._slow_at = 0.0

    def look(self, usages: Mapping[int, Usage], now: float) -> str | None:
        """The message for the user, if there is one; given what all workers have spent their time on so far."""
        moments, before = self._moments, self._named
        if moments and usages.keys() != moments[-1].keys():
            moments.clear()
        last = _spent(moments[-1], usages).values() if moments else ()
        if len(usages) < 2 or any(own.launched < MOMENT_STEPS or own.sampled < MOMENT_SECONDS for own in last):
            return None
        moments.append(usages)
        ratios = []
        for count in WINDOWS:
            if len(moments) <= count:
                break
            thirds = list(moments)[-count - 1 :: count // 3]
            spent = _spent(thirds[0], thirds[-1])
            ratio, more, worker = max((*lag_of(worker, spent), worker) for worker in spent)
            ratios.append(ratio)
            if ratio >= SLOW and all(lag_of(worker, _spent(*t))[0] >= SURELY_SLOW for t in itertools.pairwise(thirds)):
                self._named, self._slow_at = worker, now
                message = f"worker {worker} takes {ratio:.1f} times as long as the others for a step: {more}"
                return f"{message}; all others wait for it" if worker != before else None
        if before is not None and ratios and ratios[0] < SURELY_SLOW and now - self._slow_at >= CALM:
            self._named = None
            return f"worker {before} keeps up with the others again"
        return None


def _spent(before: Mapping[int, Usage], after: Mapping[int, Usage]) -> dict[int, Usage]:
    """Return what each worker has spent its time on in between."""
    return {
        worker: Usage(*(b - a for a, b in zip(before[worker], usage, strict=True))) for worker, usage in after.items()
    }
