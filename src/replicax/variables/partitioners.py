"""Partitioners: the number of pieces of a variable, and the dim along which it is split.

A partitioner is called with a variable's shape and dtype, and returns the number of pieces along each
dim: ``[1, 4]`` splits a matrix by its columns into four. At most one number may be more than 1. There is at most
one piece for each replica, and for each index of the dim; pieces may differ in size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

Partitioner = Callable[[tuple[int, ...], Any], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner:
    """A fixed number of pieces. All have the same size, but the last ones may be smaller or empty.

    Attributes:
      num_shards: the number of pieces.
      dim: the dim to split along; negative counts from the end.

    >>> import replicax
    >>> replicax.FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    num_shards: int
    dim: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "num_shards")

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        return _along(shape, self.dim, self.num_shards)


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner:
    """As many pieces as possible, none smaller than a minimum; only the last piece may be smaller.

    Attributes:
      min_shard_bytes: the smallest size of a piece.
      max_shards: the largest number of pieces.
      dim: the dim to split along; negative counts from the end.

    >>> import replicax
    >>> replicax.MinSizePartitioner(min_shard_bytes=40, max_shards=8)((32,), "float32")  # 128 bytes
    [3]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "min_shard_bytes", "max_shards")

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
    >>> replicax.MaxSizePartitioner(max_shard_bytes=40)((8, 4), "float32")  # 8 rows of 16 bytes
    [4, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "max_shard_bytes", *([] if self.max_shards is None else ["max_shards"]))

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> list[int]:
        if not shape:
            return []
        rows = shape[_checked(shape, self.dim)]
        row_bytes = max(1, _bytes(shape, dtype) // max(1, rows))
        rows_in_one = max(1, self.max_shard_bytes // row_bytes)
        pieces = -(-rows // rows_in_one)
        return _along(shape, self.dim, pieces if self.max_shards is None else min(pieces, self.max_shards))


def over_all(replicas: int, min_bytes: int = 1024) -> Partitioner:
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


def checked_partitioner(partitioner: Any) -> Partitioner | None:
    """``partitioner``, after a check of its type.

    Raises:
      TypeError: it is not callable.
    """
    if partitioner is not None and not callable(partitioner):
        raise TypeError(
            "a partitioner is a function from shape and dtype to a number for each dim, such as "
            f"FixedShardsPartitioner(2), got {partitioner!r}"
        )
    checked: Partitioner | None = partitioner
    return checked


def _along(shape: tuple[int, ...], dim: int, pieces: int) -> list[int]:
    if not shape:
        return []
    split = _checked(shape, dim)
    return [max(1, min(pieces, size)) if d == split else 1 for d, size in enumerate(shape)]


def _checked(shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"partitioner: dim {dim} is out of range for a variable of shape {shape}")
    return dim % len(shape)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _check_positive(partitioner: Any, *names: str) -> None:
    for name in names:
        value = getattr(partitioner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(partitioner).__name__}: {name} must be a positive int, got {value!r}")
