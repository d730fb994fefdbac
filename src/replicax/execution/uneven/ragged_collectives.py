"""Collectives of arrays that differ in size between replicas.

While the program of one size is captured they are primitives that only say what comes out; when programs are joined,
they become collectives of arrays with room for the largest (:mod:`replicax.execution.uneven.joint_program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _jax, collectives
from replicax.devices.mesh import REPLICA_AXIS


def _never(x: Any, **_: Any) -> Any:
    raise AssertionError("a collective of arrays of different sizes stands in a program that has not been joined")


gather_p: _jax.Primitive = _jax.linear_primitive(
    "uneven_gather",
    _never,
    lambda aval, *, axis, sizes, options, axes: _jax.resized(aval, axis, sum(sizes)),
    lambda ct, aval, *, axis, **params: part_p.bind(ct, axis=axis, own=aval.shape[axis], **params),
    _jax.next_axis,
)
"""``y = uneven_gather[axis=a sizes=…] x``: the replicas' arrays, one after the other, whose sizes differ."""

part_p: _jax.Primitive = _jax.linear_primitive(
    "uneven_part",
    _never,
    lambda aval, *, axis, own, sizes, options, axes: _jax.resized(aval, axis, own),
    lambda ct, _, *, own, **params: gather_p.bind(ct, **params),
    _jax.next_axis,
)
"""``y = uneven_part[axis=a sizes=… own=n] x``: this replica's part of the sum of ``x``; the transpose of a gather."""


def gathered(array: Any, *, axis: int, sizes: Sequence[int], options: Any, axes: Any) -> Any:
    """What ``uneven_gather`` is, of arrays with room for the largest."""
    everyone = collectives.all_gather(array[None], 0, options)
    parts = [lax.slice_in_dim(everyone[i], 0, size, axis=axis) for i, size in enumerate(sizes)]
    return jnp.concatenate(parts, axis)


def part_of_sum(array: Any, *, axis: int, sizes: Sequence[int], options: Any, axes: Any, own: int) -> Any:
    """What ``uneven_part`` is, with room for the largest."""
    [total] = collectives.sum_over_replicas([array], options)
    starts = jnp.asarray(np.cumsum([0, *sizes[:-1]]).astype(np.int32))
    mine = lax.dynamic_index_in_dim(starts, lax.axis_index(REPLICA_AXIS), keepdims=False)
    config = [(0, max(sizes) if i == axis else 0, 0) for i in range(array.ndim)]
    return lax.dynamic_slice_in_dim(lax.pad(total, np.zeros((), total.dtype), config), mine, max(sizes), axis)
