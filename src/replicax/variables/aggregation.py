"""The rules of reading and assigning a variable: synchronization × aggregation, in both contexts.

============  ==================  ==========================  =================================
              cross assign        replica assign              cross read
============  ==================  ==========================  =================================
on-write      set every copy      combine, set every copy     the value
on-read       set or divide       set this replica's copy     combine the copies
============  ==================  ==========================  =================================

"Cross" is in cross-replica context, "replica" in replica context. An on-read sum variable divides the value equally
over its copies.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.argument_checks import parse_enum


class Synchronization(enum.Enum):
    """When the replicas' copies of a variable are combined.

    >>> import replicax
    >>> replicax.Synchronization("on_read")
    <Synchronization.ON_READ: 'on_read'>
    """

    AUTO = "auto"
    """``ON_WRITE``."""
    NONE = "none"
    """Never: one value, for a variable with a single copy. Like ``ON_WRITE`` here."""
    ON_WRITE = "on_write"
    """At each assignment: it changes all copies alike, so they are always equal (a *mirrored* variable)."""
    ON_READ = "on_read"
    """Each replica updates its own copy; a read in cross-replica context combines the copies."""


class Aggregation(enum.Enum):
    """How the replicas' values become one.

    >>> import replicax
    >>> replicax.Aggregation("mean")
    <Aggregation.MEAN: 'mean'>
    """

    NONE = "none"
    """They are not combined: all replicas must assign the same value."""
    SUM = "sum"
    """Add up. A value that all n replicas share counts n times."""
    MEAN = "mean"
    """The mean."""
    ONLY_FIRST_REPLICA = "only_first_replica"
    """Replica 0's."""


def parse_synchronization(value: Synchronization | str) -> Synchronization:
    """``ON_WRITE`` or ``ON_READ``; a ValueError if it is not a ``Synchronization``, nor the name of one."""
    parsed = parse_enum(Synchronization, value, "synchronization")
    return Synchronization.ON_READ if parsed is Synchronization.ON_READ else Synchronization.ON_WRITE


def combined(value: Any, aggregation: Aggregation) -> Any:
    """One value from the arrays, or rows, of all replicas; inside a step, where a read from across runs it, too."""
    replica = context.current_replica()
    if aggregation is Aggregation.ONLY_FIRST_REPLICA:
        return jax.tree_util.tree_map(replica._communicator.from_first, value)
    return replica.all_reduce(aggregation.value, value)


def share_of(total: Any, replica: Any, num_replicas: int) -> Any:
    """One replica's share of ``total``. The shares add up to it; for integers exactly."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total / num_replicas
    quotient, remainder = total // num_replicas, total % num_replicas
    return jnp.where(jnp.asarray(replica) == 0, quotient + remainder, quotient)
