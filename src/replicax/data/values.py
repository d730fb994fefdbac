"""Per-replica values from a function of the replica's number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.execution.placing import place_components
from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import regroup


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for; see ``Strategy.distribute_values_from_function``.

    Attributes:
      replica_id_in_sync_group: the replica's number, from 0.
      num_replicas_in_sync: how many replicas there are.

    >>> import replicax
    >>> replicax.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica_id_in_sync_group < self.num_replicas_in_sync:
            raise ValueError(
                f"replica_id_in_sync_group must be at least 0 and below num_replicas_in_sync "
                f"({self.num_replicas_in_sync}), got {self.replica_id_in_sync_group}"
            )


def values_from_function(value_fn: Callable[[ValueContext], Any], mesh: Mesh) -> Any:
    """See ``Strategy.distribute_values_from_function``."""
    n = mesh.shape[REPLICA_AXIS]
    merged = regroup([value_fn(ValueContext(i, n)) for i in range(n)], always_wrap=True)
    return jax.tree_util.tree_map(lambda leaf: place_components(leaf.form.values, mesh), merged)
