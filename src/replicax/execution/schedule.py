"""Schedule: in which order regions are handed to the devices.

Each device runs what it is handed in that order, beside the others, so the order decides who waits for whom. It is
found by playing the step through with estimated costs: whenever a device is free it takes, of the regions whose values
are there, the one from which the fewest sends lie ahead, and of these the one that has been ready for longest. In a
pipeline that is a backward region before a forward one, so that what is kept for the backward pass is soon
given free (the order known as 1F1B), and one microbatch after the other.

A region that is small beside the one before it on its device, or from which nothing is sent that somebody could wait
for, joins it, if it needs not wait for anything else: each program that is launched costs time, too.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

from replicax.execution.regions import Region

_SMALL_BESIDE = 1 / 8


@dataclasses.dataclass(eq=False)
class _Played:
    """A region, and when it ran."""

    region: Region
    start: float
    end: float


def schedule(regions: Sequence[Region]) -> list[Region]:
    """The regions in the order in which to launch them; some of them joined."""
    while True:
        played = _play(regions)
        joined = _joined(played)
        if len(joined) == len(regions):
            return [p.region for p in played]
        regions = joined


def _play(regions: Sequence[Region]) -> list[_Played]:
    makers = {v: i for i, region in enumerate(regions) for v in region.makes}
    before = [{makers[v] for v in region.needs if v in makers} for region in regions]
    after: list[list[int]] = [[] for _ in regions]
    for i, needed in enumerate(before):
        for j in needed:
            after[j].append(i)
    ahead = _sends_ahead(regions, before, after)

    waiting = [len(needed) for needed in before]
    ready_at = [0.0] * len(regions)
    ready: dict[int, list[tuple[int, float, int]]] = {region.device: [] for region in regions}
    free_at = dict.fromkeys(ready, 0.0)
    for i, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[regions[i].device], (ahead[i], 0.0, i))
    played: list[_Played] = []
    clock: list[tuple[float, int, int]] = []  # when a device is done with what
    running: set[int] = set()

    def begin(device: int, now: float) -> None:
        if device in running or not ready[device]:
            return
        _, _, i = heapq.heappop(ready[device])
        start = max(now, free_at[device])
        played.append(_Played(regions[i], start, start + regions[i].cost))
        free_at[device] = start + regions[i].cost
        running.add(device)
        heapq.heappush(clock, (free_at[device], i, device))

    for device in ready:
        begin(device, 0.0)
    while clock:
        now, i, device = heapq.heappop(clock)
        running.discard(device)
        for j in after[i]:
            waiting[j] -= 1
            ready_at[j] = max(ready_at[j], now)
            if not waiting[j]:
                heapq.heappush(ready[regions[j].device], (ahead[j], ready_at[j], j))
        for other in ready:
            begin(other, now)
    assert len(played) == len(regions), "regions wait for each other"
    return played


def _sends_ahead(regions: Sequence[Region], before: Sequence[set[int]], after: Sequence[list[int]]) -> list[int]:
    """How many sends lie on the longest way from each region to the end."""
    left = [len(following) for following in after]
    ahead = [0] * len(regions)
    done = [i for i, count in enumerate(left) if not count]
    while done:
        i = done.pop()
        for j in before[i]:
            ahead[j] = max(ahead[j], ahead[i] + (regions[i].device != regions[j].device))
            left[j] -= 1
            if not left[j]:
                done.append(j)
    return ahead


def _joined(played: Sequence[_Played]) -> list[Region]:
    """The regions, where neighbours on a device that may be one are one."""
    ended: dict[Any, tuple[int, float]] = {v: (p.region.device, p.end) for p in played for v in p.region.makes}
    last: dict[int, _Played] = {}
    kept: list[_Played] = []
    for now in played:
        region = now.region
        previous = last.get(region.device)
        if previous is not None and _may_join(previous, now, ended):
            previous.region = previous.region.joined(region)
            continue
        kept.append(now)
        last[region.device] = now
    return [p.region for p in kept]


def _may_join(previous: _Played, now: _Played, ended: dict[Any, tuple[int, float]]) -> bool:
    for v in now.region.needs:
        device, end = ended.get(v, (now.region.device, 0.0))
        if device != now.region.device and end > previous.start:
            return False  # it would have to wait
    return not previous.region.sends or now.region.cost <= previous.region.cost * _SMALL_BESIDE
