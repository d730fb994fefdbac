"""What the exact executor knows of arrays, and follows from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax

from replicax.execution.example_places import Operation, Place
from replicax.execution.example_rules import result_places
from replicax.execution.examples import number
from replicax.execution.infer import UNRELIABLE
from replicax.execution.meetings import sum_p, whole_p
from replicax.locality import Locality, M, R, T
from replicax.reduction import share_p

Fact = TypeVar("Fact")


class _Notes(Generic[Fact]):
    """Something about each of some arrays; ``usual`` of all others."""

    def __init__(self, usual: Fact) -> None:
        self._usual = usual
        self._noted: dict[int, tuple[Any, Fact]] = {}

    def set(self, array: Any, fact: Fact) -> None:
        key = id(array)
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            return
        if fact == self._usual:
            self._noted.pop(key, None)
        else:
            self._noted[key] = weakref.ref(array, lambda _: self._noted.pop(key, None)), fact

    def of(self, array: Any) -> Fact:
        """What has been noted of ``array``."""
        known = self._noted.get(id(array))
        return known[1] if known is not None and known[0]() is array else self._usual


class Localities(_Notes[Locality]):
    """The localities of arrays: those that are noted, and all that is computed from them; M of all others."""

    def __init__(self) -> None:
        super().__init__(M)

    def note(self, array: Any, locality: Locality = T) -> None:
        """Remember the locality of ``array``."""
        self.set(array, locality)

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """An operation has been computed."""
        found = M
        for arg in args:
            found = found | self.of(arg)
        if primitive in (sum_p, whole_p):
            found = R
        elif primitive is share_p or primitive.name in UNRELIABLE:
            found = T
        elif primitive.name == "replicax_asks":
            found = M
        for result in results:
            self.note(result, found)


class Places(_Notes[Place]):
    """Where the examples of a padded batch are in arrays.

    Args:
      rows: how many a replica has, padding included.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self._rows = rows

    def note(self, array: Any, place: Place) -> None:
        """Remember where the examples are in ``array``."""
        self.set(array, place)

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """An operation has been computed."""
        operation = Operation(
            primitive.name,
            params,
            tuple(map(self.of, args)),
            tuple(tuple(getattr(a, "shape", ())) for a in args),
            tuple(tuple(r.shape) for r in results),
            self._rows,
            lambda i: number(args[i]),
        )
        for result, place in zip(results, result_places(operation), strict=True):
            self.note(result, place)
