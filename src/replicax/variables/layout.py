"""Layouts: how a variable's value lies on the devices of its strategy.

A value is stored as one array over the mesh, the *stored* array. A layout converts between the two, and says which part
each replica has.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from replicax.devices.logical_axes import Axes, spec_of
from replicax.devices.mesh import REPLICA_AXIS, logical_device_mesh
from replicax.locality import Locality, M, T


class Layout(Protocol):
    """How a value is stored; see the module's docstring."""

    @property
    def locality(self) -> Locality:
        """Of the value inside a step."""

    @property
    def axes(self) -> Axes:
        """How each replica's value is split over its logical devices; empty if it is not."""

    @property
    def logical_device(self) -> int | None:
        """The number of the logical device of each replica that has the value; ``None`` for all of them."""

    @property
    def spec(self) -> PartitionSpec:
        """Of the stored array, in a program."""

    @property
    def whole_spec(self) -> PartitionSpec:
        """Of the whole value; only for layouts in which all replicas have the same value."""

    @property
    def home(self) -> jax.Device | None:
        """The device that has the stored array between programs; ``None`` if it stays on the mesh."""

    def mesh(self, mesh: Mesh) -> Mesh:
        """The part of the strategy's mesh that has the stored array."""

    def sharding(self, mesh: Mesh) -> Sharding:
        """Of the stored array, between programs."""

    def whole(self, stored: Any) -> Any:
        """The value that ``stored`` holds; only for layouts in which all replicas have the same value."""

    def parts(self, whole: Any, replicas: Sequence[int]) -> tuple[Any, ...]:
        """The part of each of these replicas of a value that is the same for all."""

    def stored(self, value: Any) -> Any:
        """The stored array that holds ``value``, of one replica's shape, on every replica."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array, from that of one replica's value."""

    def describe(self, mesh: Mesh, per_device: int = 1) -> str:
        """Where the value is, in words, if each device (of a replica's, the first) runs so many replicas."""


@dataclasses.dataclass(frozen=True)
class _Usual(abc.ABC):
    """Stored in the same way between programs and in them, and not split over the replicas.

    Attributes:
      axes: how each replica's value is split over its logical devices; empty if it is not.
      logical_device: the number of the logical device of each replica that has the value; ``None`` for all of them.
    """

    axes: Axes = dataclasses.field(default=(), kw_only=True, repr=False)
    logical_device: int | None = dataclasses.field(default=None, kw_only=True, repr=False)
    home: ClassVar[jax.Device | None] = None

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(self.axes)

    @property
    def whole_spec(self) -> PartitionSpec:
        return spec_of(self.axes)

    def mesh(self, mesh: Mesh) -> Mesh:
        return mesh if self.logical_device is None else logical_device_mesh(mesh, self.logical_device)

    def sharding(self, mesh: Mesh) -> Sharding:
        return NamedSharding(self.mesh(mesh), self.spec)

    def whole(self, stored: Any) -> Any:
        return stored

    def parts(self, whole: Any, replicas: Sequence[int]) -> tuple[Any, ...]:
        return (whole,) * len(replicas)

    def describe(self, mesh: Mesh, per_device: int = 1) -> str:
        logical = mesh.size // mesh.shape[REPLICA_AXIS]
        replicas = mesh.shape[REPLICA_AXIS] * per_device
        where = self._on_replicas(replicas, logical if self.logical_device is None else 1)
        if self.logical_device is not None:
            return f"on logical device {self.logical_device}" + (f", {where}" if replicas > 1 else "")
        if not any(self.axes):
            return where
        counts = [math.prod(mesh.shape[axis] for axis in dim) for dim in self.axes]
        return f"{where + ', ' if replicas > 1 else ''}split {counts} over {logical} logical devices" + (
            " of each" if replicas > 1 else ""
        )

    @abc.abstractmethod
    def _on_replicas(self, replicas: int, logical: int) -> str:
        """Where the value is, in words, without its logical devices."""


