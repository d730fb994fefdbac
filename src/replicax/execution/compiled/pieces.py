"""Pieces: values of which each replica of a group holds a part, and the collectives between the parts and the whole.

What is gathered or reduced over the pieces of a value goes between the replicas of each group, as each group has all
pieces. A sum over all replicas of which each needs a piece is scattered in each group first. Then each piece is summed
over the groups, by those replicas that have it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.collectives import PACK_LIMIT, packs
from replicax.communication import after
from replicax.devices.logical_axes import on_logical_devices
from replicax.devices.mesh import REPLICA_AXIS
from replicax.devices.summation_order import part_in_order, sum_in_order
from replicax.variables.layout import Split


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """One replica's piece of a value that is the same for all of them."""

    array: Any  # the piece; what fills it up may hold anything
    split: Split  # which part of the value it is
    # Whether it is a piece of the sum over the replicas of a value that the program has yet to sum.
    summed: bool = False


def without_dims(split: Split, dims: Collection[int]) -> Split:
    """The split of a value without these dims."""
    axes = tuple(dim for d, dim in enumerate(split.axes) if d not in dims)
    return dataclasses.replace(split, dim=split.dim - sum(d < split.dim for d in dims), axes=axes)


def own_number(split: Split) -> Any:
    """The number of this replica's piece (int32)."""
    replica = lax.axis_index(REPLICA_AXIS)
    return replica if split.groups == 1 else replica % split.replicas


def start_of_own(split: Split) -> Any:
    """The index at which this replica's piece begins, along the dim that is split (int32), if it is in one place."""
    return own_number(split) * split.piece


def own_piece(whole: Any, split: Split) -> Any:
    """This replica's piece of a value that every replica has."""

    def own(whole: Any) -> Any:
        return own_piece_along(whole, split, split.dim)

    return on_logical_devices(own, split.axes)(split.laid_out(whole))


def own_piece_along(array: Any, split: Split, dim: int) -> Any:
    """This replica's part of an array that is divided along ``dim`` among the replicas of a group."""
    size = array.shape[dim] // split.replicas
    return lax.dynamic_slice_in_dim(array, own_number(split) * size, size, axis=dim)


def gathered(piece: Any, split: Split) -> Any:
    """The whole value, from the pieces of the replica's group (one all-gather)."""

    def gather(piece: Any) -> Any:
        return lax.all_gather(piece, REPLICA_AXIS, axis_index_groups=replica_groups(split), axis=split.dim, tiled=True)

    return split.whole(on_logical_devices(gather, split.axes)(piece))


def stacked_parts(part: Any, split: Split) -> Any:
    """``[replicas of a group, *shape]``: the part of each replica of the group (one all-gather)."""
    return lax.all_gather(part, REPLICA_AXIS, axis_index_groups=replica_groups(split))


def summed_parts(part: Any, split: Split) -> Any:
    """The sum of the parts of a group: one all-reduce, or an all-gather if there are several groups.

    All groups must get the same bits, as the sum may change their copies of a value. All-reduces of different devices
    need not add in the same order.
    """
    if split.groups == 1:
        return lax.psum(part, REPLICA_AXIS)
    return jnp.sum(stacked_parts(part, split), axis=0, dtype=part.dtype)


def replica_groups(split: Split) -> list[list[int]] | None:
    """The replicas of each group; ``None`` if there is only one."""
    if split.groups == 1:
        return None
    return [list(range(i * split.replicas, (i + 1) * split.replicas)) for i in range(split.groups)]


def piece_holders(split: Split) -> list[list[int]]:
    """The replicas that have the same piece, for each piece."""
    return [list(range(i, split.replicas * split.groups, split.replicas)) for i in range(split.replicas)]


def summed_pieces(arrays: Sequence[Any], splits: Sequence[Split], in_group: bool, in_order: bool) -> list[Any]:
    """This replica's piece of the sum over the replicas of each array; with ``in_group``, over those of its group.

    A reduce-scatter for each large array, and an all-reduce of the pieces if there are several groups; small arrays of
    a dtype and the same groups are packed into one. With ``in_order``, terms are added in a fixed order, by exchanges.
    """
    results: list[Any] = [None] * len(arrays)
    for count in dict.fromkeys(split.groups for split in splits):
        alike = [i for i, split in enumerate(splits) if split.groups == count]
        pieces = _packed_pieces([arrays[i] for i in alike], [splits[i] for i in alike], in_group, in_order)
        for i, piece in zip(alike, pieces, strict=True):
            results[i] = piece
    return results


def summed_over_groups(piece: Any, split: Split) -> Any:
    """The sum of this piece over the groups: one all-reduce, if there are several."""
    if split.groups == 1:
        return piece

    def add(piece: Any) -> Any:
        return lax.psum(piece, REPLICA_AXIS, axis_index_groups=piece_holders(split))

    return on_logical_devices(add, split.axes)(piece)


