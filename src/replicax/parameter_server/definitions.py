"""Definitions that workers get: variables, optimizers, datasets, and the function to run."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import weakref
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.pickling import Reference
from replicax.parameter_server.server.shards import Shards
from replicax.variables.variable import Variable

Definition = tuple[Reference, Any]
"""The reference to an object, and its content: ``None`` if the program has dropped it."""


@dataclasses.dataclass(frozen=True)
class VariableDefinition:
    """A variable, and the places of its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    aggregation: str
    shards: Shards


@dataclasses.dataclass(frozen=True)
class OptimizerDefinition:
    """An optimizer, and the variables that it was built for, as a pickled pytree; ``None`` before."""

    name: str
    variables: bytes | None = None


class Definitions:
    """Definitions of the program's objects for workers. ``shards`` has those of each variable, by number."""

    def __init__(self) -> None:
        self._all: dict[Reference, Any] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._gone: collections.deque[Reference] = collections.deque()
        self.shards: dict[int, Shards] = {}

    def since(self, known: dict[Reference, Any]) -> list[Definition]:
        """Return what is new to a worker that knows ``known``, and add it to ``known``."""
        with self._lock:
            new: list[Definition] = [(reference, None) for reference in known.keys() - self._all.keys()]
            new += [(one, content) for one, content in self._all.items() if known.get(one) is not content]
            known.clear()
            known.update(self._all)
        return new

    def define(self, reference: Reference, content: Any) -> None:
        """Define an object.

        The content is a :class:`VariableDefinition` or :class:`OptimizerDefinition`; for a dataset the pickled function
        that makes it; for an iterator the number of its dataset; or the present server processes.
        """
        with self._lock:
            self._all[reference] = content

    def define_new(self, kind: str, owner: Any, content: Any) -> Reference:
        """Define an object with a new number, until the program drops ``owner``; returns its reference."""
        reference = kind, next(self._numbers)
        self.define(reference, content)
        self._drop_with(owner, reference)
        return reference

    def define_variable(self, variable: Variable, shards: Shards) -> None:
        """Define a variable, until the program drops it, or move it to other servers."""
        if variable.number not in self.shards:
            self._drop_with(variable, ("variable", variable.number))
        self.shards[variable.number] = shards
        v, shape = variable, tuple(variable.shape)
        definition = VariableDefinition(v.name, shape, v.dtype, v.trainable, v.aggregation.value, shards)
        self.define(("variable", v.number), definition)

    def _drop_with(self, owner: Any, reference: Reference) -> None:
        weakref.finalize(owner, self._gone.append, reference).atexit = False  # even by the garbage collector

    def forget(self) -> list[Reference]:
        """Make workers forget dropped objects; returns these."""
        gone = []
        while self._gone:
            kind, number = reference = self._gone.popleft()
            with self._lock:
                self._all.pop(reference, None)
            if kind == "variable":
                self.shards.pop(number, None)
            gone.append(reference)
        return gone


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a scheduled function."""

    number: int  # from 0, in the order of scheduling
    name: str
    digest: str  # of the pickled function
    arguments: bytes  # (args, kwargs), pickled

    def __str__(self) -> str:
        return f"{self.name} (scheduled function {self.number})"


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """The result of a call; at most one of error, to_build and has_lost_server is set."""

    value: Any = None  # the function's result
    staleness: tuple[int, ...] = ()  # of each of its pushes
    error: WorkerError | None = None
    cause: bytes | None = None  # the exception that caused the error, pickled, if that is possible
    to_build: tuple[int, Any] | None = None  # an optimizer that it needs, and a pytree of the variables' numbers
    has_lost_server: bool = False  # a server died, so the function must run again
