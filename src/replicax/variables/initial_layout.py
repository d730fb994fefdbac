"""Initial layouts: which layout a new variable gets."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.argument_checks import as_integer
from replicax.devices.arrays import put_among
from replicax.devices.host_values import is_key
from replicax.devices.logical_axes import Axes, parted
from replicax.variables.layout import Copies, Layout, Mirrored, Split
from replicax.variables.partitioners import GroupPartitioner, Partitioner, over_all, split_by
from replicax.variables.slots import launching
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Stored:
    """An initial value that is on its devices already."""

    array: jax.Array
    layout: Layout
    shape: tuple[int, ...]


_colocation: contextvars.ContextVar[tuple[tuple[Replicas, Layout, str], ...]]
_colocation = contextvars.ContextVar("colocation", default=())


@contextlib.contextmanager
def colocated(replicas: Replicas, layout: Layout, what: str) -> Iterator[None]:
    """A context in which new variables of ``replicas`` lie where ``what`` does; that has ``layout``."""
    token = _colocation.set((*_colocation.get(), (replicas, layout, what)))
    try:
        yield
    finally:
        _colocation.reset(token)


def _beside_another(variable: Variable, wishes: Sequence[Any]) -> Layout | None:
    """The layout of ``variable``, if it is created inside :func:`colocated`.

    Raises a ValueError if its arguments ask for another place.
    """
    replicas = variable.replicas
    place = next((p for p in reversed(_colocation.get()) if p[0] is replicas), None)
    if place is None:
        return None
    if any(wish is not None for wish in wishes):
        raise ValueError(
            f"{variable.describe()} is created inside colocate_vars_with, and lies where {place[2]} does: leave "
            "partitioner, partition_dimensions and logical_device out, or create it outside"
        )
    return _beside(place[1], variable)


def layout_for(
    variable: Variable,
    partitioner: Partitioner | None,
    partition_dimensions: Sequence[int] | None,
    logical_device: int | None,
) -> Layout:
    """The layout of ``variable`` on the devices of its strategy; all but the layout is set already.

    The ``partitioner`` splits it over the replicas; by default it is the strategy's. ``partition_dimensions`` split it
    over the logical devices of each replica; then the partitioner splits the part of each logical device. Where that
    does not divide evenly along a dim that both split, the strategy's partitioner does not split it, and the variable's
    own is a ValueError. So are a place that does not exist, and two places at once.
    """
    beside_another = _beside_another(variable, (partitioner, partition_dimensions, logical_device))
    if beside_another is not None:
        return beside_another
    if logical_device is not None:
        count = variable.replicas.num_logical_devices
        if partition_dimensions is not None:
            raise ValueError(
                f"{variable.describe()} can't be split over the logical devices and live on one of them: choose one of "
                "partition_dimensions and logical_device"
            )
        device = checked_logical_device(logical_device, count, variable.describe())
        layout = layout_for(variable, partitioner, None, None)
        if count == 1:
            return layout
        _check_not_central(layout, variable)
        return dataclasses.replace(layout, logical_device=device)
    collection, replicas = variable.collection, variable.replicas
    usual, shape = collection.default_layout, variable.shape
    chosen = None if is_key(variable.dtype) else partitioner or collection.partitioner
    if partition_dimensions is None:
        if variable.is_on_read and replicas.num_replicas > 1:
            return Copies(replicas.num_replicas)
        split = _layout_by(chosen, variable, shape)
        return usual if isinstance(split, Mirrored) else split
    if not variable.is_on_read:
        _check_not_central(usual, variable)
    axes = parted(shape, partition_dimensions, replicas.num_logical_devices, variable.describe())
    if variable.is_on_read:
        return Copies(replicas.num_replicas, axes=axes) if replicas.num_replicas > 1 else Mirrored(axes=axes)
    counts = [int(count) for count in partition_dimensions]
    part = tuple(size // count for size, count in zip(shape, counts, strict=True))
    split = _layout_by(chosen, variable, part)
    composed = _split_evenly_in_parts(shape, axes, counts, split)
    if composed is None and partitioner is not None:
        assert isinstance(split, Split)
        raise ValueError(
            f"{variable.describe()}: partition_dimensions {counts} makes parts of size {part[split.dim]} along dim "
            f"{split.dim}, which do not divide into {split.replicas} pieces of one size for the replicas: pad the dim, "
            "or have the partitioner split along another"
        )
    return Mirrored(axes=axes) if composed is None else composed


def _check_not_central(layout: Layout, variable: Variable) -> None:
    """Raise a ValueError if ``variable``, which is to lie on logical devices, has one place for all replicas."""
    if layout.home is not None:
        raise ValueError(
            f"{variable.describe()} is to be on {layout.home.platform}:{layout.home.id}, and can't be on logical "
            "devices: leave partition_dimensions and logical_device out"
        )


def checked_logical_device(logical_device: Any, count: int, what: str) -> int:
    """The number of a logical device; an error that begins with ``what`` if a replica has no such device."""
    device = as_integer(logical_device)
    if device is None:
        raise TypeError(f"{what}: the id of a logical device must be an int, got {logical_device!r}")
    if not 0 <= device < count:
        raise ValueError(
            f"{what}: there is no logical device {device}: a replica has {count}, with the ids 0 to {count - 1}"
        )
    return device


def move(variable: Variable, logical_device: int) -> None:
    """Move ``variable`` to one logical device of each replica, for good."""
    with launching:
        variable.layout = dataclasses.replace(variable.layout, logical_device=logical_device)
        variable.slot.array = put_among(variable.stored(), variable.sharding)
    for cache in list(variable.slot.caches):
        cache.forget(variable.slot)  # programs that expect it at its old place


def _layout_by(partitioner: Partitioner | None, variable: Variable, shape: tuple[int, ...]) -> Layout:
    """The layout that ``partitioner`` gives a variable, or a part of it; a ValueError if its result does not fit."""
    replicas = variable.replicas
    if partitioner is None:
        return Mirrored()
    size = replicas.device_count
    if isinstance(partitioner, GroupPartitioner):
        size = partitioner.size(size, replicas.slices, replicas.per_device)
        partitioner = partitioner.partitioner or over_all(size)
    dim, pieces = split_by(partitioner, variable.name, shape, variable.dtype)
    return Mirrored() if dim is None else _split_evenly(shape, dim, pieces, size, replicas.device_count // size)


def _split_evenly(shape: tuple[int, ...], dim: int, pieces: int, replicas: int, groups: int) -> Layout:
    """The layout of a value in ``pieces`` pieces along ``dim``, at most one for each replica of a group."""
    pieces = min(pieces, replicas, shape[dim])
    if pieces <= 1:
        return Mirrored()
    return Split(dim, shape[dim], -(-shape[dim] // pieces), replicas, groups)


def _split_evenly_in_parts(shape: tuple[int, ...], axes: Axes, counts: Sequence[int], split: Layout) -> Layout | None:
    """The layout of a value that ``axes`` split into ``counts`` parts of layout ``split``; ``None`` if not evenly."""
    if not isinstance(split, Split):
        return Mirrored(axes=axes)
    parts = counts[split.dim]
    if parts > 1 and split.filling:
        return None
    return dataclasses.replace(split, size=shape[split.dim], piece=split.piece * parts, logical_parts=parts, axes=axes)


def _beside(layout: Layout, variable: Variable) -> Layout:
    """The layout of a variable beside another value, which has ``layout``.

    It is split like the other if its shape allows: along the same dim, into as many pieces as there, or as many as it
    has room for. Otherwise it is whole in the same places.
    """
    replicas, shape = variable.replicas, variable.shape
    is_stacked = variable.is_on_read and replicas.num_replicas > 1
    splits = not is_key(variable.dtype)
    if not is_stacked and layout.home is not None:
        return layout
    parts = [math.prod(replicas.mesh.shape[axis] for axis in dim) for dim in layout.axes]
    fits = len(parts) == len(shape) and all(size % count == 0 for size, count in zip(shape, parts, strict=True))
    axes = layout.axes if fits else ()
    if is_stacked:
        return Copies(replicas.num_replicas, axes=axes, logical_device=layout.logical_device)
    if isinstance(layout, Split) and splits and layout.dim < len(shape):
        if shape[layout.dim] == layout.size and (fits or layout.logical_parts == 1):
            return dataclasses.replace(layout, axes=axes)
        if not any(layout.axes):
            pieces = -(-layout.size // layout.piece)
            split = _split_evenly(shape, layout.dim, pieces, layout.replicas, layout.groups)
            return dataclasses.replace(split, logical_device=layout.logical_device)
    return Mirrored(axes=axes, logical_device=layout.logical_device)