def _packed_pieces(arrays: Sequence[Any], splits: Sequence[Split], in_group: bool, in_order: bool) -> list[Any]:
    """The result of :func:`summed_pieces` for arrays with the same groups."""
    results: list[Any] = [None] * len(arrays)
    groups, whole = packs(arrays, PACK_LIMIT)
    for i in whole:
        results[i] = _scattered_sum(splits[i].laid_out(arrays[i]), splits[i], splits[i].dim, in_group, in_order)
    for members in groups:
        rows = [jnp.moveaxis(splits[i].laid_out(arrays[i]), splits[i].dim, 0) for i in members]
        flat = [row.reshape(splits[i].replicas, -1) for i, row in zip(members, rows, strict=True)]
        pack = _scattered_sum(jnp.concatenate(flat, axis=1), splits[members[0]], 0, in_group, in_order)
        offset = 0
        for i, row, part in zip(members, rows, flat, strict=True):
            piece = lax.slice_in_dim(pack, offset, offset + part.shape[1], axis=1)
            results[i] = jnp.moveaxis(piece.reshape(splits[i].piece, *row.shape[1:]), 0, splits[i].dim)
            offset += part.shape[1]
    return results


def _scattered_sum(array: Any, split: Split, dim: int, in_group: bool, in_order: bool) -> Any:
    """This replica's part of the sum, divided along ``dim`` among the replicas of a group."""
    if in_order:
        assert not in_group, "loops whose groups come together at the end add in another order"
        if split.groups == 1:
            return part_in_order(array[None], dim + 1)
        return own_piece_along(sum_in_order(array[None], split.replicas * split.groups), split, dim)
    groups = replica_groups(split)

    def scattered(array: Any) -> Any:
        piece = lax.psum_scatter(array, REPLICA_AXIS, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
        several = split.groups > 1 and not in_group
        return lax.psum(piece, REPLICA_AXIS, axis_index_groups=piece_holders(split)) if several else piece

    def own_of_sum(array: Any) -> Any:
        total = lax.psum(array, REPLICA_AXIS, axis_index_groups=groups if in_group else None)
        return own_piece_along(total, split, dim)

    def scatter(array: Any) -> Any:
        if _jax.coordination_client() is None:
            return scattered(array)
        # Between processes, CPUs sum by Gloo, whose reduce-scatter waits for 30 s only, whatever JAX is told, and gives
        # wrong numbers on some builds of jaxlib (jax#40831, jax#40830). Its all-reduce does neither, and takes no
        # longer.
        return lax.platform_dependent(array, cpu=own_of_sum, default=scattered)

    return on_logical_devices(scatter, split.axes)(array)


class Gathers:
    """Gathers pieces when they are used, and no earlier than it pays.

    A value is gathered for each of its uses, unless the last one is near, so that it need not be kept: forward and
    again backward. A compiler that sees all of a program's gathers would like to do them at once, or only once, and
    then hold the whole model. So each is made to wait for something that is computed shortly before: until then at most
    ``ahead`` bytes have been gathered beyond what is in use. In a loop over replicas, the first gathers wait for
    ``iteration``, a value that each iteration computes: all of them gather the same, and the compiler would otherwise
    do it once, before the loop.
    """

    def __init__(self, ahead: int, iteration: Any = None) -> None:
        self.ahead = ahead
        self._total = 0
        self._recent: dict[int, tuple[int, Piece, Any]] = {}
        self._tokens: collections.deque[tuple[int, Any]] = collections.deque()
        if iteration is not None:
            self._tokens.append((-ahead, iteration))
        # By id: when it was computed, and the value, so that no other object gets the id.
        self._computed: dict[int, tuple[int, Any]] = {}

    def whole(self, piece: Piece) -> Any:
        """The value that ``piece`` is a part of."""
        recent = self._recent.get(id(piece))
        if recent is not None and self._total - recent[0] <= self.ahead:
            return recent[2]
        while len(self._tokens) > 1 and self._tokens[1][0] <= self._total - self.ahead:
            self._tokens.popleft()
        array = piece.array
        if self._tokens and self._tokens[0][0] <= self._total - self.ahead:
            array = after(array, self._tokens[0][1])
        whole = gathered(array, piece.split)
        self._total += whole.size * whole.dtype.itemsize
        self._recent[id(piece)] = self._total, piece, whole
        return whole

    def computed(self, values: Sequence[Any]) -> None:
        """Note the next values of the program."""
        for value in values:
            if isinstance(value, jax.Array) and value.size and jnp.issubdtype(value.dtype, jnp.floating):
                self._computed[id(value)] = len(self._computed), value

    def used_with(self, values: Sequence[Any]) -> None:
        """Note that gathered values are used with ``values``; the latest of these shows how far the program is."""
        computed = [self._computed[id(value)] for value in values if id(value) in self._computed]
        if computed:
            self._tokens.append((self._total, max(computed, key=lambda entry: entry[0])[1]))
