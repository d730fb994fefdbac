"""What the exact executor knows of arrays, and follows from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax

from replicax import _jax
from replicax.execution.padding.example_places import OperationShapes, Place
from replicax.execution.padding.example_rules import result_places
from replicax.execution.padding.examples import number
from replicax.execution.program.infer import infer
from replicax.execution.program.locality_rules import result_localities
from replicax.locality import Locality, M, R
from replicax.per_replica.collectives import sum_p, whole_p

Fact = TypeVar("Fact")

_PUT_TOGETHER = frozenset({sum_p, whole_p})
"""What all replicas make together, and all of them get."""


class _Notes(Generic[Fact]):
    """Something about each of some arrays; ``usual`` of all others."""

    def __init__(self, usual: Fact) -> None:
        self._usual = usual
        self._noted: dict[int, tuple[Any, Fact]] = {}

    def note(self, array: Any, fact: Fact) -> None:
        """Remember this of ``array``."""
        key = id(array)
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            return
        self._noted[key] = weakref.ref(array, lambda _: self._noted.pop(key, None)), fact

    def has(self, array: Any) -> bool:
        """Whether anything has been noted of ``array``."""
        known = self._noted.get(id(array))
        return known is not None and known[0]() is array

    def of(self, array: Any) -> Fact:
        """What has been noted of ``array``."""
        return self._noted[id(array)][1] if self.has(array) else self._usual


class Localities(_Notes[Locality]):
    """The arrays of a step, with their localities: those that are noted, and all that is computed from them.

    M of all others.
    """

    def __init__(self) -> None:
        super().__init__(M)

    def is_of_step(self, value: Any) -> bool:
        """Whether ``value`` is an array that the step was given or has computed, and not one from outside."""
        return isinstance(value, jax.core.Tracer) or self.has(value)

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """An operation has been computed."""
        operands = list(map(self.of, args))
        if primitive is _jax.program_p:
            found = _infer(params["program"], tuple(operands))
        elif primitive in _PUT_TOGETHER:
            found = [R] * len(results)
        else:
            found = result_localities(primitive.name, params, operands, len(results))
        for result, locality in zip(results, found, strict=True):
            self.note(result, locality)


_inferred: weakref.WeakKeyDictionary[Any, dict[tuple[Locality, ...], list[Locality]]] = weakref.WeakKeyDictionary()


def _infer(jaxpr: Any, inputs: tuple[Locality, ...]) -> list[Locality]:
    """The localities of a program's results, remembered."""
    known = _inferred.setdefault(jaxpr, {})
    if inputs not in known:
        known[inputs] = infer(jaxpr, inputs, {}, check=False)
    return known[inputs]


class Places(_Notes[Place]):
    """Where the examples of a padded batch are in arrays.

    Args:
      rows: how many a replica has, padding included.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self._rows = rows

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """An operation has been computed."""
        operation = OperationShapes(
            primitive.name,
            params,
            tuple(map(self.of, args)),
            tuple(tuple(getattr(a, "shape", ())) for a in args),
            tuple(tuple(r.shape) for r in results),
            self._rows,
            lambda i: number(args[i]),
        )
        # What replicas have put together is no replica's own examples.
        found = [None] * len(results) if primitive in _PUT_TOGETHER else result_places(operation)
        for result, place in zip(results, found, strict=True):
            self.note(result, place)
