"""Copies on the host: the run waits while a save makes them, so nothing else is done during that time.

Everything on the devices is copied into one block of memory, which the next save reuses. New memory costs as much
time as the copy itself, because the system clears each page when it is first written. The layout of the block is
determined before the first save, and its pieces are looked up after the copy.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.checkpoint.array_leaves import ArrayLeaf
from replicax.checkpoint.device_blocks import HostArray, PartPiece
from replicax.checkpoint.storage.blocks import Block, shape_of, size_of
from replicax.variables import Variable

Place = tuple[str, Block]
"""A piece: the name of its array, and its block."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

KEPT = 512 << 20
"""A larger block of memory is freed when a save is written."""
ALIGNMENT = 64


class HostCopier:
    """Copies the same pieces of arrays to the host for each save: ``own`` has those of each array, by its name."""

    def __init__(self, leaves: Mapping[str, ArrayLeaf], own: Mapping[str, Sequence[PartPiece]]) -> None:
        self._names = list(own)
        self._sent = {name: pieces for name, pieces in own.items() if not leaves[name].is_on_host}
        alike: dict[np.dtype[Any], list[str]] = {}
        for name in (name for name in own if name not in self._sent):
            alike.setdefault(leaves[name].kind.numpy_dtype, []).append(name)
        self._segments: list[_Segment] = []
        size = 0
        for dtype, names in alike.items():
            segment = _Segment.laid_out(size, dtype, {name: own[name] for name in names})
            self._segments.append(segment)
            size += -(-segment.size // ALIGNMENT) * ALIGNMENT
        self._memory = _Memory(max(size, 1))

    def copied(self, leaves: Mapping[str, ArrayLeaf]) -> Callable[[], dict[Place, HostArray]]:
        """Copy the present pieces of leaves that have the same layout as the first ones.

        Returns a function that looks the copies up; the save calls it in the background, where its time does not count.
        """
        try:
            sent = {name: leaves[name].here() for name in self._sent}
            positions = {name: sorted({piece.position for piece in pieces}) for name, pieces in self._sent.items()}
            for name, here in sent.items():  # start all transfers before waiting for the first
                for position in positions[name]:
                    here[position].copy_to_host_async()
            memory = self._memory.reserve()
            for segment in self._segments:
                segment.fill(memory, leaves)
            others: dict[Place, HostArray] = {}
            for name, pieces in self._sent.items():
                data = {position: np.asarray(sent[name][position]) for position in positions[name]}
                others |= {(name, piece.block): data[piece.position][piece.cut or ...] for piece in pieces}
        except Exception as error:
            for name in self._names:
                if isinstance(owner := leaves[name].owner, Variable):
                    owner.stored()  # raises with the reason, if it is lost
                elif isinstance(owner, jax.Array) and owner.is_deleted():
                    raise RuntimeError(
                        f"Checkpoint: the array {name} has been deleted, as by a function to which it was donated "
                        "(jax.jit(donate_argnums=…)): before a save, assign what such a function returns to the "
                        "checkpoint's attribute, checkpoint.state = state"
                    ) from error
            raise

        def found() -> dict[Place, HostArray]:
            pieces = dict(others)
            for segment in self._segments:
                values = segment.of(memory)
                for name, own in segment.pieces:
                    pieces |= {(name, p.block): values[place].reshape(shape_of(p.block)) for p, place in own}
            return pieces

        return found


@dataclasses.dataclass(frozen=True)
class _Segment:
    """``size`` bytes of the memory, from ``start`` on, which hold pieces of one dtype."""

    start: int
    size: int
    dtype: np.dtype[Any]
    pieces: Sequence[tuple[str, Sequence[tuple[PartPiece, slice]]]]
    """The pieces of each leaf, by its name, with the elements of each in the segment."""

    @classmethod
    def laid_out(cls, start: int, dtype: np.dtype[Any], own: Mapping[str, Sequence[PartPiece]]) -> _Segment:
        """A segment for these pieces."""
        end, placed = 0, []
        for name, pieces in own.items():
            here = []
            for piece in pieces:
                begin, end = end, end + size_of(piece.block)
                here.append((piece, slice(begin, end)))
            placed.append((name, here))
        return cls(start, end * dtype.itemsize, dtype, placed)

    def of(self, memory: Bytes) -> HostArray:
        """The elements of the segment."""
        return memory[self.start : self.start + self.size].view(self.dtype)

    def fill(self, memory: Bytes, leaves: Mapping[str, ArrayLeaf]) -> None:
        """Copy the pieces; a state has thousands of them, so each microsecond counts."""
        values = self.of(memory)
        for name, pieces in self.pieces:
            here = leaves[name].here()
            for piece, place in pieces:
                data = np.asarray(here[piece.position])
                if piece.cut is None:
                    values[place] = data.ravel()
                else:
                    part = data[piece.cut]
                    values[place].reshape(part.shape)[...] = part


class _Memory:
    """A block of memory of the host, reused by one save after the other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: Bytes | None = None
        self._escaped: weakref.ref[Bytes] | None = None

    def reserve(self) -> Bytes:
        """The bytes, uninitialized; the same memory as before unless an array still refers to it.

        >>> memory = _Memory(8)
        >>> part = memory.reserve()[2:4]
        >>> np.shares_memory(part, memory.reserve())
        False
        """
        if self._size > KEPT:
            return np.empty(self._size, np.uint8)
        if self._kept is None or (self._escaped is not None and self._escaped() is not None):
            self._kept = np.empty(self._size, np.uint8)
        # NumPy lets a view refer to the array that owns the memory, not to views in between. To NumPy, the result of
        # frombuffer is such an owner: it does not look beyond it, because its base is not an array.
        memory: Bytes = np.frombuffer(self._kept.data, np.uint8)
        self._escaped = weakref.ref(memory)
        return memory
