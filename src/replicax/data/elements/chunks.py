"""Chunks: elements that are read several at once, as one group on the devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.execution.many_steps.element_groups import ElementGroup, Single, joined

if TYPE_CHECKING:
    from replicax.data.elements.elements import Element


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some elements, with the states of the pass before, between and after them.

    Attributes:
      group: the elements.
      states: pickled, one more than there are elements.
    """

    group: ElementGroup | Single
    states: list[bytes]

    def split(self, count: int) -> tuple[Chunk, Chunk]:
        """The first ``count`` elements, and the others."""
        assert isinstance(self.group, ElementGroup)
        first, rest = self.group.split(count)
        return Chunk(first, self.states[: count + 1]), Chunk(rest, self.states[count:])


def joined_where_alike(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same elements in as few groups as possible."""
    if len(chunks) == 1:
        return list(chunks)
    result = []
    # What can't be joined is of a kind of its own.
    kinds = [c.group.kind if isinstance(c.group, ElementGroup) else number for number, c in enumerate(chunks)]
    for _, alike in itertools.groupby(zip(kinds, chunks, strict=True), lambda pair: pair[0]):
        members = [chunk for _, chunk in alike]
        if len(members) > 1:
            states = [members[0].states[0], *(state for chunk in members for state in chunk.states[1:])]
            members = [Chunk(joined([t.group for t in members if isinstance(t.group, ElementGroup)]), states)]
        result += members
    return result


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
        self._kind = _kind_of(first)
        columns = first.columns
        self._buffers = [np.empty((len(c), room, *c[0].shape), c[0].dtype) for c in columns]
        self.add(first)

    @property
    def count(self) -> int:
        """How many elements there are."""
        return len(self.sizes)

    def takes(self, element: Element) -> bool:
        """Whether ``element`` can be added."""
        return element.alike and _kind_of(element) == self._kind

    def add(self, element: Element) -> None:
        """Add one more."""
        for buffer, column in zip(self._buffers, element.columns, strict=True):
            for replica, leaf in enumerate(column):
                buffer[replica, self.count] = leaf
        self.sizes.append(element.sizes)

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """For each leaf an array ``[len(parts), count, …]``."""
        return [buffer[:, : self.count] for buffer in self._buffers]


def _kind_of(element: Element) -> Any:
    return element.tree, element.filled is None, [(c[0].shape, c[0].dtype) for c in element.columns]
