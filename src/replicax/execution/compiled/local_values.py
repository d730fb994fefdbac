"""Local values: the parts of arrays that the replicas of one device have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replicax.execution.compiled.pieces import Piece
from replicax.execution.program.program import Use
from replicax.locality import Locality, T
from replicax.variables.layout import Copies, Layout, Mirrored, Split


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Each:
    """A value for each of this device's ``k`` replicas, as an array ``[k, *shape]``."""

    array: Any


def value_layout(locality: Locality, replicas: int) -> Layout:
    """The layout of an argument or result on the devices of this many replicas."""
    return Copies(replicas) if locality is T else Mirrored()


def as_local_value(stored: jax.Array, layout: Layout) -> Any:
    """Unwrap a stored array for this device's replicas."""
    if not stored.size:  # such arguments crash the compiler of JAX 0.11
        stored = zeros_like(stored)
    if isinstance(layout, Split):
        return Piece(stored, layout)
    if not isinstance(layout, Copies):
        return stored
    return stored.reshape(stored.shape[1:]) if stored.shape[0] == 1 else Each(stored)


def as_stored_array(value: Any, layout: Layout) -> jax.Array:
    """The stored array of a value of this device's replicas."""
    array: jax.Array = array_of(value)
    return array[None] if isinstance(layout, Copies) and not isinstance(value, Each) else array


def stored_here(use: Use, per_device: int) -> Any:
    """The shape and dtype of the part of a variable's stored array that a device with ``per_device`` replicas has."""
    shape, layout = use.aval.shape, use.layout
    if isinstance(layout, Split):
        return use.aval.update(shape=(*shape[: layout.dim], layout.piece, *shape[layout.dim + 1 :]))
    return of_replicas_here(use.aval, layout, per_device)


def of_replicas_here(aval: Any, layout: Layout, per_device: int) -> Any:
    """The shape and dtype of a value of all replicas of a device, from those of one replica's value."""
    return aval.update(shape=(per_device, *aval.shape)) if per_device > 1 and isinstance(layout, Copies) else aval


def array_of(value: Any) -> Any:
    """The array of a piece, or of each of several replicas; any other value unchanged."""
    return value.array if isinstance(value, Piece | Each) else value


def wrapped(array: Any, layout: Layout, per_device: int) -> Any:
    """An array as a program has it: as a :class:`Piece`, or as an :class:`Each` of several replicas."""
    if isinstance(layout, Split):
        return Piece(array, layout)
    return Each(array) if per_device > 1 and isinstance(layout, Copies) else array


def zeros_like(aval: Any) -> jax.Array:
    """Zeros of a shape and dtype."""
    return jnp.zeros(aval.shape, aval.dtype)
