"""What workers and servers send each other about variables, which they know by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]
"""The indices of rows, and the rows: :class:`replicax.IndexedSlices` on the way."""


class Ended(NamedTuple):
    """Which functions have ended; everything that is said to a server comes with it.

    Attributes:
      era: how many times the servers have gone back to a snapshot. What is of another era than the server's has been
        on its way for long: it is ignored, as functions that had ended by then may have to be run again.
      below: all functions with smaller numbers have ended, and will not be run again in this era.
    """

    era: int = 0
    below: int = 0


_NONE = Ended()


@dataclasses.dataclass(frozen=True)
class Push:
    """What one run of a step changes of the parts that one server has.

    Attributes:
      function: the number of the scheduled function. It stays the same when the function is run again elsewhere.
      number: of the push, among those of this function.
      based_on: how many updates the server had made when the function last read some of its variables; ``None`` if it
        has read none.
      gradients: for each optimizer, the gradient of each of its variables: an array, or rows.
      added: what is added to each variable: an array, or rows.
      assigned: the new value of each variable.
      ended: steps of several functions that are below it are whole, and the servers make their updates.
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
    """The parts of variables that a server has.

    Attributes:
      updates: how many updates it has made.
      values: for each variable that was asked for, and has changed since the version that the caller knows: its
        version, and the part.
    """

    updates: int
    values: Mapping[int, tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """What a server knows of an optimizer.

    Attributes:
      number: of the optimizer.
      transformation: the Optax transformation.
      variables: the numbers of the variables, in the order of the tree's leaves.
      tree: their pytree, as a pytree with these numbers as leaves.
      slots: the numbers of the variables of its state, in the order of their leaves.
      empty: for each of both, the shape of the part that this server has of it, where it has none.
    """

    number: int
    transformation: Any
    variables: tuple[int, ...]
    tree: Any
    slots: tuple[int, ...]
    empty: Mapping[int, tuple[tuple[int, ...], Any]]


@dataclasses.dataclass(frozen=True)
class ServerState:
    """All that a server knows: parts of variables, optimizers, which pushes it has seen, which functions have ended."""

    values: Mapping[int, Any]
    versions: Mapping[int, int]
    aggregations: Mapping[int, Any]
    optimizers: Sequence[OptimizerPart]
    seen: Set[tuple[int, int]]
    waiting: Mapping[tuple[int, int], Mapping[int, Push]]
    updates: int
    below: int
