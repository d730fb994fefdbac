"""Blocks: rectangular parts of an array, as ranges of its indices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Block = tuple[tuple[int, int], ...]
"""The first index, and the one after the last, along each dim."""

PIECE_BYTES = 64 << 20
"""Blocks are stored in pieces of at most so many bytes, which bounds the memory of a reader."""


def whole_block(shape: Sequence[int]) -> Block:
    """The block of a whole array of ``shape``."""
    return tuple((0, size) for size in shape)


def block_at(index: Sequence[slice], shape: Sequence[int]) -> Block:
    """The block that slices with step 1 select.

    >>> block_at((slice(2, None), slice(None)), (4, 3))
    ((2, 4), (0, 3))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def shape_of(block: Block) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in block)


def size_of(block: Block) -> int:
    """The number of elements of a block."""
    return math.prod(shape_of(block))


def common(a: Block, b: Block) -> Block | None:
    """The intersection of two blocks; ``None`` if it is empty.

    >>> common(((0, 3),), ((2, 5),))
    ((2, 3),)
    """
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in found) else found


def inside(block: Block, outer: Block) -> tuple[slice, ...]:
    """The slices of ``block`` in an array that holds ``outer``."""
    return tuple(slice(x[0] - y[0], x[1] - y[0]) for x, y in zip(block, outer, strict=True))


def pieces_of(block: Block, itemsize: int, most: int = PIECE_BYTES) -> list[Block]:
    """Split ``block`` into pieces of at most ``most`` bytes each; returns none if it has no elements.

    The result depends on nothing else, so all workers split alike.

    >>> pieces_of(((0, 5), (0, 4)), itemsize=4, most=32)
    [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]
    """
    size = size_of(block) * itemsize
    if not size:
        return []
    if size <= most:
        return [block]
    dim = next(d for d, (start, stop) in enumerate(block) if stop - start > 1)
    start, stop = block[dim]
    step = max(1, most // (size // (stop - start)))
    parts = ((*block[:dim], (i, min(i + step, stop)), *block[dim + 1 :]) for i in range(start, stop, step))
    return [piece for part in parts for piece in pieces_of(part, itemsize, most)]


def cover(block: Block, pieces: Iterable[Block]) -> bool:
    """Return whether disjoint pieces cover all of ``block``."""
    shared = (common(block, piece) for piece in pieces)
    return sum(size_of(piece) for piece in shared if piece is not None) == size_of(block)
