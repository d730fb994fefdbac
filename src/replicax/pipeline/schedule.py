"""Schedule: the order in which regions are handed to the devices.

Each device runs its regions in that order, beside the others, so the order decides which regions wait for which. It is
found by simulating the step with estimated costs. Whenever a device is free it takes, of the regions whose values
are there, the one from which the fewest sends lie ahead, and of these the one that has been ready for longest: in a
pipeline a backward region before a forward one, and one microbatch after the other. A device also takes no further
forward region while as many wait for their backward ones as suffice to keep it busy, so that what is kept for the
backward pass does not grow with the number of microbatches (the order known as 1F1B). Where another rule would be
faster, as the program is no such pipeline, that one is followed.

A region that is small beside the one before it on its device, or from which nothing is sent that a region could wait
for, joins it, if it needs not wait for anything else: each program that is launched costs time, too.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from replicax.pipeline.regions import Region

_SMALL_BESIDE = 1 / 8
_AS_FAST = 1.02
_FEW = 2


@dataclasses.dataclass(eq=False)
class _Run:
    """A region, and when it ran."""

    region: Region
    start: float
    end: float


def schedule(regions: Sequence[Region]) -> list[Region]:
    """The regions in the order in which to launch them; some of them joined."""
    while True:
        graph = _Graph(regions)
        runs = _fastest(graph)
        joined = _joined_regions(runs)
        if len(joined) == len(regions):
            return joined
        regions = joined


def _fastest(graph: _Graph) -> list[_Run]:
    """The run by the first rule that is about as fast as any."""
    candidates = [
        _simulated_runs(graph, lambda i: graph.ahead[i], graph.caps),
        _simulated_runs(graph, lambda i: graph.ahead[i], None),
        _simulated_runs(graph, lambda i: i, None),
    ]
    ends = [max((p.end for p in runs), default=0.0) for runs in candidates]
    return next(runs for runs, end in zip(candidates, ends, strict=True) if end <= _AS_FAST * min(ends))


class _Graph:
    """Which regions wait for which."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = regions
        makers = {v: i for i, region in enumerate(regions) for v in region.makes}
        # Those that each needs values from.
        self.before = [{makers[v] for v in region.needs if v in makers} for region in regions]
        self.after: list[list[int]] = [[] for _ in regions]  # those that need values from it
        for i, needed in enumerate(self.before):
            for j in needed:
                self.after[j].append(i)
        self.ahead = self._ahead()  # the number of sends on the longest path from each to the end
        # Those on the same device that come back, after sends, to what each has kept.
        self.opens = [
            {j for j in self.after[i] if regions[j].device == region.device and self.ahead[j] < self.ahead[i]}
            for i, region in enumerate(regions)
        ]
        # A value kept for all microbatches, such as a cast of the parameters, opens nothing.
        self.opens = [found if len(found) <= _FEW else set() for found in self.opens]
        self.caps: dict[int, int] = {}  # of each device, how many may be open
        for i, region in enumerate(regions):
            away = max((self.ahead[i] - self.ahead[j] for j in self.opens[i]), default=0)
            self.caps[region.device] = max(self.caps.get(region.device, 1), away // 2 + 1)

    def _ahead(self) -> list[int]:
        left = [len(following) for following in self.after]
        ahead = [0] * len(left)
        done = [i for i, count in enumerate(left) if not count]
        while done:
            i = done.pop()
            for j in self.before[i]:
                ahead[j] = max(ahead[j], ahead[i] + (self.regions[i].device != self.regions[j].device))
                left[j] -= 1
                if not left[j]:
                    done.append(j)
        return ahead


def _simulated_runs(graph: _Graph, rank: Callable[[int], int], caps: dict[int, int] | None) -> list[_Run]:
    """Run the regions, of those that are ready the one of least rank first, under caps if there are any."""
    regions = graph.regions
    waiting = [len(needed) for needed in graph.before]
    ready: dict[int, list[tuple[int, float, int]]] = {region.device: [] for region in regions}
    for i, count in enumerate(waiting):
        if not count:
            ready[regions[i].device].append((rank(i), 0.0, i))
    opened: dict[int, set[int]] = {device: set() for device in ready}
    running: set[int] = set()
    runs: list[_Run] = []
    clock: list[tuple[float, int, int]] = []  # the end of each running region, its number and device

    def begin(device: int, now: float, limit: int | None) -> None:
        if device in running:
            return
        full = limit is not None and len(opened[device]) >= limit
        chosen = min((entry for entry in ready[device] if not (full and graph.opens[entry[2]])), default=None)
        if chosen is None:
            return
        ready[device].remove(chosen)
        i = chosen[2]
        opened[device] = {j for j in opened[device] if not graph.opens[j] <= started | {i}}
        started.add(i)
        if graph.opens[i]:
            opened[device].add(i)
        runs.append(_Run(regions[i], now, now + regions[i].cost))
        running.add(device)
        heapq.heappush(clock, (now + regions[i].cost, i, device))

    started: set[int] = set()
    now = 0.0
    while len(runs) < len(regions) or clock:
        for device in ready:
            begin(device, now, None if caps is None else caps[device])
        if not clock:  # all devices are at their caps, and wait for regions that others have yet to begin
            assert any(ready.values()), "regions wait for each other"
            for device in ready:
                begin(device, now, None)
        now, i, device = heapq.heappop(clock)
        running.discard(device)
        for j in graph.after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready[regions[j].device].append((rank(j), now, j))
    return runs


def _joined_regions(runs: Sequence[_Run]) -> list[Region]:
    """The regions in order, where neighbours on a device that may be one are one."""
    ended: dict[Any, tuple[int, float]] = {v: (p.region.device, p.end) for p in runs for v in p.region.makes}
    last: dict[int, _Run] = {}
    kept: list[_Run] = []
    for now in runs:
        region = now.region
        previous = last.get(region.device)
        if previous is not None and _may_join(previous, now, ended):
            previous.region = previous.region.joined(region)
            continue
        kept.append(now)
        last[region.device] = now
    return [p.region for p in kept]


def _may_join(previous: _Run, now: _Run, ended: dict[Any, tuple[int, float]]) -> bool:
    for v in now.region.needs:
        device, end = ended.get(v, (now.region.device, 0.0))
        if device != now.region.device and end > previous.start:
            return False  # it would have to wait
    return not previous.region.sends or now.region.cost <= previous.region.cost * _SMALL_BESIDE
