"""Layouts: how a variable's value lies on the devices of its strategy.

A value is stored as one array over the mesh, the *stored* array, which programs take and return. A layout converts
between the two, and says which part each replica has.

If several groups of replicas have a copy each, the stored array has the copies one after the other, so that the part
of each replica is at its place in the mesh. Outside of programs the same memory also serves as another array, the value
*laid out*: it contains the value once, on a mesh that has the groups as a further axis. Going from one to the other
copies nothing. If replicas and logical devices split the same dim, the order of the elements differs: laid out, each
logical device's part is in pieces; in the stored array each replica's pieces are together. For all other layouts the
stored array is the value laid out.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from replicax.devices.arrays import same_memory
from replicax.devices.logical_axes import Axes, spec_of
from replicax.devices.mesh import REPLICA_AXIS, devices_of, in_groups, logical_device_mesh, sharding_on
from replicax.locality import Locality, M, T


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """How a value is stored; see the module's docstring.

    Unless a layout says otherwise, the value is not split over the replicas, and stored as it is laid out.

    Attributes:
      axes: how each replica's value is split over its logical devices; empty if it is not.
      logical_device: the number of the logical device of each replica that has the value; ``None`` for all of them.
      locality: of the value inside a step.
      home: the device that has the stored array between programs; ``None`` if it stays on the mesh.
    """

    axes: Axes = dataclasses.field(default=(), kw_only=True, repr=False)
    logical_device: int | None = dataclasses.field(default=None, kw_only=True, repr=False)
    locality: ClassVar[Locality] = M
    home: ClassVar[jax.Device | None] = None

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the stored array in a program."""
        return spec_of(self.axes)

    @property
    def whole_spec(self) -> PartitionSpec:
        """The partition spec of the whole value; only for layouts in which all replicas have the same value."""
        return spec_of(self.axes)

    def mesh(self, mesh: Mesh) -> Mesh:
        """The part of the strategy's mesh that has the stored array."""
        return mesh if self.logical_device is None else logical_device_mesh(mesh, self.logical_device)

    def sharding(self, mesh: Mesh) -> Sharding:
        """The sharding of the stored array between programs."""
        return sharding_on(self.mesh(mesh), self.spec)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array, from that of one replica's value."""
        return self.laid_out_shape(shape)

    def laid_out(self, value: Any) -> Any:
        """A value of one replica's shape, the same for all, as it is laid out: filled up."""
        return value

    def laid_out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a value of ``shape`` as it is laid out."""
        return shape

    def whole_sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding of the whole value, on each device; only for layouts as those of ``whole_spec``."""
        return sharding_on(self.mesh(mesh), self.whole_spec)

    def laid_out_on(self, mesh: Mesh) -> NamedSharding:
        """The sharding of a value laid out on ``mesh``, which is the strategy's or a part of it."""
        return sharding_on(mesh, self.spec)

    def laid_out_sharding(self, mesh: Mesh) -> Sharding:
        """The sharding of a value laid out between programs: on its part of the strategy's mesh, or at its home."""
        return self.sharding(mesh)

    def to_stored(self, laid_out: jax.Array, mesh: Mesh) -> jax.Array:
        """The stored array of a value that is laid out on the devices: the same memory."""
        return laid_out

    def from_stored(self, stored: jax.Array, mesh: Mesh) -> jax.Array:
        """The value laid out, from its stored array: the same memory."""
        return stored

    def whole(self, laid_out: Any) -> Any:
        """The value that is laid out; only for layouts in which all replicas have the same value."""
        return laid_out

    def parts(self, whole: Any, replicas: Sequence[int]) -> tuple[Any, ...]:
        """The part of each of these replicas of a value that is the same for all."""
        return (whole,) * len(replicas)

    def describe(self, mesh: Mesh, per_device: int = 1) -> str:
        """Say where the value is, if each device (the first of a replica's) runs ``per_device`` replicas."""
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
        """Say where the value is, without its logical devices."""


