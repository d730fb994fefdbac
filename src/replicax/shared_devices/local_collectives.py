"""Collectives of replicas of which several share a device: these come together first, and then the devices.

A value that differs between replicas is here an array ``[k, *shape]`` on each device, for its k replicas. Devices have
consecutive replicas, so that the replicas' values, one after the other, are the devices' arrays, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.primitive_families import (
    AXIS_EXCHANGES,
    AXIS_GATHERS,
    AXIS_MAXIMA,
    AXIS_MINIMA,
    AXIS_PERMUTATIONS,
    AXIS_SCATTERS,
    AXIS_SUMS,
    by_primitive,
)
from replicax.collectives import of_key_data
from replicax.devices.host_values import is_key
from replicax.devices.mesh import REPLICA_AXIS
from replicax.devices.summation_order import added_in_pairs
from replicax.execution.compiled.program_rewriting import Rewriting, Rule

LOCAL_REDUCTIONS: dict[str, Callable[..., Any]] = by_primitive(
    {AXIS_SUMS: jnp.sum, AXIS_MAXIMA: jnp.max, AXIS_MINIMA: jnp.min}
)
"""Collectives that reduce, by name: what each does with the values of a device's replicas, along dim 0."""


class OwnDimsFirst(Rule):
    """A collective that also reduces dims of its operands reduces these first: they are each replica's own."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in LOCAL_REDUCTIONS and bool(_jax.own_dims(equation.params)[0])

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        reduce = LOCAL_REDUCTIONS[equation.primitive.name]
        dims, params = _jax.own_dims(equation.params)
        return _jax.bind(equation, [reduce(x, dims).astype(x.dtype) for x in operands], params)


def exchanged(equation: _jax.Equation, stacked: Any, numbers: Any, count: int, in_order: bool = False) -> Any:
    """The result of a collective that does not reduce: ``[k, *shape]``, or ``shape`` if all replicas get the same.

    ``numbers`` are those of this device's replicas, of ``count`` in all; ``in_order``: sums have a fixed order.
    """
    if in_order and equation.primitive.name in AXIS_SCATTERS:
        return _scattered_in_order(equation.params, stacked, numbers, count)
    rule = _RULES.get(equation.primitive.name)
    if rule is None:
        raise ValueError(
            f"the collective {equation.primitive.name} at {_jax.source_line(equation)} can't join replicas that share "
            "a device: use as many devices as replicas, or the collectives of replicax.get_replica_context()"
        )
    return rule(equation.params, stacked, numbers, count)


def reduced_in_groups(
    equation: _jax.Equation, wholes: Sequence[Any], numbers: Any, reduce: Callable[..., Any]
) -> list[Any]:
    """The results ``[k, *shape]`` of a collective that reduces in groups of replicas, from all replicas' operands."""
    groups = _jax.groups_of(equation.params)
    if len({len(group) for group in groups}) > 1:
        raise ValueError(
            f"the collective {equation.primitive.name} at {_jax.source_line(equation)} is one of groups of different "
            f"sizes, {groups}: with several replicas on a device they must have one size"
        )
    members = {member: group for group in groups for member in group}
    own_groups = jnp.asarray([members[i] for i in range(len(members))], jnp.int32)[numbers]
    return [reduce(jnp.take(whole, own_groups, axis=0), 1).astype(whole.dtype) for whole in wholes]


def everyones(stacked: Any, count: int) -> Any:
    """``[num_replicas, *shape]``: all replicas' values."""
    if stacked.shape[0] == count:
        return stacked
    if is_key(stacked.dtype):
        return of_key_data(lambda data: everyones(data, count), stacked)
    if not stacked.size:  # XLA has no collectives of empty arrays
        return jnp.zeros((count, *stacked.shape[1:]), stacked.dtype)
    return lax.all_gather(stacked, REPLICA_AXIS, axis=0, tiled=True)


def _gathered_stack(params: Any, stacked: Any, numbers: Any, count: int) -> Any:
    dim, is_tiled = _jax.gathered_along(params)
    whole = jnp.moveaxis(everyones(stacked, count), 0, dim)
    return _with_merged_dims(whole, dim) if is_tiled else whole


def _scattered_stack(params: Any, stacked: Any, numbers: Any, count: int) -> Any:
    dim, is_tiled = _jax.scattered_along(params)
    total = jnp.sum(stacked, 0).astype(stacked.dtype)
    if stacked.shape[0] < count:
        total = lax.psum_scatter(total, REPLICA_AXIS, scatter_dimension=dim, tiled=True)
    parts = jnp.moveaxis(_with_divided_dim(total, dim, stacked.shape[0]), dim, 0)
    return parts if is_tiled else jnp.squeeze(parts, dim + 1)


def _scattered_in_order(params: Any, stacked: Any, numbers: Any, count: int) -> Any:
    dim, is_tiled = _jax.scattered_along(params)
    total = added_in_pairs(everyones(stacked.astype(widened(stacked.dtype)), count)).astype(stacked.dtype)
    parts = jnp.take(jnp.moveaxis(_with_divided_dim(total, dim, count), dim, 0), numbers, axis=0)
    return parts if is_tiled else jnp.squeeze(parts, dim + 1)


def _swapped_stack(params: Any, stacked: Any, numbers: Any, count: int) -> Any:
    split, joined = _jax.exchanged_along(params)
    parts = _with_divided_dim(everyones(stacked, count), split + 1, count)  # [from, …, to, …]
    mine = jnp.moveaxis(jnp.take(parts, numbers, axis=split + 1), split + 1, 0)  # [k, from, …]
    return _with_merged_dims(jnp.moveaxis(mine, 1, joined + 1), joined + 1)


def _permuted_stack(params: Any, stacked: Any, numbers: Any, count: int) -> Any:
    senders = jnp.asarray(_jax.senders(params, count), jnp.int32)[numbers]
    sent = jnp.take(everyones(stacked, count), jnp.maximum(senders, 0), axis=0)
    comes = jnp.expand_dims(senders >= 0, list(range(1, sent.ndim)))
    return jnp.where(comes, sent, jnp.zeros_like(sent))


def _with_divided_dim(array: Any, dim: int, parts: int) -> Any:
    """``array`` with a dim of parts before ``dim``."""
    return array.reshape(*array.shape[:dim], parts, array.shape[dim] // parts, *array.shape[dim + 1 :])


def _with_merged_dims(array: Any, dim: int) -> Any:
    """Merge ``dim`` with the next one: the reverse of :func:`_with_divided_dim`."""
    return array.reshape(*array.shape[:dim], array.shape[dim] * array.shape[dim + 1], *array.shape[dim + 2 :])


_RULES: dict[str, Callable[[Any, Any, Any, int], Any]] = by_primitive(
    {
        AXIS_GATHERS: _gathered_stack,
        AXIS_SCATTERS: _scattered_stack,
        AXIS_EXCHANGES: _swapped_stack,
        AXIS_PERMUTATIONS: _permuted_stack,
    }
)


def widened(dtype: Any) -> Any:
    """The dtype in which to add up one value after the other: a narrow float would lose too much."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def check_all_take_part(equation: _jax.Equation) -> None:
    """Raise unless a collective is one of all replicas."""
    if not _jax.is_over_all_of(equation.params, REPLICA_AXIS):
        raise ValueError(
            f"the collective {equation.primitive.name} at {_jax.source_line(equation)} is one of groups of replicas, "
            "or over other axes besides: with several replicas on a device it must be one of all replicas"
        )
