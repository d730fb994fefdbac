"""An order of the chips of a block in which each is the next one's neighbour, and if possible the last the first's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ring_order(shape: Sequence[int], wrap: Sequence[bool]) -> np.ndarray:
    """All points of a grid, each a neighbour of the one before it.

    They close to a ring where the grid allows it: if it wraps around along some dim, or if it has an even number of
    points and at least two dims of more than one. (A grid with an odd number of points has none: along every link the
    sum of the coordinates changes between even and odd.)

    Args:
      shape: points along each dim.
      wrap: along which dims the last point is a neighbour of the first.

    Returns:
      int64 ``[points, dims]``, from the origin.

    >>> from replicax.tpu.ring_order import ring_order
    >>> ring_order((3, 2), (False, False)).tolist()
    [[0, 0], [1, 0], [2, 0], [2, 1], [1, 1], [0, 1]]
    """
    n = int(np.prod(shape))
    around = [dim for dim, size in enumerate(shape) if wrap[dim] and size > 2]
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    if around:
        return _comb(shape, around[0])
    if n % 2 == 0 and len(wide) > 1:
        # The teeth of the comb are as many as there are points along the other dims: that number has to be even.
        return _comb(shape, next(dim for dim in wide if n // shape[dim] % 2 == 0))
    return _snake(shape)


def _snake(shape: Sequence[int]) -> np.ndarray:
    """There and back along the first dim, and so on along the others: a path, as a rule not a ring."""
    path = np.zeros((1, 0), np.int64)
    for size in shape:
        turns = [path if i % 2 == 0 else path[::-1] for i in range(size)]
        path = np.concatenate([np.insert(turn, turn.shape[1], i, axis=1) for i, turn in enumerate(turns)])
    return path


def _comb(shape: Sequence[int], dim: int) -> np.ndarray:
    """Out along the teeth of a comb, which lie along ``dim``, and home along its back, the points 0 of ``dim``.

    With an even number of teeth the last one ends beside the back. With an odd number it ends at its tip, from where
    only a dim that wraps around leads to the back.
    """
    rest = _snake([size for d, size in enumerate(shape) if d != dim])
    tooth, teeth = np.arange(1, shape[dim]), len(rest)
    along = [np.zeros(1, np.int64), *(tooth if j % 2 == 0 else tooth[::-1] for j in range(teeth))]
    across = [np.zeros(1, np.int64), *(np.full(len(tooth), j) for j in range(teeth))]
    back = np.arange(teeth - 1, 0, -1)
    along.append(np.zeros_like(back))
    across.append(back)
    return np.insert(rest[np.concatenate(across)], dim, np.concatenate(along), axis=1)