@dataclasses.dataclass(frozen=True)
class Mirrored(Layout):
    """The whole value on every replica."""

    def _on_replicas(self, replicas: int, logical: int) -> str:
        if replicas == 1:
            return "on one device" if logical == 1 else f"mirrored on {logical} logical devices"
        return f"mirrored on {replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Central(Mirrored):
    """The whole value on one device. Each program copies it from there, and copies the new value back."""

    home: jax.Device  # type: ignore[misc]

    def sharding(self, mesh: Mesh) -> Sharding:
        return SingleDeviceSharding(self.home)

    def _on_replicas(self, replicas: int, logical: int) -> str:
        return f"on {self.home.platform}:{self.home.id}, for {replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Copies(Layout):
    """A value of its own on every replica: ``[num_replicas, *shape]``."""

    replicas: int
    locality: ClassVar[Locality] = T

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(((), *self.axes), replica_dim=0)

    def laid_out(self, value: Any) -> Any:
        xp = _module_of(value)
        return xp.broadcast_to(value, self.laid_out_shape(jnp.shape(value)))

    def laid_out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.replicas, *shape)

    def _on_replicas(self, replicas: int, logical: int) -> str:
        return f"a copy on each of {self.replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Split(Layout):
    """A piece of the value on every replica of a group: these, one after the other along a dim, are the whole value.

    Replicas that share a device have its piece together, and count as one here.

    All pieces are stored with the same size. If the value does not divide evenly, the last pieces are filled up
    with zeros, which are not part of the value.

    If the logical devices of a replica have different parts of the value (``axes``), the part of each logical device is
    split over the replicas; if along the same dim, evenly.

    Attributes:
      dim: the dim along which the value is split.
      size: of the whole value in that dim.
      piece: size of each stored piece.
      replicas: of a group, and so the number of pieces; the last ones may consist of filling only.
      groups: how many groups of neighbouring replicas have the value; each replica is in one.
      logical_parts: into how many parts the logical devices split the same dim; a piece has some of each.
    """

    dim: int
    size: int
    piece: int
    replicas: int
    groups: int = 1
    logical_parts: int = 1

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(self.axes, replica_dim=self.dim)

    @property
    def filling(self) -> int:
        """The number of entries along the dim, as it is laid out, that are not part of the value."""
        return self.replicas * self.piece - self.size

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.groups * self.replicas * self.piece, *shape[self.dim + 1 :])

    def laid_out(self, value: Any) -> Any:
        if not self.filling:
            return value
        return _module_of(value).pad(value, [(0, self.filling if d == self.dim else 0) for d in range(jnp.ndim(value))])

    def laid_out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.replicas * self.piece, *shape[self.dim + 1 :])

    def laid_out_on(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(in_groups(mesh, self.groups), spec_of(self.axes, replica_dim=self.dim, inner=True))

    def laid_out_sharding(self, mesh: Mesh) -> Sharding:
        return self.laid_out_on(self.mesh(mesh))

    def to_stored(self, laid_out: jax.Array, mesh: Mesh) -> jax.Array:
        return same_memory(laid_out, self.stored_shape(laid_out.shape), self.sharding(mesh))

    def from_stored(self, stored: jax.Array, mesh: Mesh) -> jax.Array:
        return same_memory(stored, self.laid_out_shape(stored.shape), self.laid_out_sharding(mesh))

    def whole(self, laid_out: Any) -> Any:
        return lax.slice_in_dim(laid_out, 0, self.size, axis=self.dim) if self.filling else laid_out

    def bounds(self, replica: int) -> tuple[int, int]:
        """A replica's part of the dim, without the filling; with ``logical_parts``, of the pieces in turn."""
        first, last = (min((replica % self.replicas + i) * self.piece, self.size) for i in (0, 1))
        return first, last

    def parts(self, whole: Any, replicas: Sequence[int]) -> tuple[Any, ...]:
        in_turn = self._regrouped_pieces(whole, self.logical_parts, self.replicas)
        return tuple(lax.slice_in_dim(in_turn, *self.bounds(replica), axis=self.dim) for replica in replicas)

    def joined(self, pieces: Sequence[Any]) -> Any:
        """The whole value, from the pieces of a group without their filling."""
        return self._regrouped_pieces(jnp.concatenate(pieces, self.dim), self.replicas, self.logical_parts)

    def _regrouped_pieces(self, array: Any, outer: int, inner: int) -> Any:
        """``array`` with the dim, which is ``outer`` times ``inner`` pieces, in the order ``inner`` times ``outer``."""
        if self.logical_parts == 1:
            return array
        shape, dim = array.shape, self.dim
        split = array.reshape(*shape[:dim], outer, inner, -1, *shape[dim + 1 :])
        return split.swapaxes(dim, dim + 1).reshape(shape)

    def pieces_here(self, stored: jax.Array) -> dict[int, jax.Array]:
        """Copies of the pieces that this worker's devices have, without the filling, by replica.

        Each is an array over the replica's logical devices if these have different parts of it.
        """
        shards: dict[int, list[Any]] = {}
        for shard in stored.addressable_shards:
            shards.setdefault((shard.index[self.dim].start or 0) // self.piece, []).append(shard)
        pieces: dict[int, jax.Array] = {}
        for replica, shards_of in sorted(shards.items()):
            piece = shards_of[0].data
            if any(self.axes):
                over_mesh: Any = stored.sharding
                where = NamedSharding(devices_of(over_mesh.mesh, replica), spec_of(self.axes))
                shape = (*stored.shape[: self.dim], self.piece, *stored.shape[self.dim + 1 :])
                piece = jax.make_array_from_single_device_arrays(shape, where, [s.data for s in shards_of])
            first, last = self.bounds(replica)
            pieces[replica] = jnp.copy(lax.slice_in_dim(piece, 0, last - first, axis=self.dim))
        return pieces

    def _on_replicas(self, replicas: int, logical: int) -> str:
        owners = f"{self.replicas} {'replicas' if replicas == self.replicas * self.groups else 'devices'}"
        if self.groups == 1:
            return f"split along dim {self.dim} over {owners}"
        return f"split along dim {self.dim} over the {owners} of each of {self.groups} groups"


def _module_of(value: Any) -> Any:
    """NumPy for NumPy arrays, so that they need not be put on a device whole."""
    return np if isinstance(value, np.ndarray) else jnp
