"""All parameter servers together, as the coordinator and each worker see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from replicax.parameter_server.engine.actors import Actor, Reply, all_results
from replicax.parameter_server.serving.pushes import OptimizerPart, Pulled, Push, Rows
from replicax.parameter_server.serving.shards import Shards


class Servers:
    """The servers, and which versions of variables this process has got from them.

    Whatever is to be said to a server at one time is one call.

    Args:
      actors: one for each server, in their order.

    Attributes:
      finished_below: gives the number below which all functions have ended; see :class:`Push`.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.actors = tuple(actors)
        self.finished_below: Callable[[], int] = lambda: 0
        self._versions: dict[int, dict[int, int]] = {}

    def put(self, values: Mapping[int, tuple[Shards, Any, str]]) -> None:
        """Set whole variables: their shards, values and aggregations."""
        calls: dict[int, dict[int, Any]] = {}
        for number, (shards, value, aggregation) in values.items():
            self._versions.pop(number, None)
            for server, part in shards.parts(value).items():
                calls.setdefault(server, {})[number] = np.asarray(part), aggregation
        self._all("put", {server: (parts, self.finished_below()) for server, parts in calls.items()})

    def define(self, parts: Mapping[int, OptimizerPart]) -> None:
        """Tell each server of an optimizer."""
        self._all("define", {server: (part,) for server, part in parts.items()})

    def drop(self, numbers: Sequence[int]) -> None:
        """Have all servers forget variables; nobody waits for it."""
        for actor in self.actors:
            actor.call("drop", tuple(numbers))

    def pull(
        self, wanted: Mapping[int, Shards], present: Callable[[int], Any]
    ) -> tuple[dict[int, Any], dict[int, int]]:
        """The new values of those variables that have changed since the last time.

        Args:
          wanted: the variables.
          present: gives the value that this process has of a variable.

        Returns:
          The values, and how many updates each server had made.
        """
        known = self._versions  # others, from when servers have gone back
        calls: dict[int, dict[int, int]] = {}
        for number, shards in wanted.items():
            versions = known.get(number, {})
            for server in shards.servers if shards.dim is not None else shards.servers[:1]:
                calls.setdefault(server, {})[number] = versions.get(server, -1)
        below = self.finished_below()
        pulled: dict[int, Pulled] = self._all("pull", {server: (asked, below) for server, asked in calls.items()})
        values = {}
        for number, shards in wanted.items():
            fresh = {server: got.values[number] for server, got in pulled.items() if number in got.values}
            if not fresh:
                continue
            known.setdefault(number, {}).update({server: version for server, (version, _) in fresh.items()})
            parts = {server: part for server, (_, part) in fresh.items()}
            if shards.is_split and len(parts) < len(shards.bounds):
                old = np.asarray(present(number))
                parts.update({server: shards.part(old, server) for server in shards.bounds if server not in parts})
            values[number] = shards.whole(parts)
        return values, {server: got.updates for server, got in pulled.items()}

    def rows(self, number: int, shards: Shards, indices: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
        """Some rows (along dim 0) of a variable, and how many updates each server that was asked had made.

        Args:
          number: of the variable.
          shards: of it.
          indices: ``[k]``, each in the range of its rows, and only once.
        """
        if shards.is_split and shards.dim == 0:
            masks = {server: (indices >= a) & (indices < b) for server, (a, b) in shards.bounds.items()}
            asked = {s: indices[mask] - shards.bounds[s][0] for s, mask in masks.items() if mask.any()}
            asked = asked or {shards.servers[0]: indices}  # of no rows the dtype is wanted
        else:
            masks, asked = {}, dict.fromkeys(shards.servers if shards.is_split else shards.servers[:1], indices)
        below = self.finished_below()
        found = self._all("rows", {server: (number, mine, below) for server, mine in asked.items()})
        updates = {server: count for server, (count, _) in found.items()}
        parts = {server: rows for server, (_, rows) in found.items()}
        if not masks:
            return shards.whole(parts), updates
        some = next(iter(parts.values()))
        whole = np.empty((len(indices), *some.shape[1:]), some.dtype)
        for server, rows in parts.items():
            whole[masks[server]] = rows
        return whole, updates

    def push(self, pushes: Mapping[int, Push]) -> int:
        """Send what each server is to change; returns the largest staleness."""
        return max(self._all("push", {server: (push,) for server, push in pushes.items()}).values(), default=0)

    def break_off(self, below: int) -> None:
        """See :meth:`replicax.parameter_server.serving.shard_server.ShardServer.break_off`."""
        self._all("break_off", dict.fromkeys(range(len(self.actors)), (below,)))

    def replace(self, actors: Sequence[Actor]) -> None:
        """Other processes are the servers now, or have other values than before."""
        self.actors = tuple(actors)
        self._versions = {}

    def snapshots(self) -> list[Reply]:
        """The state of each, which a neighbour has in memory, too; nothing is copied to this process."""
        states = [actor.call("snapshot", self.finished_below()) for actor in self.actors]
        neighbours = [*self.actors[1:], *self.actors[:1]]
        kept = [neighbour.call("keep", state) for neighbour, state in zip(neighbours, states, strict=True)]
        all_results(kept, lambda i: f"parameter server {i}, or its neighbour that keeps its state,")
        return states

    def wait_until_ready(self) -> None:
        """Until all of their processes have started."""
        self._all("ready", dict.fromkeys(range(len(self.actors)), ()))

    def _all(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        replies: list[Reply] = [self.actors[server].call(method, *args) for server, args in calls.items()]
        whom = list(calls)
        results = all_results(replies, lambda i: f"parameter server {whom[i]}")
        return dict(zip(calls, results, strict=True))


def shared_out(
    shards: Mapping[int, Shards],
    gradients: Mapping[int, Mapping[int, Any]],
    added: Mapping[int, Any],
    assigned: Mapping[int, Any],
) -> dict[int, tuple[dict[int, dict[int, Any]], dict[int, Any], dict[int, Any]]]:
    """What a step changes, for each server that has a part of it."""
    found: dict[int, tuple[dict[int, dict[int, Any]], dict[int, Any], dict[int, Any]]] = {}
    for optimizer, by_variable in gradients.items():
        for number, gradient in by_variable.items():
            for server, part in _parts(shards[number], gradient).items():
                found.setdefault(server, ({}, {}, {}))[0].setdefault(optimizer, {})[number] = part
    for place, changes in ((1, added), (2, assigned)):
        for number, change in changes.items():
            for server, part in _parts(shards[number], change).items():
                found.setdefault(server, ({}, {}, {}))[place][number] = part
    return found


def _parts(shards: Shards, change: np.ndarray | Rows) -> Mapping[int, Any]:
    return shards.rows(*change) if isinstance(change, tuple) else shards.parts(change)
