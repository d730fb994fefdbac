"""Staging: consecutive elements become one group, on the host, before they go to the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.devices.arrays import put
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.many_steps.element_groups import ElementGroup, Masks
from replicax.execution.replica_values import place_stacks

if TYPE_CHECKING:
    from replicax.data.elements.elements import Element


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

    def placed(self, mesh: Mesh) -> ElementGroup:
        """On the devices of ``mesh``."""
        bare = mesh.shape[REPLICA_AXIS] == 1 and not self.is_padded
        arrays = place_stacks([b[:, : self.count] for b in self._buffers], mesh, bare)
        masks = None
        if self.is_padded:
            rows, sizes = self._buffers[0].shape[2], np.array(self.sizes)
            host = np.arange(rows) < sizes.T[:, :, None]
            counts = put(sizes.sum(1).astype(np.int32), NamedSharding(mesh, PartitionSpec()))
            masks = Masks(put(host, NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))), counts, tuple(self.sizes))
        return ElementGroup(self.tree, arrays, self.count, mesh, bare, masks)


def _columns(element: Element) -> list[Any]:
    """For each leaf what each of this worker's replicas has of it."""
    if element.filled is not None:
        return element.filled
    return list(zip(*(part.leaves for part in element.parts), strict=True))


def _kind(element: Element) -> Any:
    return element.tree, element.filled is None, [(c[0].shape, c[0].dtype) for c in _columns(element)]
