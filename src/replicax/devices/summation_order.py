"""Summation order: sums over replicas that have the same bits on any number of devices.

The terms of a sum are the leaves of a binary tree, in the order of the replicas: neighbours are added in pairs, then
the sums of the pairs, and so on; a term without a neighbour moves up one level. The tree depends only on the number of
terms. It has a node for each block of ``2**h`` neighbours that begins at a multiple of that. So a device that has a
block adds it up alone, and one that has ``d * 2**h`` replicas, with an odd d, adds up d blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.devices.mesh import REPLICA_AXIS


def added_in_pairs(terms: Any) -> Any:
    """The sum of ``terms`` along dim 0."""
    while terms.shape[0] > 1:
        even = terms.shape[0] // 2 * 2
        pairs = lax.slice_in_dim(terms, 0, even).reshape(even // 2, 2, *terms.shape[1:])
        sums = lax.index_in_dim(pairs, 0, 1, keepdims=False) + lax.index_in_dim(pairs, 1, 1, keepdims=False)
        terms = jnp.concatenate([sums, terms[even:]]) if even < terms.shape[0] else sums
    return lax.index_in_dim(terms, 0, keepdims=False)


def elements_in_order(array: Any, dims: Sequence[int]) -> Any:
    """The sum of an array's elements along ``dims``, in an order that depends only on the sizes of the dims.

    A compiler chooses its own order, which depends on the layout of the array in memory and on the surrounding
    computation. Here each addition adds two arrays, element by element. The largest of ``dims`` comes last: a device
    that has a piece of the array along that dim then adds up as much as others, and only a vector is left.
    """
    [total] = elements_p.bind(array, along=tuple(dims))
    return total


def last_of(shape: Sequence[int], dims: Sequence[int]) -> int | None:
    """The dim along which elements are added last; ``None`` if none are added."""
    return max(dims, key=lambda d: (shape[d], -d), default=None)


def all_but_last(array: Any, dims: Sequence[int], last: int | None) -> Any:
    """The sum along all of ``dims`` except ``last``; these keep a size of 1.

    ``array`` may be a piece along ``last``, which :func:`last_of` has chosen.
    """
    array = lax.optimization_barrier(array)
    shape = [1 if d in dims and d != last else n for d, n in enumerate(array.shape)]
    # Merge neighbouring dims of the sum.
    runs = itertools.groupby(range(array.ndim), key=lambda d: -1 if d in dims and d != last else d)
    groups = [(key == -1, math.prod(array.shape[d] for d in run)) for key, run in runs]
    array = array.reshape([size for _, size in groups])
    for axis, (is_added, _) in reversed([*enumerate(groups)]):
        array = added_along(array, axis) if is_added else array
    return array.reshape(shape)


def added_along(array: Any, axis: int) -> Any:
    """The sum along a dim, which keeps a size of 1."""
    while (size := array.shape[axis]) > 1:
        fan = min(FAN, 1 << (size.bit_length() - 1))
        each = size // fan
        rows = [lax.slice_in_dim(array, i * each, (i + 1) * each, axis=axis) for i in range(fan)]
        while len(rows) > 1:
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
        left = lax.slice_in_dim(array, fan * each, size, axis=axis)
        array = jnp.concatenate([rows[0], left], axis) if left.size else rows[0]
    return array if array.size else jnp.zeros([1 if d == axis else n for d, n in enumerate(array.shape)], array.dtype)


FAN = 8  # a power of two: so many terms are added in one pass through memory


def _all_elements(array: Any, *, along: tuple[int, ...]) -> list[Any]:
    last = last_of(array.shape, along)
    total = all_but_last(array, along, last)
    return [lax.squeeze(total if last is None else added_along(total, last), along)]


elements_p = _jax.composite_primitive("replicax_elements", _all_elements)
"""``y = elements[along=…] x``: the sum along these dims, in a fixed order."""


def sum_in_order(blocks: Any, replicas: int) -> Any:
    """The sum over all devices of ``[count, *shape]``, the sums of each device's blocks.

    Each device adds up its part of the array, and then gathers all parts. The bytes are those of a ring, ``2 (n - 1) /
    n`` times those of the blocks on n devices. The code after this must compile alike for any number of devices: so the
    array is padded for as many parts as there are replicas, and gathered even with one device.
    """
    count, *shape = blocks.shape
    flat = blocks.reshape(count, -1)
    size = flat.shape[1]
    parts = jnp.pad(flat, ((0, 0), (0, -size % replicas)))
    total = lax.all_gather(part_in_order(parts, 1), REPLICA_AXIS, axis=0, tiled=True)
    return lax.slice_in_dim(total, 0, size).reshape(shape)


def part_in_order(blocks: Any, dim: int) -> Any:
    """This device's part of the sum over all devices of ``[count, …, parts, …]``: one of the parts along ``dim``."""
    if lax.axis_size(REPLICA_AXIS) == 1 or _jax.coordination_client() is None:
        return added_in_pairs(_exchanged_parts(blocks, dim))
    return lax.platform_dependent(
        blocks,
        cpu=lambda x: added_in_pairs(_own_of_all(x, dim)),
        default=lambda x: added_in_pairs(_exchanged_parts(x, dim)),
    )


def _exchanged_parts(blocks: Any, dim: int) -> Any:
    return lax.all_to_all(blocks, REPLICA_AXIS, split_axis=dim, concat_axis=0, tiled=True)


def _own_of_all(blocks: Any, dim: int) -> Any:
    size = blocks.shape[dim] // lax.axis_size(REPLICA_AXIS)
    everyones = lax.all_gather(blocks, REPLICA_AXIS, axis=0, tiled=True)
    return lax.dynamic_slice_in_dim(everyones, lax.axis_index(REPLICA_AXIS) * size, size, axis=dim)
