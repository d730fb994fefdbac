"""How JAX's collectives say which devices take part in them: they have many names for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def names_axis(params: Mapping[str, Any], axis: str) -> bool:
    """Whether an operation with these parameters is about an axis of the mesh."""
    return any(("axis" in name or "axes" in name) and _names(value, axis) for name, value in params.items())


def _names(value: Any, axis: str) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(_names(v, axis) for v in value)
    return isinstance(value, str) and value == axis


def has_groups(params: Mapping[str, Any]) -> bool:
    """Whether a collective with these parameters is one of some of the devices along its axis, and of others."""
    return params.get("axis_index_groups") is not None


def finished_name(name: str) -> str:
    """The name of a collective that is done when ``name`` is: JAX has some in two parts, a start and a wait."""
    return name.removesuffix("_start")
