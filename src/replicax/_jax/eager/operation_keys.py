"""Keys of single operations and of programs: equal for what computes the same, whenever JAX has traced it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from replicax._jax.jaxprs.types import ClosedJaxpr, Jaxpr, Literal, Primitive


class Hashed:
    """Base of keys that are looked up at each call: the hash is kept, and compared first.

    Args:
      parts: what two must have in common to be equal; what is quick to compare comes first.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is type(self) and self._hash == other._hash and self._parts == other._parts


class _NotHashableError(Exception):
    pass


_structures: weakref.WeakKeyDictionary[Any, Hashed] = weakref.WeakKeyDictionary()


def operation_key(
    primitive: Primitive, params: dict[str, Any], avals: Sequence[Any], any_power: bool = False
) -> Hashable | None:
    """What is equal for equal operations on operands of equal kinds; ``None`` if that can't be told."""
    try:
        key = (primitive, any_power, *((name, _hashable(p)) for name, p in params.items()), *avals)
        hash(key)
    except (TypeError, _NotHashableError):
        return None
    return key


def program_key(program: ClosedJaxpr) -> Hashable | None:
    """What is equal for equal programs; ``None`` if that can't be told."""
    try:
        return "program", _hashable(program)
    except (TypeError, _NotHashableError):
        return None


def _hashable(value: Any) -> Hashable:
    """A param for a key: equal programs are equal there, whenever JAX has traced them."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        if value not in _structures:
            _structures[value] = _structure(value)
        return _structures[value]
    return value


def _structure(program: Any) -> Hashed:
    jaxpr = getattr(program, "jaxpr", program)
    if len(getattr(program, "consts", ())):
        raise _NotHashableError
    numbers: dict[Any, int] = {}

    def named(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers)), atom.aval

    equations = tuple(
        (
            e.primitive,
            tuple(map(named, e.invars)),
            tuple((name, _hashable(p)) for name, p in e.params.items()),
            tuple(map(named, e.outvars)),
        )
        for e in jaxpr.eqns
    )
    inputs = tuple(map(named, (*jaxpr.constvars, *jaxpr.invars)))
    return Hashed(inputs, equations, tuple(map(named, jaxpr.outvars)))
