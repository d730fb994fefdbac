"""Layouts: how a variable's value lies on the devices of its strategy.

A value is laid out as one array over the mesh, the *stored* one. A layout says how the two belong together, and
what one replica finds on its own device.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from replicax.locality import Locality, M, T
from replicax.topology.mesh import REPLICA_AXIS


class Layout(Protocol):
    """How a value is stored; see the module's docstring."""

    @property
    def locality(self) -> Locality:
        """Of the value inside a step."""

    @property
    def spec(self) -> PartitionSpec:
        """Of the stored array, in a program."""

    @property
    def home(self) -> jax.Device | None:
        """The one device that has the stored array between programs; ``None`` if it stays on the mesh."""

    def sharding(self, mesh: Mesh) -> Sharding:
        """Of the stored array, between programs."""

    def whole(self, stored: Any) -> Any:
        """The value that is in ``stored``, of a layout in which all replicas have the same."""

    def parts(self, whole: Any, replicas: int) -> tuple[Any, ...]:
        """What each replica has of a value that is the same for all."""

    def stored(self, value: Any) -> Any:
        """The stored array that holds ``value``, of one replica's shape, on every replica."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array, from that of one replica's value."""

    def describe(self, mesh: Mesh) -> str:
        """Where the value is, in words."""


class _Usual:
    """Stored between programs as it is in them, and whole."""

    spec: PartitionSpec
    home: jax.Device | None = None

    def sharding(self, mesh: Mesh) -> Sharding:
        return NamedSharding(mesh, self.spec)

    def whole(self, stored: Any) -> Any:
        return stored

    def parts(self, whole: Any, replicas: int) -> tuple[Any, ...]:
        return (whole,) * replicas


@dataclasses.dataclass(frozen=True)
class Mirrored(_Usual):
    """The whole value on every replica."""

    locality = M
    spec = PartitionSpec()

    def stored(self, value: Any) -> Any:
        return value

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def describe(self, mesh: Mesh) -> str:
        replicas = mesh.shape[REPLICA_AXIS]
        logical = mesh.size // replicas
        if replicas == 1:
            return "on one device" if logical == 1 else f"mirrored on {logical} logical devices"
        return f"mirrored on {replicas} replicas" + (f" of {logical} logical devices" if logical > 1 else "")


@dataclasses.dataclass(frozen=True)
class Central(Mirrored):
    """The whole value on one device, from where each program gets it and to where it brings it back.

    Attributes:
      home: the device.
    """

    home: jax.Device

    def sharding(self, mesh: Mesh) -> Sharding:
        return SingleDeviceSharding(self.home)

    def describe(self, mesh: Mesh) -> str:
        return f"on {self.home.platform}:{self.home.id}, for {mesh.shape[REPLICA_AXIS]} replicas"


@dataclasses.dataclass(frozen=True)
class Copies(_Usual):
    """A value of its own on every replica: ``[num_replicas, *shape]``."""

    replicas: int
    locality = T
    spec = PartitionSpec(REPLICA_AXIS)

    def stored(self, value: Any) -> Any:
        return jnp.broadcast_to(value, self.stored_shape(jnp.shape(value)))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.replicas, *shape)

    def describe(self, mesh: Mesh) -> str:
        return f"a copy on each of {self.replicas} replicas"


@dataclasses.dataclass(frozen=True)
class Split(_Usual):
    """A piece of the value on every replica: the replicas' pieces, one after the other along a dim, are the whole.

    All pieces are stored with the same size; where the value does not divide evenly, the last ones are filled up
    with zeros that are no part of it.

    Attributes:
      dim: along which the value is split.
      size: of the whole value in that dim.
      piece: size of each stored piece.
      replicas: how many pieces there are; the last ones may be all filling.
    """

    dim: int
    size: int
    piece: int
    replicas: int
    locality = M

    @property
    def spec(self) -> PartitionSpec:  # type: ignore[override]
        return PartitionSpec(*[None] * self.dim, REPLICA_AXIS)

    @property
    def filling(self) -> int:
        """How much of the stored array's dim is no part of the value."""
        return self.replicas * self.piece - self.size

    def stored(self, value: Any) -> Any:
        if not self.filling:
            return value
        return jnp.pad(value, [(0, self.filling if d == self.dim else 0) for d in range(jnp.ndim(value))])

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.replicas * self.piece, *shape[self.dim + 1 :])

    def whole(self, stored: Any) -> Any:
        return lax.slice_in_dim(stored, 0, self.size, axis=self.dim) if self.filling else stored

    def parts(self, whole: Any, replicas: int) -> tuple[Any, ...]:
        bounds = [min(i * self.piece, self.size) for i in range(replicas + 1)]
        return tuple(lax.slice_in_dim(whole, *b, axis=self.dim) for b in itertools.pairwise(bounds))

    def describe(self, mesh: Mesh) -> str:
        return f"split along dim {self.dim} over {self.replicas} replicas"


def split_evenly(shape: tuple[int, ...], dim: int, pieces: int, replicas: int) -> Layout:
    """A value of ``shape`` in ``pieces`` pieces along ``dim``, at most one for each replica."""
    pieces = min(pieces, replicas, shape[dim])
    if pieces <= 1:
        return Mirrored()
    return Split(dim, shape[dim], -(-shape[dim] // pieces), replicas)
