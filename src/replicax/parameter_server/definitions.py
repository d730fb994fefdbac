"""Definitions that workers get: variables, optimizers, datasets, and the function to run."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

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
class PickledFunction:
    """A scheduled function, pickled, which its digest identifies; and ``(args, kwargs)``, pickled, too."""

    name: str
    digest: str
    fn: bytes | None
    arguments: bytes


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a scheduled function, to be sent to a worker.

    Attributes:
      number: of the call, from 0, in the order of scheduling.
      function: without its ``fn`` if the worker has that.
      definitions: those that the worker does not know yet.
      ended: the functions that had ended at the time of sending.
      old_functions: digests of functions for the worker to forget.
      inputs: results of other functions that this one uses, by their numbers.
    """

    number: int
    function: PickledFunction
    definitions: Sequence[Definition]
    ended: Ended
    old_functions: Sequence[str]
    inputs: Mapping[int, Any]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of a function on a worker; ``line`` is the user's."""

    kind: str
    text: str
    line: str = ""
    traceback: str = ""
    error: bytes | None = None


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """The result of a call; at most one of failure, to_build and lost is set.

    Attributes:
      value: the function's result.
      staleness: of each of its pushes.
      failure: its error.
      to_build: an optimizer that it needs, and the pickled pytree of the variables to build it for.
      lost: how the worker or a server died.
      is_server: whether a server died, so that other workers can try again.
    """

    value: Any = None
    staleness: tuple[int, ...] = ()
    failure: Failure | None = None
    to_build: tuple[int, bytes] | None = None
    lost: str | None = None
    is_server: bool = False
