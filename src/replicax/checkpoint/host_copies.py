"""Copies on the host: the run waits while a save makes them, and so nothing else is done in that time.

All that the devices have is copied into one piece of memory, which the next save gets again. New memory costs as much
time as the copy itself, because the system clears each page when it is first written. What is where in it is found out
before the first save, and is asked for when the copy is over.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax.checkpoint.array_leaves import ArrayLeaf
from replicax.checkpoint.device_blocks import HostArray, PartPiece
from replicax.checkpoint.storage.blocks import Block, shape_of, size_of

Place = tuple[str, Block]
"""A piece: the name of its array, and which block of it."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

KEPT = 512 << 20
"""More bytes than these are given back when a save is written."""
ALIGNMENT = 64


@dataclasses.dataclass
class HostCopies:
    """Pieces of arrays as they were.

    Attributes:
      memory: what was copied.
      stretches: where which pieces are in it.
      others: pieces that are in memory of their own.
    """

    memory: Bytes
    stretches: Sequence[_Stretch]
    others: dict[Place, HostArray]

    def pieces(self) -> dict[Place, HostArray]:
        """All of them, by place."""
        found = dict(self.others)
        for stretch in self.stretches:
            values = stretch.of(self.memory)
            for name, own in stretch.pieces:
                for piece in own:
                    found[name, piece.block] = values[piece.start : piece.stop].reshape(shape_of(piece.block))
        return found


class HostCopier:
    """Copies pieces of arrays to the host; the same ones again and again.

    Args:
      leaves: the arrays, by name.
      own: which pieces of which of them.
    """

    def __init__(self, leaves: Mapping[str, ArrayLeaf], own: Mapping[str, Sequence[PartPiece]]) -> None:
        self._sent = {name: pieces for name, pieces in own.items() if not leaves[name].is_on_host}
        alike: dict[np.dtype[Any], list[str]] = {}
        for name in (name for name in own if name not in self._sent):
            alike.setdefault(leaves[name].kind.numpy_dtype, []).append(name)
        self._stretches: list[_Stretch] = []
        size = 0
        for dtype, names in alike.items():
            stretch = _Stretch.laid_out(size, dtype, {name: own[name] for name in names})
            self._stretches.append(stretch)
            size += -(-stretch.size // ALIGNMENT) * ALIGNMENT
        self._memory = _Memory(max(size, 1))

    def copied(self, leaves: Mapping[str, ArrayLeaf]) -> HostCopies:
        """The pieces of leaves that lie as the first ones did, as they are now.

        Raises:
          VariableLostError: a variable has no value.
        """
        try:
            sent = {name: leaves[name].here() for name in self._sent}
            positions = {name: sorted({piece.position for piece in pieces}) for name, pieces in self._sent.items()}
            for name, here in sent.items():  # all are on their way before the first is waited for
                for position in positions[name]:
                    here[position].copy_to_host_async()
            memory = self._memory.lend()
            for stretch in self._stretches:
                stretch.fill(memory, leaves)
            others: dict[Place, HostArray] = {}
            for name, pieces in self._sent.items():
                data = {position: np.asarray(sent[name][position]) for position in positions[name]}
                others |= {(name, piece.block): data[piece.position][piece.cut or ...] for piece in pieces}
        except Exception:
            for name in (*self._sent, *(name for stretch in self._stretches for name, _ in stretch.pieces)):
                leaves[name].check()  # says what has become of it
            raise
        return HostCopies(memory, self._stretches, others)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A piece in a stretch.

    Attributes:
      block: which one, in the array.
      position: which of the leaf's arrays here has it.
      cut: where it is in that; ``None`` if it is all of it.
      start: its first element in the stretch.
      stop: the one after its last.
    """

    block: Block
    position: int
    cut: tuple[slice, ...] | None
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """A part of the memory that holds pieces of one dtype.

    Attributes:
      start: its first byte.
      size: how many bytes it has.
      dtype: of the pieces.
      pieces: by the names of their leaves, in order.
    """

    start: int
    size: int
    dtype: np.dtype[Any]
    pieces: Sequence[tuple[str, Sequence[_Placed]]]

    @classmethod
    def laid_out(cls, start: int, dtype: np.dtype[Any], own: Mapping[str, Sequence[PartPiece]]) -> _Stretch:
        """One for these pieces."""
        end, placed = 0, []
        for name, pieces in own.items():
            here = []
            for piece in pieces:
                begin, end = end, end + size_of(piece.block)
                here.append(_Placed(piece.block, piece.position, piece.cut, begin, end))
            placed.append((name, here))
        return cls(start, end * dtype.itemsize, dtype, placed)

    def of(self, memory: Bytes) -> HostArray:
        """Its elements."""
        return memory[self.start : self.start + self.size].view(self.dtype)

    def fill(self, memory: Bytes, leaves: Mapping[str, ArrayLeaf]) -> None:
        """Copy the pieces; a state has thousands, so each microsecond counts."""
        values = self.of(memory)
        for name, pieces in self.pieces:
            here = leaves[name].here()
            for piece in pieces:
                data = np.asarray(here[piece.position])
                if piece.cut is None:
                    values[piece.start : piece.stop] = data.ravel()
                else:
                    part = data[piece.cut]
                    values[piece.start : piece.stop].reshape(part.shape)[...] = part


class _Memory:
    """So many bytes of the host, for one save after the other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: Bytes | None = None
        self._lent: weakref.ref[Bytes] | None = None

    def lend(self) -> Bytes:
        """The bytes, with anything in them; those of before if no array refers to them any more.

        >>> from replicax.checkpoint.host_copies import _Memory
        >>> memory = _Memory(8)
        >>> part = memory.lend()[2:4]
        >>> np.shares_memory(part, memory.lend())
        False
        """
        if self._size > KEPT:
            return np.empty(self._size, np.uint8)
        if self._kept is None or (self._lent is not None and self._lent() is not None):
            self._kept = np.empty(self._size, np.uint8)
        # NumPy lets a view refer to the array that has the memory, and not to those in between. What frombuffer has
        # made is such an array to it: it goes no further than to what is no array.
        lent: Bytes = np.frombuffer(self._kept.data, np.uint8)
        self._lent = weakref.ref(lent)
        return lent
