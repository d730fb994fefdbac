"""Parameters of JAX's collectives: each has its own names for the devices that take part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def names_axis(params: Mapping[str, Any], axis: str) -> bool:
    """Return whether an operation with these parameters is about an axis of the mesh."""
    return any(("axis" in name or "axes" in name) and _names(value, axis) for name, value in params.items())


def _names(value: Any, axis: str) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(_names(v, axis) for v in value)
    return isinstance(value, str) and value == axis


def has_groups(params: Mapping[str, Any]) -> bool:
    """Return whether a collective with these parameters is divided into groups of devices along its axis."""
    return params.get("axis_index_groups") is not None


def groups_of(params: Mapping[str, Any]) -> list[list[int]]:
    """The groups of devices of a collective that has groups."""
    return [list(group) for group in params["axis_index_groups"]]


def is_over_all_of(params: Mapping[str, Any], axis: str) -> bool:
    """Return whether a collective with these parameters is one of all devices along an axis, and of nothing else."""
    [over] = [params[name] for name in ("axes", "axis_name") if name in params]
    return over in (axis, (axis,)) and not has_groups(params)


def own_dims(params: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The dims of its operands that a collective also reduces (under ``jax.vmap``), and its parameters without them."""
    axes = params.get("axes", ())
    dims = tuple(axis for axis in axes if isinstance(axis, int))
    return dims, {**params, "axes": tuple(axis for axis in axes if axis not in dims)}


def gathered_along(params: Mapping[str, Any]) -> tuple[int, bool]:
    """The dim along which a gather puts operands together, and whether that is one of theirs (or else a new one)."""
    return params["all_gather_dimension"], params["tiled"]


def scattered_along(params: Mapping[str, Any]) -> tuple[int, bool]:
    """The dim along which a sum is divided, and whether the parts have that dim."""
    return params["scatter_dimension"], params["tiled"]


def exchanged_along(params: Mapping[str, Any]) -> tuple[int, int]:
    """The dim along which an exchange divides the operands, and the dim along which it puts their parts together.

    (Parts without these dims are given them before, and lose them afterwards.)
    """
    return params["split_axis"], params["concat_axis"]


def senders(params: Mapping[str, Any], count: int) -> list[int]:
    """The device, of ``count``, from which each one gets an operand in a permutation; -1 if from none."""
    sources = [-1] * count
    for sender, receiver in params["perm"]:
        sources[receiver] = sender
    return sources
