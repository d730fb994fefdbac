"""Definitions that workers get: variables, optimizers, datasets, and the function to run."""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.server.messages import Ended
from replicax.parameter_server.server.shards import Shards
from replicax.variables.variable import Variable

Definition = tuple[str, int, Any]
"""The kind and number of an object, and its content: ``None`` if the program has dropped it."""


@dataclasses.dataclass(frozen=True)
class VariableDefinition:
    """A variable, and the places of its parts."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    aggregation: str
    shards: Shards


class Definitions:
    """All definitions; a worker gets those that it does not know yet.

    Each object appears once, with its last definition. Dropped ones stay until all workers know of it. ``shards`` has
    those of each variable, by number.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], tuple[int, Any]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._gone: collections.deque[tuple[str, int]] = collections.deque()
        self.shards: dict[int, Shards] = {}

    def since(self, known: int) -> tuple[int, Sequence[Definition]]:
        """The definitions after the first ``known``, and their present number."""
        with self._lock:
            return self._count, tuple((*key, content) for key, (count, content) in self._all.items() if count >= known)

    def known_to_all(self, known: int) -> None:
        """Note that all workers know the first ``known``."""
        with self._lock:
            for key in [key for key, (count, content) in self._all.items() if content is None and count < known]:
                del self._all[key]

    def add(self, kind: str, number: int, content: Any) -> None:
        """Define an object.

        The content is a :class:`VariableDefinition`; the pickled pytree of an optimizer's variables; the pickled
        function that makes a dataset; or the present server processes: values that were read before are out of date.
        """
        with self._lock:
            self._all.pop((kind, number), None)  # keeps the newest last
            self._all[kind, number] = self._count, content
            self._count += 1

    def drop(self, kind: str, number: int) -> None:
        """Note that the program has dropped an object. May be called from anywhere, even from the garbage collector."""
        self._gone.append((kind, number))

    def drop_with(self, owner: Any, kind: str, number: int) -> None:
        """Drop an object when the program drops its ``owner``."""
        weakref.finalize(owner, self.drop, kind, number).atexit = False

    def forget(self) -> tuple[list[int], list[int]]:
        """Make workers forget dropped objects; returns the variables and the optimizers among them."""
        variables, optimizers = [], []
        while self._gone:
            kind, number = self._gone.popleft()
            if kind == "variable" and self.shards.pop(number, None) is not None:
                variables.append(number)
            elif kind == "optimizer":
                optimizers.append(number)
            self.add(kind, number, None)
        return variables, optimizers

    def add_variable(self, variable: Variable, shards: Shards) -> None:
        """Define a variable, or move it to other servers."""
        self.shards[variable.number] = shards
        v, shape = variable, tuple(variable.shape)
        definition = VariableDefinition(v.name, shape, v.dtype, v.trainable, v.aggregation.value, shards)
        self.add("variable", v.number, definition)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a scheduled function; the last three are known when it is sent to a worker.

    Attributes:
      number: of the call, from 0, in the order of scheduling.
      name: of the function.
      digest: of the pickled function.
      arguments: ``(args, kwargs)``, pickled.
      definitions: those that the worker does not know yet.
      ended: the functions that had ended at the time of sending.
      inputs: results of other functions that this one uses, by their numbers.
    """

    number: int
    name: str
    digest: str
    arguments: bytes
    definitions: Sequence[Definition] = ()
    ended: Ended = dataclasses.field(default_factory=Ended)
    inputs: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} (scheduled function {self.number})"


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """The result of a call; at most one of error, to_build and has_lost_server is set.

    Attributes:
      value: the function's result.
      staleness: of each of its pushes.
      error: its error, and the pickled exception that caused it, if that can be pickled.
      to_build: an optimizer that it needs, and the pickled pytree of the variables to build it for.
      has_lost_server: whether a server died, so that it must run again.
    """

    value: Any = None
    staleness: tuple[int, ...] = ()
    error: tuple[WorkerError, bytes | None] | None = None
    to_build: tuple[int, bytes] | None = None
    has_lost_server: bool = False
