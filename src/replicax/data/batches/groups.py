"""Groups of global batches that are read together and lie on the devices as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from replicax.data.batches.local_batches import HostBatch


class HostGroup:
    """Global batches of one kind, in arrays ``[len(parts), room, …]`` on the host.

    Elements are copied when they are added, as the dataset may fill the same buffers again; each example is copied only
    once, as for a single element.
    """

    def __init__(self, first: HostBatch, room: int) -> None:
        self.tree = first.tree
        self.is_padded = first.filled is not None
        self.sizes: list[tuple[int, ...]] = []
        self._kind = _kind_of(first)
        columns = first.columns
        self._buffers = [np.empty((len(c), room, *c[0].shape), c[0].dtype) for c in columns]
        self.add(first)

    @property
    def count(self) -> int:
        """The number of elements."""
        return len(self.sizes)

    def takes(self, element: HostBatch) -> bool:
        """Return whether ``element`` can be added."""
        return element.alike and _kind_of(element) == self._kind

    def add(self, element: HostBatch) -> None:
        """Add an element."""
        for buffer, column in zip(self._buffers, element.columns, strict=True):
            for replica, leaf in enumerate(column):
                buffer[replica, self.count] = leaf
        self.sizes.append(element.sizes)

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """Return, for each leaf, an array ``[len(parts), count, …]``."""
        return [buffer[:, : self.count] for buffer in self._buffers]


def _kind_of(element: HostBatch) -> Any:
    return element.tree, element.filled is None, [(c[0].shape, c[0].dtype) for c in element.columns]
