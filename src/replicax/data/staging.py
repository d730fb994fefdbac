"""Staging: consecutive elements become one group, on the host, before they go to the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.execution.groups import Group, Masks
from replicax.topology.mesh import REPLICA_AXIS
from replicax.topology.placement import put

if TYPE_CHECKING:
    from replicax.data.elements import Element


class Staged:
    """Elements of one kind, in arrays ``[len(parts), room, …]`` on the host.

    What is added is copied at once, as the dataset may fill the same buffers again; each example is copied once, as it
    is for an element on its own.

    Args:
      first: the first element.
      room: for how many there is room.
    """

    def __init__(self, first: Element, room: int) -> None:
        self.tree = first.tree
        self.is_padded = first.filled is not None
        self.sizes: list[tuple[int, ...]] = []
        self._kind = _kind(first)
        columns = _columns(first)
        self._buffers = [np.empty((len(c), room, *c[0].shape), c[0].dtype) for c in columns]
        self.add(first)

    @property
    def count(self) -> int:
        """How many elements there are."""
        return len(self.sizes)

    def takes(self, element: Element) -> bool:
        """Whether ``element`` can be added."""
        return element.alike and _kind(element) == self._kind

    def add(self, element: Element) -> None:
        """Add one more."""
        for buffer, column in zip(self._buffers, _columns(element), strict=True):
            for replica, leaf in enumerate(column):
                buffer[replica, self.count] = leaf
        self.sizes.append(element.sizes)

    def placed(self, mesh: Mesh) -> Group:
        """On the devices of ``mesh``."""
        n = mesh.shape[REPLICA_AXIS]
        bare = n == 1 and not self.is_padded
        sharding = NamedSharding(mesh, PartitionSpec() if bare else PartitionSpec(REPLICA_AXIS))
        stacks = [b[0, : self.count] if bare else b[:, : self.count] for b in self._buffers]
        if sharding.is_fully_addressable:
            arrays = jax.device_put(stacks, sharding)
        else:
            arrays = [jax.make_array_from_process_local_data(sharding, s, (n, *s.shape[1:])) for s in stacks]
        masks = None
        if self.is_padded:
            rows, sizes = self._buffers[0].shape[2], np.array(self.sizes)
            host = np.arange(rows) < sizes.T[:, :, None]
            counts = put(sizes.sum(1).astype(np.int32), NamedSharding(mesh, PartitionSpec()))
            masks = Masks(put(host, sharding), counts, tuple(self.sizes))
        return Group(self.tree, arrays, self.count, mesh, bare, masks)


def _columns(element: Element) -> list[Any]:
    """For each leaf what each of this worker's replicas has of it."""
    if element.filled is not None:
        return element.filled
    return list(zip(*(part.leaves for part in element.parts), strict=True))


def _kind(element: Element) -> Any:
    return element.tree, element.filled is None, [(c[0].shape, c[0].dtype) for c in _columns(element)]
