"""Summation order: sums over replicas that have the same bits on any number of devices.

The terms of a sum are the leaves of a binary tree, in the order of the replicas: neighbours are added in pairs, their
sums are again, and so on; who is left over goes up by itself. The tree depends on the number of terms only. It has a
node for each block of ``2**h`` neighbours that begins at a multiple of that. So a device that has a block adds it up by
itself, and one that has ``d * 2**h`` replicas, with an odd d, adds up d blocks.
"""

from __future__ import annotations

import dataclasses
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
    """The sum of an array's elements along ``dims``, in an order that depends on the sizes of all dims only.

    A compiler adds up in an order that suits it: it depends on how the array lies in memory, and on what is computed
    beside. Here each addition is one of two arrays, element by element.
    """
    kept = [d for d in range(array.ndim) if d not in dims]
    array = lax.optimization_barrier(array)
    terms = lax.transpose(array, [*dims, *kept]).reshape(-1, *(array.shape[d] for d in kept))
    while terms.shape[0] > 1:
        fan = min(_FAN, 1 << (terms.shape[0].bit_length() - 1))
        each, rest = divmod(terms.shape[0], fan)
        rows = [lax.slice_in_dim(terms, i * each, (i + 1) * each) for i in range(fan)]
        while len(rows) > 1:
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
        terms = jnp.concatenate([rows[0], terms[fan * each :]]) if rest else rows[0]
    return lax.index_in_dim(terms, 0, keepdims=False) if terms.shape[0] else jnp.zeros(terms.shape[1:], terms.dtype)


_FAN = 8  # a power of two: so many terms are added in one go through memory


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How the terms of a device are added up, of which there is one after the other.

    Attributes:
      height: of the largest blocks of which the device has all: they are of ``2**height`` terms.
      count: how many of them it has.
    """

    height: int
    count: int

    @classmethod
    def of(cls, terms: int) -> Blocks:
        """Those of so many neighbouring terms, on each device."""
        height = (terms & -terms).bit_length() - 1
        return cls(height, terms >> height)

    def no_terms(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What is known before the first term: room for a sum of each height, and for those of whole blocks."""
        return jnp.zeros((self.height + self.count, *shape), dtype)

    def with_term(self, known: Sequence[Any], terms: Sequence[Any], number: Any) -> list[Any]:
        """What is known after one more term of each sum: sums of blocks that are complete are added to these.

        Args:
          known: what is known so far, of each sum.
          terms: the next term of each.
          number: how many have come before.
        """

        def completes(state: tuple[Any, list[Any]]) -> Any:
            return (state[0] < self.height) & (jnp.right_shift(number, state[0]) & 1 == 1)

        def complete(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            height, sums = state
            before = [lax.dynamic_index_in_dim(k, height, keepdims=False) for k in known]
            return height + 1, [b + s for b, s in zip(before, sums, strict=True)]

        height, sums = jnp.int32(0), list(terms)
        if self.height:
            height, sums = lax.while_loop(completes, complete, (height, sums))
        place = jnp.where(height < self.height, height, self.height + jnp.right_shift(number, self.height))
        return [lax.dynamic_update_index_in_dim(k, s, place, 0) for k, s in zip(known, sums, strict=True)]

    def sums(self, known: Any) -> Any:
        """``[count, *shape]``: the sums of the blocks, when all terms have come."""
        return lax.slice_in_dim(known, self.height, self.height + self.count)


def sum_in_order(blocks: Any, replicas: int) -> Any:
    """The sum over all devices of ``[count, *shape]``, the sums of the blocks that each has.

    Each device adds up its part of the array, and then all get all parts. The bytes are those of a ring, ``2 (n - 1) /
    n`` times those of the blocks on n devices. What comes after this is compiled alike for any number of devices: so
    the array is filled up for as many parts as there are replicas, and gathered also if there is one device.
    """
    count, *shape = blocks.shape
    flat = blocks.reshape(count, -1)
    size = flat.shape[1]
    parts = jnp.pad(flat, ((0, 0), (0, -size % replicas)))
    total = lax.all_gather(part_in_order(parts, 1), REPLICA_AXIS, axis=0, tiled=True)
    return lax.slice_in_dim(total, 0, size).reshape(shape)


def part_in_order(blocks: Any, dim: int) -> Any:
    """This device's part of the sum over all devices of ``[count, …, parts, …]``: one of as many along ``dim``."""
    if lax.axis_size(REPLICA_AXIS) == 1 or _jax.coordination_client() is None:
        return added_in_pairs(_exchanged(blocks, dim))
    return lax.platform_dependent(
        blocks,
        cpu=lambda x: added_in_pairs(_own_of_all(x, dim)),
        default=lambda x: added_in_pairs(_exchanged(x, dim)),
    )


def _exchanged(blocks: Any, dim: int) -> Any:
    return lax.all_to_all(blocks, REPLICA_AXIS, split_axis=dim, concat_axis=0, tiled=True)


def _own_of_all(blocks: Any, dim: int) -> Any:
    size = blocks.shape[dim] // lax.axis_size(REPLICA_AXIS)
    everyones = lax.all_gather(blocks, REPLICA_AXIS, axis=0, tiled=True)
    return lax.dynamic_slice_in_dim(everyones, lax.axis_index(REPLICA_AXIS) * size, size, axis=dim)
