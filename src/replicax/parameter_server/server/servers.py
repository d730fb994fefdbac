"""All parameter servers, as the coordinator and each worker see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from replicax.parameter_server.actors import Actor, Reply, all_results
from replicax.parameter_server.pickling import Reference
from replicax.parameter_server.server.messages import Changes, Ended, OptimizerPart, Push, Rows, Version
from replicax.parameter_server.server.shards import Shards


class Servers:
    """The servers, and the versions of variables that this process has got from them.

    All messages to a server at one time form a single call, with the functions that have ended (``ended``). ``updates``
    has how many updates each server had made when something was last read from it.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.actors = tuple(actors)
        self.ended: Callable[[], Ended] = Ended
        self.updates: dict[int, int] = {}
        self._versions: dict[int, dict[int, Version]] = {}

    def put(self, values: Mapping[int, tuple[Shards, Any, str]]) -> None:
        """Set whole variables: their shards, values and aggregations."""
        calls: dict[int, dict[int, Any]] = {}
        for number, (shards, value, aggregation) in values.items():
            self.forget(number)
            for server, part in shards.parts(value).items():
                calls.setdefault(server, {})[number] = np.asarray(part), aggregation
        self._all("put", {server: (parts, self.ended()) for server, parts in calls.items()})

    def define(self, servers: Iterable[int], optimizer: OptimizerPart) -> None:
        """Define an optimizer on these servers."""
        self._all("define", dict.fromkeys(servers, (optimizer,)))

    def drop(self, references: Sequence[Reference]) -> None:
        """Make all servers forget these objects; does not wait."""
        for actor in self.actors:
            actor.call("drop", references)

    def pull(self, shards_by_number: Mapping[int, Shards], present: Callable[[int], Any]) -> dict[int, Any]:
        """The values of those variables that have changed since the last call.

        ``present`` returns this process' value of a variable, for parts that have not changed.
        """
        calls: dict[int, dict[int, Version | None]] = {}
        for number, shards in shards_by_number.items():
            for server in shards.sources:
                calls.setdefault(server, {})[number] = self._versions.get(number, {}).get(server)
        ended = self.ended()
        pulled = self._all("pull", {server: (asked, ended) for server, asked in calls.items()})
        self.updates.update({server: got.updates for server, got in pulled.items()})
        values = {}
        for number, shards in shards_by_number.items():
            new = {server: got.values[number] for server, got in pulled.items() if number in got.values}
            if not new:
                continue
            parts = {server: part for server, (_, part) in new.items()}
            if missing := [server for server in shards.sources if server not in parts]:
                old = np.asarray(present(number))
                parts.update({server: shards.part(old, server) for server in missing})
            values[number] = shards.whole(parts)
            self._versions.setdefault(number, {}).update({server: version for server, (version, _) in new.items()})
        return values

    def rows(self, number: int, shards: Shards, indices: np.ndarray) -> np.ndarray:
        """Some rows (along dim 0) of a variable. The indices, ``[k]``, are in range, unique and sorted."""
        asked = dict.fromkeys(shards.sources, indices)
        if shards.is_split and shards.dim == 0 and len(indices):
            asked = {server: mine for server, (mine, _) in shards.rows(indices, indices).items() if len(mine)}
        ended = self.ended()
        replies = self._all("rows", {server: (number, mine, ended) for server, mine in asked.items()})
        self.updates.update({server: updates for server, (updates, _) in replies.items()})
        parts = [rows for _, rows in replies.values()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=shards.dim)

    def push(self, pushes: Mapping[int, Push]) -> dict[int, Reply]:
        """Send each server its changes; the results will be their staleness."""
        return {server: self.actors[server].call("push", push) for server, push in pushes.items()}

    def break_off(self, ended: Ended) -> None:
        """Drop waiting pushes after a step has failed, except those of complete steps."""
        self._all("break_off", dict.fromkeys(range(len(self.actors)), (ended,)))

    def forget(self, number: int) -> None:
        """Forget what this process has of a variable: it has been dropped, or the copy here has been changed."""
        self._versions.pop(number, None)

    def snapshots(self) -> list[Reply]:
        """The state of each server, also stored by a neighbour; nothing is copied to this process."""
        states = [actor.call("snapshot", self.ended()) for actor in self.actors]
        self.keep(states)
        return states

    def keep(self, states: Sequence[Reply]) -> None:
        """Make the neighbours store these states, and keep the previous ones until all have them."""
        neighbours = [*self.actors[1:], *self.actors[:1]]
        kept = [neighbour.call("keep", state) for neighbour, state in zip(neighbours, states, strict=True)]
        all_results(kept, [f"parameter server {i}, or its neighbour that keeps its state," for i in range(len(kept))])
        for actor in self.actors:
            actor.call("keep_last")

    def restore(self, states: Sequence[Reply | None], era: int) -> None:
        """Make all servers go back to these states (``None``: empty), and start an era."""
        self._all("restore", {server: (state, era) for server, state in enumerate(states)})

    def wait_until_ready(self) -> None:
        """Wait until all of their processes have started."""
        self._all("ready", dict.fromkeys(range(len(self.actors)), ()))

    def _all(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        sent = [self.actors[server].call(method, *args) for server, args in calls.items()]
        return dict(zip(calls, all_results(sent, [f"parameter server {server}" for server in calls]), strict=True))


def split_changes(shards: Mapping[int, Shards], changes: Changes) -> dict[int, dict[tuple[int | str, int], Any]]:
    """The changes of a step, for each server that has a part of them."""
    found: dict[int, dict[tuple[int | str, int], Any]] = {}
    for (kind, number), change in changes.items():
        of = shards[number]
        parts = of.rows(*_merged_rows(*change)) if isinstance(change, tuple) else of.parts(np.asarray(change))
        for server, part in parts.items():
            found.setdefault(server, {})[kind, number] = part
    return found


def _merged_rows(indices: Any, rows: Any) -> Rows:
    """Sum rows of equal index, if that leaves at most half of the rows."""
    indices, rows = np.asarray(indices), np.asarray(rows)
    unique, places = np.unique(indices, return_inverse=True)
    if 2 * len(unique) > len(indices):
        return indices, rows
    total = np.zeros((len(unique), *rows.shape[1:]), rows.dtype)
    np.add.at(total, places, rows)
    return unique, total
