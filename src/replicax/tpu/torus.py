"""``Torus``: chips on a grid, the distances between them, and a path through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Torus:
    """Chips on a grid of three dims, each linked to its neighbours along every dim.

    Along a dim that wraps around, the last chip is also a neighbour of the first.

    Attributes:
      shape: chips along x, y and z.
      wrap: whether there are links from the last chip to the first, along x, y and z. Along a dim of two chips
        these are neighbours anyway, so it never counts as wrapping around.

    >>> ring = Torus((8, 1, 1), wrap=(True, False, False))
    >>> int(ring.hops((0, 0, 0), (7, 0, 0))), int(ring.hops((0, 0, 0), (4, 0, 0)))
    (1, 4)
    """

    shape: tuple[int, int, int]
    wrap: tuple[bool, bool, bool] = (False, False, False)

    def __post_init__(self) -> None:
        around = tuple(bool(w) and size > 2 for w, size in zip(self.wrap, self.shape, strict=True))
        object.__setattr__(self, "wrap", around)

    @property
    def around(self) -> str:
        """The names of the dims that wrap around: ``"x, y"``."""
        return ", ".join(axis for axis, wraps in zip("xyz", self.wrap, strict=True) if wraps)

    def hops(self, a: ArrayLike, b: ArrayLike) -> np.ndarray:
        """The number of links on the shortest way from each chip in ``a`` to the one in ``b``, both ``[..., 3]``."""
        straight = np.abs(np.asarray(a, np.int64) - np.asarray(b, np.int64))
        around = np.asarray(self.shape) - straight
        return np.where(self.wrap, np.minimum(straight, around), straight).sum(-1)

    def links(self) -> np.ndarray:
        """Every link once: int64 ``[links, 2, 3]``, the coordinates of its two ends.

        A wrap-around link goes from the last chip to the first; the others from a chip to the next.
        """
        chips = points(self.shape)
        found = [np.zeros((0, 2, 3), np.int64)]
        for dim, (size, wraps) in enumerate(zip(self.shape, self.wrap, strict=True)):
            step = np.eye(3, dtype=np.int64)[dim]
            starts = chips if wraps else chips[chips[:, dim] < size - 1]
            found.append(np.stack([starts, (starts + step) % self.shape], axis=1))
        return np.concatenate(found)


def points(sizes: Iterable[int]) -> np.ndarray:
    """Return all points of a grid, the last coordinate fastest: int64 ``[points, dims]``.

    >>> points((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    shape = tuple(int(size) for size in sizes)
    return np.indices(shape).reshape(len(shape), -1).T


def first_repetition(coordinates: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The indices of two equal coordinates in ``[rows, columns, dims]``; ``None`` if all are different."""
    flat = coordinates.reshape(-1, coordinates.shape[2])
    _, first, which = np.unique(
        np.ravel_multi_index(tuple(flat.T), flat.max(0) + 1), return_index=True, return_inverse=True
    )
    again = np.flatnonzero(first[which] != np.arange(len(flat)))
    if not len(again):
        return None
    columns = coordinates.shape[1]
    return divmod(int(first[which[again[0]]]), columns), divmod(int(again[0]), columns)


# --- a path through all points --------------------------------------------------------------------------


def ring_order(shape: Sequence[int], wrap: Sequence[bool]) -> np.ndarray:
    """Order all points of a grid, from the origin, so that each is a neighbour of the one before: ``[points, dims]``.

    They close to a ring if the grid allows it: if it wraps around along some dim, or if it has an even number of points
    and at least two dims longer than one. (A grid with an odd number of points has no ring: the sum of the coordinates
    alternates between even and odd along every link.)

    >>> ring_order((3, 2), (False, False)).tolist()
    [[0, 0], [1, 0], [2, 0], [2, 1], [1, 1], [0, 1]]
    """
    n = int(np.prod(shape))
    around = [dim for dim, size in enumerate(shape) if wrap[dim] and size > 2]
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    if around:
        return _comb(shape, around[0])
    if n % 2 == 0 and len(wide) > 1:
        # The comb has as many teeth as there are points along the other dims: that number must be even.
        return _comb(shape, next(dim for dim in wide if n // shape[dim] % 2 == 0))
    return _snake(shape)


def _snake(shape: Sequence[int]) -> np.ndarray:
    """Back and forth along the first dim, and so on along the others: a path, usually not a ring."""
    path = np.zeros((1, 0), np.int64)
    for size in shape:
        rows = [path if i % 2 == 0 else path[::-1] for i in range(size)]
        path = np.concatenate([np.insert(row, row.shape[1], i, axis=1) for i, row in enumerate(rows)])
    return path


def _comb(shape: Sequence[int], dim: int) -> np.ndarray:
    """Out along the teeth of a comb, which lie along ``dim``, and back along its spine, the points 0 of ``dim``.

    With an even number of teeth the last one ends beside the spine. With an odd number it ends at its tip, from which
    only a dim that wraps around leads to the spine.
    """
    rest = _snake([size for d, size in enumerate(shape) if d != dim])
    tooth, teeth = np.arange(1, shape[dim]), len(rest)
    along = [np.zeros(1, np.int64), *(tooth if j % 2 == 0 else tooth[::-1] for j in range(teeth))]
    across = [np.zeros(1, np.int64), *(np.full(len(tooth), j) for j in range(teeth))]
    back = np.arange(teeth - 1, 0, -1)
    along.append(np.zeros_like(back))
    across.append(back)
    return np.insert(rest[np.concatenate(across)], dim, np.concatenate(along), axis=1)
