"""Chunks: some elements of a pass that were read together, and the pass's states around them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from replicax.execution.many_steps.element_groups import ElementGroup, Single, joined


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
    for _, group in itertools.groupby(enumerate(chunks), lambda x: _kind(*x)):
        members = [chunk for _, chunk in group]
        if len(members) > 1:
            states = [members[0].states[0], *(state for chunk in members for state in chunk.states[1:])]
            members = [Chunk(joined([t.group for t in members if isinstance(t.group, ElementGroup)]), states)]
        result += members
    return result


def _kind(number: int, chunk: Chunk) -> Any:
    return chunk.group.kind if isinstance(chunk.group, ElementGroup) else number
