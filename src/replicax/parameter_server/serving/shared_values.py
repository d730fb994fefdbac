"""A server's values in memory that workers read where it is, so that a pull of a large value copies nothing.

A value that a worker has assigned stays in that worker's memory, and one that was added to is computed in the server's
own; so both can be read at once by whoever pulls them. An optimizer's results are the compiler's, and are copied to
such memory by the first pull of each version; from then on the copy is the value. Memory that anybody reads is not
written to: what changes a value then makes another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax.parameter_server.serving.packed import LEAST, aligned
from replicax.parameter_server.serving.shared_memory import (
    PLACES,
    Block,
    Lending,
    LentBlocks,
    OwnBlock,
    SharedBlocks,
    address_of,
)

_MOST_BLOCKS = 256
"""Each is an open file. Of what has no room in so many, the values go with the answers."""


@dataclasses.dataclass(frozen=True)
class SharedPart:
    """A part of a variable that is to be read where it is.

    Attributes:
      use: of the block that has it.
      start: where it begins there.
      dtype: of the part.
      shape: of the part.
    """

    use: Lending
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, memory: np.ndarray) -> np.ndarray:
        """The array, which keeps the block in use."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return memory[self.start : self.start + size].view(self.dtype).reshape(self.shape)


class SharedValues:
    """The memory of a server's values: its own, and what workers have lent it."""

    def __init__(self) -> None:
        self._own = SharedBlocks(_MOST_BLOCKS)
        self._lent = LentBlocks()

    def can_open(self, use: Lending) -> bool:
        """Whether it can have the caller's memory, of which this is some."""
        return self._lent.can_open(use)

    def memory(self, use: Lending) -> np.ndarray:
        """What a worker has lent; see :meth:`LentBlocks.memory`."""
        return self._lent.memory(use)

    def like(self, value: Any) -> np.ndarray:
        """Memory for another value like this one: such that workers can read it, if it is large."""
        if value.nbytes >= LEAST and (memory := self._own.take(value.nbytes)) is not None:
            return memory[: value.nbytes].view(value.dtype).reshape(value.shape)
        return np.empty(value.shape, value.dtype)

    def can_change(self, value: Any) -> bool:
        """Whether a value can be written to: its memory is this process's, and no worker reads it."""
        if not isinstance(value, np.ndarray) or not value.flags.writeable:
            return False
        block, _ = self._place_of(value)
        return value.flags.owndata if block is None else not block.is_lent

    def given(self, values: Mapping[int, Any], reader: int) -> tuple[dict[int, Any], dict[int, np.ndarray]]:
        """What a worker is told of values, which it reads where they are, if they are large.

        Args:
          values: by number.
          reader: the worker's place in blocks.

        Returns:
          Shared parts, and arrays for the rest; and the values that have been copied so that they can be read, and
          should be kept in the place of those before.
        """
        large = {number: value for number, value in values.items() if value.nbytes >= LEAST and 0 < reader < PLACES}
        places = {number: self._readable(value) for number, value in large.items()}
        moved = self._moved({number: large[number] for number, (block, _) in places.items() if block is None})
        places.update({number: self._readable(value) for number, value in moved.items()})
        found: dict[int, Any] = {}
        for number, value in values.items():
            block, start = places.get(number, (None, 0))
            found[number] = (
                np.asarray(value)
                if block is None
                else SharedPart(block.lend(reader), start, np.dtype(value.dtype), value.shape)
            )
        return found, moved

    def gone(self, reader: int) -> None:
        """A worker will not be heard of any more: what it may be reading is not used again."""
        for block in (*self._own, *self._lent):
            block.give_up(reader)

    def _moved(self, values: Mapping[int, Any]) -> dict[int, np.ndarray]:
        """Copies that can be read, all in one block; none if there is no block."""
        starts, end = aligned([value.nbytes for value in values.values()])
        memory = self._own.take(end) if values else None
        if memory is None:
            return {}
        found = {}
        for (number, value), start in zip(values.items(), starts, strict=True):
            found[number] = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
            np.copyto(found[number], np.asarray(value))  # others of this process can go on meanwhile
        return found

    def _readable(self, value: Any) -> tuple[Block | None, int]:
        """The block that a value is in, if others can have it, too, and where it begins."""
        if isinstance(value, np.ndarray) and value.flags.c_contiguous:
            block, start = self._place_of(value)
            if block is not None and not block.is_given_up:
                return (block, start) if isinstance(block, OwnBlock) or self._lent.is_there(block) else (None, 0)
        return None, 0

    def _place_of(self, value: np.ndarray) -> tuple[Block | None, int]:
        address = address_of(value)
        for block in (*reversed([*self._own]), *self._lent):  # the last used is most likely
            if (start := block.start_of(address)) is not None:
                return block, start
        return None, 0
