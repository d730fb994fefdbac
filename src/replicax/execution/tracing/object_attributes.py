"""Objects among the arguments of a step: what a step may read of them is part of its key.

A step sees such an object itself, and a number that it reads there is a constant of its program. If the number is
another at the next call, that is another program. All attributes can't be compared: many change from step to step and
mean nothing to the program, such as a count of steps. So those are whose names stand in the step's code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from replicax._jax import BY_VALUE, CONTAINERS, ById
from replicax.execution.tracing.function_key import names_in

_DEPTH = 3
"""How deep to look: the object, what it has, and what that has."""
_MOST_ITEMS = 100
"""A longer container is compared by identity, as each call does it."""

changed_by_tracing: set[tuple[type, str]] = set()
"""Attributes, by the class of their object, that steps change while they are traced: outputs, and no inputs."""


class ObjectKey:
    """Equal to another of the same object with the same attributes.

    Attributes:
      attributes: those that the step may read, by name, each in a form that can be compared.
    """

    __slots__ = ("_value", "attributes")

    def __init__(self, value: Any, names: frozenset[str]) -> None:
        self._value = ById(value)
        self.attributes: Mapping[str, Any] = _attributes(value, names, _DEPTH)

    def note_changes(self, before: ObjectKey) -> bool:
        """Note which attributes are others than ``before`` the step was traced; whether there are any."""
        kind = type(self._value.value)
        changed = {(kind, n) for n, x in self.attributes.items() if before.attributes.get(n, x) != x}
        changed_by_tracing.update(changed)
        return bool(changed)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self._value == other._value and self.attributes == other.attributes

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in self.attributes.items())
        return f"{self._value!r} with {shown}" if shown else repr(self._value)


@functools.cache
def is_mutable(kind: Any) -> bool:
    """Whether objects of this class are told apart by identity, and have attributes that can be others later.

    Those of Replicax have variables, and nothing else that a step reads.
    """
    is_by_identity = kind.__hash__ in (None, object.__hash__) and kind.__dictoffset__ != 0
    is_other = issubclass(kind, type | types.ModuleType | types.FunctionType) or kind.__module__.startswith("replicax.")
    return is_by_identity and not is_other


def _attributes(value: Any, names: frozenset[str], depth: int) -> dict[str, Any]:
    kind: Any = type(value)
    mentioned = _mentioned(kind, names)
    return {
        name: _frozen(attribute, mentioned, depth - 1)
        for name, attribute in vars(value).items()
        if name in mentioned and (kind, name) not in changed_by_tracing
    }


def _frozen(value: Any, names: frozenset[str], depth: int) -> Any:
    # A short form of `_jax.Keys`, which would take twice as long: this is part of each call.
    kind: Any = type(value)
    if kind in BY_VALUE:
        return kind, repr(value) if kind in (float, complex) else value  # repr, because 0.0 == -0.0
    if not depth or (kind in CONTAINERS and len(value) > _MOST_ITEMS):
        return ById(value)
    if kind in (set, frozenset):
        return kind, frozenset(value)
    if kind in CONTAINERS:
        items = value.items() if kind is dict else enumerate(value)
        return kind, tuple((key, _frozen(item, names, depth - 1)) for key, item in items)
    return (ById(value), _attributes(value, names, depth)) if is_mutable(kind) else ById(value)


@functools.lru_cache(1024)
def _mentioned(kind: Any, names: frozenset[str]) -> frozenset[str]:
    """The names in a step's code, and in the methods and properties of ``kind`` that it may call."""
    found = new = names | {"__call__"}
    while new:
        further: set[str] = set()
        for name in new:
            method = getattr(kind, name, None)
            method = method.fget if isinstance(method, property) else method
            if isinstance(method, types.FunctionType):
                further |= names_in(method.__code__)
        new = frozenset(further) - found
        found |= new
    return found


def _shown(frozen: Any) -> str:
    kind, value = frozen if isinstance(frozen, tuple) else (ById, frozen)
    return str(value) if kind in (float, complex) else repr(kind) if isinstance(kind, ById) else repr(value)
