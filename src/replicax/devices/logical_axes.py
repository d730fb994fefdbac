"""Logical axes: split an array into parts, one for each logical device of a replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from replicax.argument_checks import as_integer
from replicax.devices.mesh import REPLICA_AXIS, in_logical_mesh, logical_axes

Axes = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dim of an array; empty for an array that every logical device has in whole."""


def parted(shape: Sequence[int], partition_dimensions: Any, logical_devices: int, what: str) -> Axes:
    """Assign the logical axes of a mesh to the dims of an array, so that each dim is split as requested.

    Raises:
      ValueError: it can't be; the message says why.

    >>> parted((4, 6, 8), [1, 2, 4], 8, "x")
    ((), ('logical0',), ('logical1', 'logical2'))
    """
    parts = _parsed_counts(partition_dimensions, what)
    if len(parts) != len(shape):
        raise ValueError(
            f"{what} has {len(shape)} dims, but partition_dimensions {list(parts)} has {len(parts)} entries: say for "
            "each dim into how many parts to split it, 1 for not at all"
        )
    if math.prod(parts) != logical_devices:
        raise ValueError(
            f"{what}: partition_dimensions {list(parts)} makes {math.prod(parts)} parts, but a replica has "
            f"{logical_devices} logical device(s): the product must be {logical_devices}"
        )
    for dim, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise ValueError(
                f"{what}: dim {dim} of size {size} does not divide into {count} parts ({size} = {count} × "
                f"{size // count} + {size % count}); pad it, or choose other partition_dimensions than {list(parts)}"
            )
    free = logical_axes(logical_devices)
    return tuple(_taken_axes(free, count) for count in parts)


def _parsed_counts(partition_dimensions: Any, what: str) -> tuple[int, ...]:
    is_list = isinstance(partition_dimensions, Iterable)
    parts = tuple(as_integer(p) or 0 for p in partition_dimensions) if is_list else (0,)
    if any(p < 1 for p in parts):
        raise ValueError(
            f"{what}: partition_dimensions must be a list of positive ints, one for each dim, got "
            f"{partition_dimensions!r}"
        )
    return parts


def _taken_axes(free: dict[str, int], count: int) -> tuple[str, ...]:
    """Take axes whose sizes multiply to ``count`` out of ``free``."""
    taken = []
    for axis, size in list(free.items()):
        if count % size == 0:
            taken.append(axis)
            count //= free.pop(axis)
    return tuple(taken)


def spec_of(axes: Axes, replica_dim: int | None = None, inner: bool = False) -> PartitionSpec:
    """The partition spec of an array, each dim split by ``axes``, and ``replica_dim`` also over the replicas.

    If ``inner``, each part is split over the replicas, instead of each replica's piece into parts.
    """
    dims = list(axes) + [()] * (0 if replica_dim is None else replica_dim + 1 - len(axes))
    if replica_dim is not None:
        dims[replica_dim] = (*dims[replica_dim], REPLICA_AXIS) if inner else (REPLICA_AXIS, *dims[replica_dim])
    while dims and not dims[-1]:
        dims.pop()
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in dims))


def constrained(array: Any, axes: Axes) -> Any:
    """``array`` in a step, with a constraint that puts its parts on the logical devices as in ``axes``.

    The constraint is an operation of the program, which differentiation and batching keep. Where a replica has one
    device, as in the per-replica executor, it does nothing.
    """
    return lax.with_sharding_constraint(array, spec_of(axes)) if in_logical_mesh() else array


def on_logical_devices(fn: Callable[[Any], Any], axes: Axes) -> Callable[[Any], Any]:
    """Apply ``fn``, which takes and returns an array split by ``axes``, to the part of each logical device.

    The compiler alone would gather an array over its logical axes before it gathers or scatters it over replicas.
    """
    if not any(axes):
        return fn
    names = set(jax.sharding.get_abstract_mesh().axis_names) - {REPLICA_AXIS}
    spec = spec_of(axes)
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)


def over_replicas(spec: PartitionSpec) -> PartitionSpec:
    """The part of ``spec`` that is about replicas."""
    dims = [REPLICA_AXIS if d == REPLICA_AXIS or (isinstance(d, tuple) and REPLICA_AXIS in d) else None for d in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)
