"""Messages between workers and servers about variables, which they identify by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]
"""The indices of rows, and the rows: the content of :class:`replicax.IndexedSlices`."""


class Ended(NamedTuple):
    """The functions that have ended; part of every message to a server.

    Attributes:
      era: how many times the servers have gone back to a snapshot. A server ignores late messages of another era, as
        functions that had ended by then may have to run again.
      below: all functions with smaller numbers have ended, and will not run again in this era.
    """

    era: int = 0
    below: int = 0


_NONE = Ended()


@dataclasses.dataclass(frozen=True)
class Push:
    """The changes that one run of a step makes to the parts of one server.

    Attributes:
      function: the number of the scheduled function, also when another worker runs it again.
      number: of the push, among those of this function.
      based_on: how many updates the server had made when the function last read some of its variables; ``None`` if it
        has read none.
      gradients: for each optimizer, the gradient of each of its variables: an array, or rows.
      added: the change to add to each variable: an array, or rows.
      assigned: the new value of each variable.
      ended: steps of several functions below it are complete, and the servers apply them.
    """

    function: int
    number: int
    based_on: int | None
    gradients: Mapping[int, Mapping[int, np.ndarray | Rows]]
    added: Mapping[int, np.ndarray | Rows]
    assigned: Mapping[int, np.ndarray]
    ended: Ended = _NONE


@dataclasses.dataclass(frozen=True)
class Pulled:
    """The parts of variables of a server.

    Attributes:
      updates: how many updates it has made.
      values: for each requested variable that has changed since the caller's version: its present version, and the
        part.
    """

    updates: int
    values: Mapping[int, tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """A server's part of an optimizer.

    Attributes:
      number: of the optimizer.
      transformation: the Optax transformation.
      variables: the numbers of the variables, in the order of the tree's leaves.
      tree: their pytree, as a pytree with these numbers as leaves.
      slots: the numbers of the variables of its state, in the order of their leaves.
      empty: for both of these, the shape of this server's part where it has none.
    """

    number: int
    transformation: Any
    variables: tuple[int, ...]
    tree: Any
    slots: tuple[int, ...]
    empty: Mapping[int, tuple[tuple[int, ...], Any]]


@dataclasses.dataclass(frozen=True)
class ServerState:
    """The state of a server: parts of variables, optimizers, and the pushes and ended functions that it knows of."""

    values: Mapping[int, Any]
    versions: Mapping[int, int]
    aggregations: Mapping[int, Any]
    optimizers: Sequence[OptimizerPart]
    seen: Set[tuple[int, int]]
    waiting: Mapping[tuple[int, int], Mapping[int, Push]]
    updates: int
    below: int
