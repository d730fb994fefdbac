"""Messages between workers and servers about variables, which they identify by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]
"""The indices of rows, and the rows: the content of :class:`replicax.IndexedSlices`."""
Changes = Mapping[tuple[int | str, int], Any]
"""Arrays or rows by kind and variable. The kind is ``"added"``, ``"assigned"``, or, for gradients, an optimizer."""
Version = tuple[int, int]
"""Of a part of a variable: the era in which it was changed last (see :class:`Ended`), and a number that grows."""


class Ended(NamedTuple):
    """The functions that have ended; part of every message to a server.

    A server ignores late messages of another era, as functions that had ended by then may have to run again.
    """

    era: int = 0  # how many times the servers have gone back to a snapshot
    below: int = 0  # all functions with smaller numbers have ended, and will not run again in this era


@dataclasses.dataclass(frozen=True)
class Push:
    """The changes that one run of a step makes to the parts of one server."""

    function: int  # the number of the scheduled function, also when another worker runs it again
    number: int  # of the push, among those of this function
    based_on: int | None  # the server's updates when the function last read some of its variables; None: it has not
    changes: Changes
    ended: Ended


class Pulled(NamedTuple):
    """The number of a server's updates; and the versions and parts of variables that the caller does not have."""

    updates: int
    values: Mapping[int, tuple[Version, Any]]


@dataclasses.dataclass(frozen=True)
class OptimizerPart:
    """An optimizer, as each server has it for its parts of variables."""

    number: int
    transformation: Any
    tree: Any  # the pytree of the variables, with their numbers as leaves
    slots: tuple[int, ...]  # the numbers of the variables of its state, in the order of their leaves
    empty: Mapping[int, np.ndarray]  # arrays without elements, for servers that have no part of a variable


@dataclasses.dataclass
class ServerState:
    """The state of a server that a snapshot covers: all but the optimizers, which are defined again."""

    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    versions: dict[int, Version] = dataclasses.field(default_factory=dict)
    aggregations: dict[int, Any] = dataclasses.field(default_factory=dict)
    # The functions and numbers of pushes that have arrived, of functions that have not ended.
    seen: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    # Pushes of incomplete steps, by step and number, and by function.
    waiting: dict[tuple[int, int], dict[int, Push]] = dataclasses.field(default_factory=dict)
    updates: int = 0  # made so far
    ended: Ended = dataclasses.field(default_factory=Ended)
