"""Partitioners: the number of pieces of a variable, and the dim along which it is split.

A partitioner is called with a variable's shape and dtype, and returns the number of pieces along each
dim: ``[1, 4]`` splits a matrix by its columns into four. At most one number may be more than 1. There is at most
one piece for each replica, and for each index of the dim; pieces may differ in size. A :class:`GroupPartitioner` has
such a function split variables over the replicas of a group, instead of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.argument_checks import as_integer, checked_integer

PieceCounts = Callable[[tuple[int, ...], Any], Sequence[int]]
"""From a variable's shape and dtype to its number of pieces along each dim."""


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner:
    """A fixed number of pieces. All have the same size, but the last ones may be smaller or empty.

    Attributes:
      num_shards: the number of pieces.
      dim: the dim to split along; negative counts from the end.

    >>> import replicax
    >>> replicax.variables.FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    num_shards: int
    dim: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, "num_shards")

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        return _along(shape, self.dim, self.num_shards)


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner:
    """As many pieces as a minimum size goes into the variable's; the last ones may be smaller or empty.

    Attributes:
      min_shard_bytes: the smallest size of a piece.
      max_shards: the largest number of pieces.
      dim: the dim to split along; negative counts from the end.

    >>> import replicax
    >>> replicax.variables.MinSizePartitioner(min_shard_bytes=40, max_shards=8)((32,), "float32")  # 128 bytes
    [3]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, "min_shard_bytes", "max_shards")

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        return _along(shape, self.dim, min(self.max_shards, _bytes(shape, dtype) // self.min_shard_bytes))


@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner:
    """As few pieces as possible, none larger than a maximum.

    Attributes:
      max_shard_bytes: the largest size of a piece.
      max_shards: the largest number of pieces, even if pieces then are too large; ``None`` for no such limit.
      dim: the dim to split along; negative counts from the end.

    >>> import replicax
    >>> replicax.variables.MaxSizePartitioner(max_shard_bytes=40)((8, 4), "float32")  # 8 rows of 16 bytes
    [4, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        _check_integers(self, "max_shard_bytes", *([] if self.max_shards is None else ["max_shards"]))

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        if not shape:
            return []
        rows = shape[_checked_dim(shape, self.dim)]
        row_bytes = max(1, _bytes(shape, dtype) // max(1, rows))
        rows_in_one = max(1, self.max_shard_bytes // row_bytes)
        pieces = -(-rows // rows_in_one)
        return _along(shape, self.dim, pieces if self.max_shards is None else min(pieces, self.max_shards))


@dataclasses.dataclass(frozen=True)
class GroupPartitioner:
    """Split variables within groups of neighbouring replicas, and mirror them over the groups (HSDP).

    Each group of ``group_size`` replicas has a copy of every variable, of which each of its replicas keeps a piece.
    What a step needs whole is gathered inside each group, without the others. The sum of a gradient is reduce-scattered
    inside each group, and then the pieces are all-reduced across the groups. So a device keeps 1/``group_size`` of
    each variable, which is more than if it were split over all replicas, and only pieces of gradients go between
    groups. That pays where links inside a group are faster than those between groups.

    Replicas are neighbours in the order of their numbers: with 8 replicas and ``group_size=4`` the groups are 0 to 3
    and 4 to 7. Groups may lie within a worker or span several. Where several replicas share a device, what is split is
    split over devices, and a group is one of ``group_size`` devices.

    Attributes:
      group_size: how many replicas share a copy. It must divide the number of replicas, if that is not 1; with 1 each
        replica has all.
        ``None`` means the replicas of one slice, if the devices are of several slices, and otherwise all replicas.
      partitioner: which variables to split, and how; there is at most one piece for each replica of the group. By
        default all of at least 1 KiB, over the whole group, along the largest dim that divides evenly, or else along
        the largest dim.

    Raises:
      ValueError: ``group_size`` is below 1. When a strategy or a variable gets it: it does not divide the number of
        replicas, and the message names both; or it is ``None``, and the replicas don't lie slice by slice, with as many
        in each.
      TypeError: ``partitioner`` is no function; or it is a ``GroupPartitioner``.

    Source: Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022; and Zhao et
    al., "PyTorch FSDP", 2023, which calls it hybrid sharding.

    >>> import replicax, jax.numpy as jnp
    >>> pairs = replicax.variables.GroupPartitioner(group_size=2)
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"], variable_partitioner=pairs)
    >>> with strategy.scope():
    ...     v = replicax.Variable(jnp.zeros((512, 4)), name="v")
    >>> v.layout.describe(strategy.extended.mesh), strategy.local_results(v)[3].shape
    ('split along dim 0 over the 2 replicas of each of 2 groups', (256, 4))
    """

    group_size: int | None = None
    partitioner: PieceCounts | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None:
            _check_integers(self, "group_size")
        if isinstance(self.partitioner, GroupPartitioner):
            raise TypeError(f"GroupPartitioner: a group has no groups of its own, got partitioner={self.partitioner!r}")
        checked_partitioner(self.partitioner)

    def size(self, replicas: int, slices: int, per_device: int = 1) -> int:
        """The number of replicas in a group; those that share a device count as one.

        Args:
          replicas: the number of replicas, counted so.
          slices: the number of slices in which they lie, one after the other, as many in each; 0: they lie otherwise.
          per_device: the number that share each device.

        Raises:
          ValueError: the size does not divide the number of replicas; or there is none, and groups can't be slices.
        """
        if replicas == 1:
            return 1
        if self.group_size is None and not slices:
            raise ValueError(
                "GroupPartitioner: the groups should be slices, but the replicas are not in one slice after the other, "
                "with as many in each: give group_size, or the devices in another order"
            )
        size = replicas // slices if self.group_size is None else self.group_size
        if replicas % size:
            what = "replicas" if per_device == 1 else "devices that replicas share"
            raise ValueError(
                f"GroupPartitioner: group_size {size} does not divide the number of {what}, {replicas}: choose one "
                f"of {', '.join(str(n) for n in range(1, replicas + 1) if replicas % n == 0)}"
            )
        return size


Partitioner = PieceCounts | GroupPartitioner
"""What splits variables over replicas: over all of them, or within groups."""


def over_all(replicas: int, min_bytes: int = 1024) -> PieceCounts:
    """Split variables of at least ``min_bytes`` over all replicas.

    The dim is the largest among those that divide evenly, or else the largest. To split smaller variables would take as
    many collectives, and save almost no memory.
    """

    def partition(shape: tuple[int, ...], dtype: Any) -> list[int]:
        if not shape or _bytes(shape, dtype) < min_bytes:
            return [1] * len(shape)
        dim = max(range(len(shape)), key=lambda d: (shape[d] % replicas == 0, shape[d], -d))
        return _along(shape, dim, replicas)

    return partition


def split_by(partitioner: PieceCounts | None, name: str, shape: tuple[int, ...], dtype: Any) -> tuple[int | None, int]:
    """The dim along which a partitioner splits the variable ``name``, and the number of pieces.

    ``(None, 1)`` if it is not split. Raises a ValueError unless the partitioner returns a positive number for each dim,
    with at most one of them above 1.
    """
    if partitioner is None:
        return None, 1
    returned: Any = partitioner(shape, dtype)
    pieces = list(returned) if isinstance(returned, Sequence | np.ndarray) else [returned] * (len(shape) + 1)
    are_positive = all(isinstance(p, int | np.integer) and p >= 1 for p in pieces)
    if not are_positive or len(pieces) != len(shape) or sum(p > 1 for p in pieces) > 1:
        raise ValueError(
            f"variable {name!r}: the partitioner must return a positive number for each of the {len(shape)} dims of "
            f"{shape}, with at most one of them above 1; got {returned!r}"
        )
    dim = next((d for d, p in enumerate(pieces) if p > 1), None)
    return dim, 1 if dim is None else int(pieces[dim])


def checked_partitioner(partitioner: Partitioner | None) -> Partitioner | None:
    """``partitioner``, or a TypeError if it is something else."""
    if partitioner is not None and not callable(partitioner) and not isinstance(partitioner, GroupPartitioner):
        raise TypeError(
            "a partitioner is a function from shape and dtype to a number for each dim, such as "
            f"FixedShardsPartitioner(2), got {partitioner!r}"
        )
    return partitioner


def _along(shape: tuple[int, ...], dim: int, pieces: int) -> list[int]:
    if not shape:
        return []
    split = _checked_dim(shape, dim)
    return [max(1, min(pieces, size)) if d == split else 1 for d, size in enumerate(shape)]


def _checked_dim(shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"partitioner: dim {dim} is out of range for a variable of shape {shape}")
    return dim % len(shape)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _check_integers(partitioner: Any, *positive: str) -> None:
    for name in positive:
        checked_integer(getattr(partitioner, name), f"{type(partitioner).__name__}: {name}")
    if as_integer(getattr(partitioner, "dim", 0)) is None:
        raise ValueError(f"{type(partitioner).__name__}: dim must be an int, got {partitioner.dim!r}")
