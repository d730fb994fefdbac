"""Collective operations: which equations are collectives of the replicas, and which give all of them the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import ALIKE_ALONG_AXIS, AXIS_CASTS, AXIS_POSITION, HANDED_ON
from replicax.collectives import all_reduce_p, alone_p, gathered_p, own_sum_p, share_back_p, share_p
from replicax.devices.mesh import REPLICA_AXIS


def _never(x: Any, **_: Any) -> Any:
    raise AssertionError("a collective of arrays of different sizes stands in a program that has not been joined")


# Collectives of arrays that differ in size between replicas. While the program of one size is captured they only have
# shapes; replicax.ragged.assembly computes them when programs are joined.
ragged_gather_p: _jax.Primitive = _jax.linear_primitive(
    "ragged_gather",
    _never,
    lambda aval, *, axis, sizes, **_: _jax.resized(aval, axis, sum(sizes)),
    lambda ct, aval, *, axis, **params: ragged_part_p.bind(ct, axis=axis, own=aval.shape[axis], **params),
)
"""``y = ragged_gather[axis=a sizes=… number=i] x``: the replicas' arrays, one after the other, whose sizes differ."""

ragged_part_p: _jax.Primitive = _jax.linear_primitive(
    "ragged_part",
    _never,
    lambda aval, *, axis, own, **_: _jax.resized(aval, axis, own),
    lambda ct, _, *, own, **params: ragged_gather_p.bind(ct, **params),
)
"""``y = ragged_part[axis=a sizes=… own=n] x``: this replica's part of the sum of ``x``; the transpose of a gather."""

# These give every replica the same value. Any other primitive whose params name the replicas' axis counts as one that
# gives them different parts, as ppermute and all_to_all do: so a future primitive of JAX is never M by mistake.
AGREEING = ALIKE_ALONG_AXIS | {all_reduce_p.name, own_sum_p.name, ragged_gather_p.name}
"""Collectives that give every replica the same, if all of them take part."""

ONE_BY_ONE = HANDED_ON | {alone_p.name, share_p.name, share_back_p.name}
"""Each result belongs to the operand in its place, and to no other; and replicas do not meet."""

_NO_MEETING = AXIS_CASTS | AXIS_POSITION


def over_replicas(params: Mapping[str, Any]) -> bool:
    """Return whether params of a primitive name the replicas' axis."""
    return _jax.names_axis(params, REPLICA_AXIS)


def replicas_meet(equation: _jax.Equation) -> bool:
    """Return whether an equation is itself a collective of the replicas."""
    return over_replicas(equation.params) and equation.primitive.name not in _NO_MEETING


def would_meet(equation: _jax.Equation) -> bool:
    """Return whether an equation is a collective of the replicas, or would be if there were more than one."""
    return replicas_meet(equation) or equation.primitive in (alone_p, gathered_p)


def all_get_the_same(equation: _jax.Equation) -> bool:
    """Return whether a collective gives every replica the same value."""
    name = equation.primitive.name.removesuffix("_start")  # JAX has some in two parts, a start and a wait
    return name in AGREEING and not _jax.has_groups(equation.params)


def is_collective(equation: _jax.Equation) -> bool:
    """Return whether an equation is a collective of the replicas, or there is one in the programs inside."""
    return _jax.is_or_contains(equation, replicas_meet)
