"""``Torus``: chips on a grid, and how many links lie between two of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Torus:
    """Chips on a grid of three dims, each with a link to its neighbours along every dim.

    Along a dim that wraps around, the last chip is the first one's neighbour too.

    Attributes:
      shape: chips along x, y and z.
      wrap: whether there are links from the last chip to the first, along x, y and z. Along a dim of two chips
        these are neighbours anyway, so it never counts as wrapping around.

    >>> from replicax.tpu.torus import Torus
    >>> ring = Torus((8, 1, 1), wrap=(True, False, False))
    >>> int(ring.hops((0, 0, 0), (7, 0, 0))), int(ring.hops((0, 0, 0), (4, 0, 0)))
    (1, 4)
    """

    shape: tuple[int, int, int]
    wrap: tuple[bool, bool, bool] = (False, False, False)

    def __post_init__(self) -> None:
        around = tuple(bool(w) and size > 2 for w, size in zip(self.wrap, self.shape, strict=True))
        object.__setattr__(self, "wrap", around)

    def hops(self, a: ArrayLike, b: ArrayLike) -> np.ndarray:
        """How many links a message takes from chip ``a`` to chip ``b`` by the shortest way; 0 if they are the same.

        Args:
          a: integer coordinates ``[..., 3]``.
          b: the same; shapes broadcast.

        Returns:
          int64 ``[...]``.
        """
        straight = np.abs(np.asarray(a, np.int64) - np.asarray(b, np.int64))
        around = np.asarray(self.shape) - straight
        return np.where(self.wrap, np.minimum(straight, around), straight).sum(-1)

    def links(self) -> np.ndarray:
        """Every link once: int64 ``[links, 2, 3]``, the coordinates of its two ends.

        A link that wraps around goes from the last chip to the first; the others from a chip to the next.
        """
        chips = points(self.shape)
        found = [np.zeros((0, 2, 3), np.int64)]
        for dim, (size, wraps) in enumerate(zip(self.shape, self.wrap, strict=True)):
            step = np.eye(3, dtype=np.int64)[dim]
            starts = chips if wraps else chips[chips[:, dim] < size - 1]
            found.append(np.stack([starts, (starts + step) % self.shape], axis=1))
        return np.concatenate(found)


def points(sizes: Iterable[int]) -> np.ndarray:
    """All points of a grid, the last coordinate fastest: int64 ``[points, dims]``.

    >>> from replicax.tpu.torus import points
    >>> points((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    shape = tuple(int(size) for size in sizes)
    return np.indices(shape).reshape(len(shape), -1).T
