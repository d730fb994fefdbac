"""Makes per-replica values from a function of the replica's number."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from replicax.argument_checks import as_integer, checked_integer
from replicax.execution.replica_values import place_components, type_of_component
from replicax.user_functions import checked_result
from replicax.values import rebuilt, regroup
from replicax.workers.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for; see ``Strategy.distribute_values_from_function``.

    Attributes:
      replica_id_in_sync_group: the replica's number, from 0.
      num_replicas_in_sync: the number of replicas.

    >>> import replicax
    >>> replicax.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        checked_integer(self.num_replicas_in_sync, "ValueContext: num_replicas_in_sync")
        number = as_integer(self.replica_id_in_sync_group)
        if number is None or not 0 <= number < self.num_replicas_in_sync:
            raise ValueError(
                f"replica_id_in_sync_group must be an int of at least 0 and below num_replicas_in_sync "
                f"({self.num_replicas_in_sync}), got {self.replica_id_in_sync_group!r}"
            )

    @property
    def replica_id(self) -> int:
        """Another name of ``replica_id_in_sync_group``."""
        return self.replica_id_in_sync_group


def values_from_function(value_fn: Callable[[ValueContext], Any], replicas: Replicas) -> Any:
    """See ``Strategy.distribute_values_from_function``."""
    lockstep = replicas.lockstep
    n, mine = replicas.num_replicas, replicas.local_replicas
    merged = regroup(
        [checked_result(value_fn(ValueContext(i, n)), value_fn, "distribute_values_from_function") for i in mine],
        always_wrap=True,
        replicas=mine,
        count=n,
    )
    paths, tree = jax.tree_util.tree_flatten_with_path(merged)
    leaves = [leaf for _, leaf in paths]
    types = [
        [
            type_of_component(c, f"distribute_values_from_function: the value{keystr(path)} of replica {i}")
            for i, c in zip(mine, leaf.values, strict=True)
        ]
        for path, leaf in paths
    ]
    theirs = lockstep.exchange("distributes values from a function", (str(tree), types))
    for worker, (other, _) in enumerate(theirs):
        if other != str(tree):
            raise ValueError(
                f"replicas must agree on the structure of a value: worker {lockstep.workers.index} has {tree}, worker "
                f"{worker} has {other}"
            )
    everyones = [list(itertools.chain(*column)) for column in zip(*(k for _, k in theirs), strict=True)]
    placed = [place_components(leaf.values, replicas, k) for leaf, k in zip(leaves, everyones, strict=True)]
    return rebuilt(tree, placed)
