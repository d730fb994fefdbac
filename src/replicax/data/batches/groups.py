"""Groups of global batches that are read together and lie on the devices as one array."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.execution.many_steps.element_groups import ElementGroup, Single, joined

if TYPE_CHECKING:
    from replicax.data.batches.local_batches import HostBatch


@dataclasses.dataclass(frozen=True)
class BatchGroup:
    """Some elements, with the states of the pass before, between and after them."""

    batches: ElementGroup | Single
    states: list[bytes]

    def split(self, count: int) -> tuple[BatchGroup, BatchGroup]:
        """The first ``count`` elements, and the others."""
        assert isinstance(self.batches, ElementGroup)
        first, rest = self.batches.split(count)
        return BatchGroup(first, self.states[: count + 1]), BatchGroup(rest, self.states[count:])


def joined_groups(groups: Sequence[BatchGroup]) -> list[BatchGroup]:
    """Join the elements into as few groups as possible."""
    if len(groups) == 1:
        return list(groups)
    result = []
    # Each that can't be joined gets a kind of its own.
    kinds = [c.batches.kind if isinstance(c.batches, ElementGroup) else number for number, c in enumerate(groups)]
    for _, alike in itertools.groupby(zip(kinds, groups, strict=True), lambda pair: pair[0]):
        members = [group for _, group in alike]
        if len(members) > 1:
            states = [members[0].states[0], *(state for group in members for state in group.states[1:])]
            members = [BatchGroup(joined([t.batches for t in members if isinstance(t.batches, ElementGroup)]), states)]
        result += members
    return result


class Staged:
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
