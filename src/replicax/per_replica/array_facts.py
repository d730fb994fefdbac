"""The facts that the per-replica executor keeps about arrays: locality, and where the examples are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax

from replicax.execution.program.infer import infer
from replicax.execution.program.locality_rules import result_localities
from replicax.locality import Locality, M, R
from replicax.padding.example_places import OperationShapes, Place
from replicax.padding.example_rules import result_places
from replicax.padding.examples import known_number
from replicax.per_replica.collectives import sum_p, whole_p
from replicax.per_replica.eager.eager_trace import program_p

Fact = TypeVar("Fact")

_PUT_TOGETHER = frozenset({sum_p, whole_p})
"""Operations whose result all replicas compute together and receive."""


class _Notes(Generic[Fact]):
    """Facts about arrays: one for each noted array, and ``usual`` for all others."""

    def __init__(self, usual: Fact) -> None:
        self._usual = usual
        self._noted: dict[int, tuple[Any, Fact]] = {}

    def note(self, array: Any, fact: Fact) -> None:
        """Remember a fact about ``array``."""
        key = id(array)
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            return
        self._noted[key] = weakref.ref(array, functools.partial(_forget, weakref.ref(self), key)), fact

    def has(self, array: Any) -> bool:
        """Whether a fact about ``array`` has been noted."""
        known = self._noted.get(id(array))
        return known is not None and known[0]() is array

    def of(self, array: Any) -> Fact:
        """The fact about ``array``."""
        return self._noted[id(array)][1] if self.has(array) else self._usual


def _forget(notes: weakref.ref[_Notes[Any]], key: int, _: Any) -> None:
    """Forget an array that is gone. The notes are held weakly: a reference cycle would delay the release of arrays."""
    if (left := notes()) is not None:
        left._noted.pop(key, None)


class Localities(_Notes[Locality]):
    """The localities of a step's arrays: of noted ones, and of all computed from them; ``MIRRORED`` for all others."""

    def __init__(self) -> None:
        super().__init__(M)
        self.used: set[int] = set()  # the ids of the operands of all operations

    def is_of_step(self, value: Any) -> bool:
        """Whether ``value`` is an argument of the step or computed by it, and not an array from outside."""
        return isinstance(value, jax.core.Tracer) or self.has(value)

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """Note the facts of an operation's results."""
        operands = list(map(self.of, args))
        self.used.update(map(id, args))
        if primitive is program_p:
            facts = _infer(params["program"], tuple(operands))
        elif primitive in _PUT_TOGETHER:
            facts = [R] * len(results)
        else:
            facts = result_localities(primitive.name, params, operands, len(results))
        for result, locality in zip(results, facts, strict=True):
            self.note(result, locality)


_inferred: weakref.WeakKeyDictionary[Any, dict[tuple[Locality, ...], list[Locality]]] = weakref.WeakKeyDictionary()


def _infer(jaxpr: Any, inputs: tuple[Locality, ...]) -> list[Locality]:
    """The localities of a program's results; cached."""
    known = _inferred.setdefault(jaxpr, {})
    if inputs not in known:
        known[inputs] = infer(jaxpr, inputs, {}, check=False)
    return known[inputs]


class Places(_Notes[Place]):
    """The places in arrays of the examples of a batch that has so many ``rows`` on a replica, padding included."""

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self._rows = rows

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """Note the facts of an operation's results."""
        operation = OperationShapes(
            primitive.name,
            params,
            tuple(map(self.of, args)),
            tuple(tuple(getattr(a, "shape", ())) for a in args),
            tuple(tuple(r.shape) for r in results),
            self._rows,
            lambda i: known_number(args[i]),
        )
        # A result of all replicas does not hold this replica's own examples.
        facts = [None] * len(results) if primitive in _PUT_TOGETHER else result_places(operation)
        for result, place in zip(results, facts, strict=True):
            self.note(result, place)
