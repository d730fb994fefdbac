"""Shards: the parts of a variable, and the server of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax.variables.partitioners import PieceCounts, split_by
from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of one variable.

    An unsplit variable is on one server. Without a dim each server has the whole, as of an optimizer's counter.

    >>> shards = Shards(0, {0: (0, 3), 1: (3, 5)})
    >>> {server: part.tolist() for server, part in shards.parts(np.arange(5)).items()}
    {0: [0, 1, 2], 1: [3, 4]}
    """

    dim: int | None  # along which the variable is split
    bounds: Mapping[int, tuple[int, int]]  # for each server with a part, the part's start and end along ``dim``

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers that have a part."""
        return tuple(self.bounds)

    @property
    def sources(self) -> tuple[int, ...]:
        """The servers whose parts make up the whole."""
        return self.servers if self.is_split else self.servers[:1]

    @property
    def is_split(self) -> bool:
        """Return whether several servers have different parts."""
        return self.dim is not None and len(self.bounds) > 1

    def part(self, value: Any, server: int) -> Any:
        """A server's part of ``value``."""
        if not self.is_split:
            return value
        start, stop = self.bounds[server]
        return value[(slice(None),) * (self.dim or 0) + (slice(start, stop),)]

    def parts(self, value: Any) -> dict[int, Any]:
        """All parts of ``value``."""
        return {server: self.part(value, server) for server in self.bounds}

    def whole(self, parts: Mapping[int, Any]) -> Any:
        """The value, from its parts."""
        if not self.is_split:
            return parts[self.servers[0]]
        return np.concatenate([parts[server] for server in self.servers], axis=self.dim)

    def rows(self, indices: np.ndarray, values: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The rows (along dim 0) of each server among these, with their indices in its part."""
        if not self.is_split:
            return dict.fromkeys(self.servers, (indices, values))
        if self.dim:
            return {server: (indices, self.part(values, server)) for server in self.servers}
        found = {}
        for server, (start, stop) in self.bounds.items():
            mine = (indices >= start) & (indices < stop)
            found[server] = (indices[mine] - start, values[mine])
        return found


class ShardChoice:
    """Chooses servers for variables: each part goes to the server with the fewest bytes so far.

    A variable has at most one part for each server; without a partitioner it is whole.
    """

    def __init__(self, servers: int, partitioner: PieceCounts | None) -> None:
        self._loads = [0] * servers
        self._partitioner = partitioner

    def shards_of(self, variable: Variable, partitioner: PieceCounts | None) -> Shards:
        """The shards of a new variable, which may have its own partitioner.

        Raises a ValueError if that did not return a number for each dim, at most one of them above 1.
        """
        shape, dtype = tuple(variable.shape), variable.dtype
        dim, parts = split_by(partitioner or self._partitioner, variable.name, shape, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        by_load = sorted(range(len(self._loads)), key=lambda server: (self._loads[server], server))
        if dim is None or not shape[dim]:
            self._loads[by_load[0]] += size
            return Shards(0, {by_load[0]: (0, shape[0] if shape else 1)})
        rows = shape[dim]
        each = -(-rows // min(parts, len(self._loads)))
        bounds = {}
        for number, start in enumerate(range(0, rows, each)):
            bounds[by_load[number]] = (start, min(start + each, rows))
            self._loads[by_load[number]] += size // -(-rows // each)
        return Shards(dim, dict(sorted(bounds.items(), key=lambda item: item[1])))
