"""Per-replica values from a function of the replica's number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import Components, PerReplica, Stacked, regroup


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


def place_components(components: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Put each component on its replica's device; as one stacked array, if they have one shape and dtype."""
    if not all(isinstance(c, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)) for c in components):
        return PerReplica(Components(tuple(components)))
    devices = list(mesh.devices.flat)
    arrays = [jax.device_put(jnp.asarray(c), d) for c, d in zip(components, devices, strict=True)]
    if len({(a.shape, a.dtype) for a in arrays}) > 1:
        return PerReplica(Components(tuple(arrays)))
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    rows = [a[None] for a in arrays]
    stacked = jax.make_array_from_single_device_arrays((len(rows), *arrays[0].shape), sharding, rows)
    return PerReplica(Stacked(stacked))