@dataclasses.dataclass(frozen=True)
class Mirrored(_Usual):
    """The whole value on every replica."""

    locality: ClassVar[Locality] = M

    def stored(self, value: Any) -> Any:
        return value

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _on_replicas(self, replicas: int, logical: int) -> str:
        if replicas == 1:
            return "on one device" if logical == 1 else f"mirrored on {logical} logical devices"
        return f"mirrored on {replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Central(Mirrored):
    """The whole value on one device. Each program copies it from there, and copies the new value back.

    Attributes:
      home: the device.
    """

    home: jax.Device  # type: ignore[misc]

    def sharding(self, mesh: Mesh) -> Sharding:
        return SingleDeviceSharding(self.home)

    def _on_replicas(self, replicas: int, logical: int) -> str:
        return f"on {self.home.platform}:{self.home.id}, for {replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Copies(_Usual):
    """A value of its own on every replica: ``[num_replicas, *shape]``."""

    replicas: int
    locality: ClassVar[Locality] = T

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(((), *self.axes), replica_dim=0)

    def stored(self, value: Any) -> Any:
        xp = _module_of(value)
        return xp.broadcast_to(value, self.stored_shape(jnp.shape(value)))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.replicas, *shape)

    def _on_replicas(self, replicas: int, logical: int) -> str:
        return f"a copy on each of {self.replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Split(_Usual):
    """A piece of the value on every replica: the pieces, one after the other along a dim, are the whole value.

    All pieces are stored with the same size. If the value does not divide evenly, the last pieces are filled up
    with zeros, which are not part of the value.

    Attributes:
      dim: the dim along which the value is split.
      size: of the whole value in that dim.
      piece: size of each stored piece.
      replicas: the number of pieces; the last ones may consist of filling only.
    """

    dim: int
    size: int
    piece: int
    replicas: int
    locality: ClassVar[Locality] = M

    @property
    def spec(self) -> PartitionSpec:
        return spec_of((), replica_dim=self.dim)

    @property
    def filling(self) -> int:
        """How many entries along the stored array's dim are not part of the value."""
        return self.replicas * self.piece - self.size

    def stored(self, value: Any) -> Any:
        if not self.filling:
            return value
        return _module_of(value).pad(value, [(0, self.filling if d == self.dim else 0) for d in range(jnp.ndim(value))])

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.replicas * self.piece, *shape[self.dim + 1 :])

    def whole(self, stored: Any) -> Any:
        return lax.slice_in_dim(stored, 0, self.size, axis=self.dim) if self.filling else stored

    def parts(self, whole: Any, replicas: Sequence[int]) -> tuple[Any, ...]:
        bounds = [min(i * self.piece, self.size) for i in range(self.replicas + 1)]
        return tuple(lax.slice_in_dim(whole, bounds[i], bounds[i + 1], axis=self.dim) for i in replicas)

    def pieces_here(self, stored: jax.Array) -> dict[int, jax.Array]:
        """Copies of the pieces that this worker's devices have, without the filling, by replica."""
        pieces: dict[int, jax.Array] = {}
        for shard in stored.addressable_shards:
            replica = (shard.index[self.dim].start or 0) // self.piece
            if replica not in pieces:  # each logical device of a replica has the same
                rows = min(max(self.size - replica * self.piece, 0), self.piece)
                pieces[replica] = jnp.copy(lax.slice_in_dim(shard.data, 0, rows, axis=self.dim))
        return {replica: pieces[replica] for replica in sorted(pieces)}

    def _on_replicas(self, replicas: int, logical: int) -> str:
        return f"split along dim {self.dim} over {self.replicas} replicas"


def _module_of(value: Any) -> Any:
    """NumPy for NumPy arrays, so that they need not be put on a device whole."""
    return np if isinstance(value, np.ndarray) else jnp


def split_evenly(shape: tuple[int, ...], dim: int, pieces: int, replicas: int) -> Layout:
    """A value of ``shape`` in ``pieces`` pieces along ``dim``, at most one for each replica."""
    pieces = min(pieces, replicas, shape[dim])
    if pieces <= 1:
        return Mirrored()
    return Split(dim, shape[dim], -(-shape[dim] // pieces), replicas)


def beside(layout: Layout, shape: tuple[int, ...], mesh: Mesh, replicas: int, own: bool, splits: bool) -> Layout:
    """The layout of a value beside another value.

    It is split like the other if its shape allows, and otherwise whole in the same places.

    Args:
      layout: of the other value.
      shape: of the value.
      mesh: of the strategy.
      replicas: how many there are.
      own: whether each of several replicas has its own value.
      splits: whether the value can be split over the replicas.
    """
    if not own and layout.home is not None:
        return layout
    if not own and splits and isinstance(layout, Split) and shape[layout.dim : layout.dim + 1] == (layout.size,):
        return layout
    parts = [math.prod(mesh.shape[axis] for axis in dim) for dim in layout.axes]
    fits = len(parts) == len(shape) and all(size % count == 0 for size, count in zip(shape, parts, strict=True))
    axes = layout.axes if fits else ()
    if own:
        return Copies(replicas, axes=axes, logical_device=layout.logical_device)
    return Mirrored(axes=axes, logical_device=layout.logical_device)
