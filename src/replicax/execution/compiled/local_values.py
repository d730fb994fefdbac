"""Local values: what the replicas of a device have of an array that all devices have a part of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replicax.devices.host_values import is_key
from replicax.execution.compiled.pieces import Piece
from replicax.execution.program.program import Use
from replicax.locality import Locality, T
from replicax.variables.layout import Copies, Layout, Mirrored, Split


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Each:
    """A value of each of this device's replicas.

    Attributes:
      array: ``[k, *shape]``.
    """

    array: Any


def of_value(locality: Locality, replicas: int) -> Layout:
    """How an argument or result lies on the devices of so many replicas."""
    return Copies(replicas) if locality is T else Mirrored()


def entered(stored: jax.Array, layout: Layout) -> Any:
    """What a replica, or those that share a device, have of a stored array."""
    if not stored.size:
        stored = _nothing_like(stored)
    if isinstance(layout, Split):
        return Piece(stored, layout)
    if not isinstance(layout, Copies):
        return stored
    return stored.reshape(stored.shape[1:]) if stored.shape[0] == 1 else Each(stored)


def _nothing_like(empty: jax.Array) -> jax.Array:
    """An array without elements that is no argument: at those the compiler of JAX 0.11 ends the process."""
    if not is_key(empty.dtype):
        return jnp.zeros(empty.shape, empty.dtype)
    data = jax.eval_shape(jax.random.key_data, empty)
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=jax.random.key_impl(empty))


def left(value: Any, layout: Layout) -> jax.Array:
    """What is stored of a value of the replicas here."""
    array: jax.Array = array_of(value)
    return array[None] if isinstance(layout, Copies) and not isinstance(value, Each) else array


def stored_here(use: Use, here: int) -> Any:
    """What the replicas of a device, of which there are so many, have of a variable's stored array."""
    shape, layout = use.aval.shape, use.layout
    if isinstance(layout, Split):
        return use.aval.update(shape=(*shape[: layout.dim], layout.piece, *shape[layout.dim + 1 :]))
    return of_replicas_here(use.aval, layout, here)


def of_replicas_here(aval: Any, layout: Layout, here: int) -> Any:
    """The shape of what all replicas of a device have of a value, from that of one replica's."""
    return aval.update(shape=(here, *aval.shape)) if here > 1 and isinstance(layout, Copies) else aval


def array_of(value: Any) -> Any:
    """The array of a piece, or of each of several replicas; any other value as it is."""
    return value.array if isinstance(value, Piece | Each) else value


def wrapped(array: Any, layout: Layout, here: int) -> Any:
    """An array as what it is to a program: a piece, or that of each of several replicas."""
    if isinstance(layout, Split):
        return Piece(array, layout)
    return Each(array) if here > 1 and isinstance(layout, Copies) else array


def zeros_like(aval: Any) -> jax.Array:
    """Zeros of a shape and dtype."""
    return jnp.zeros(aval.shape, aval.dtype)
