"""Definitions that workers get: variables, optimizers, datasets, and the function to run."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.parameter_server.actors import Actor
from replicax.parameter_server.server.messages import Ended
from replicax.parameter_server.server.shards import Shards
from replicax.training.optimizer import Optimizer
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

    Each object appears once, with its last definition. Dropped ones stay until all workers know of it.

    Args:
      dumps: pickles objects that refer to variables.

    Attributes:
      shards: of each variable, by number.
    """

    def __init__(self, dumps: Callable[[Any], bytes]) -> None:
        self._dumps = dumps
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

    def _add(self, kind: str, number: int, content: Any) -> None:
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
            self._add(kind, number, None)
        return variables, optimizers

    def add_variable(self, variable: Variable, shards: Shards) -> None:
        """Define a variable, or move it to other servers."""
        self.shards[variable.number] = shards
        definition = VariableDefinition(
            variable.name,
            tuple(variable.shape),
            variable.dtype,
            variable.trainable,
            variable.aggregation.value,
            shards,
        )
        self._add("variable", variable.number, definition)

    def add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Define an optimizer that has been built, by the pytree of its variables."""
        self._add("optimizer", number, self._dumps(optimizer.parameters))

    def add_servers(self, actors: Sequence[Actor]) -> None:
        """Define the present server processes; values that were read before are out of date."""
        self._add("servers", 0, tuple(actors))

    def add_dataset(self, number: int, dataset_fn: bytes) -> None:
        """Define a dataset for each worker, by the pickled function that makes it."""
        self._add("dataset", number, dataset_fn)


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of a scheduled function, to be sent to a worker.

    Attributes:
      number: of the call, from 0, in the order of scheduling.
      digest: identifies its function.
      fn: the function, pickled; ``None`` if the worker has it.
      arguments: ``(args, kwargs)``, pickled.
      definitions: those that the worker does not know yet.
      ended: the functions that had ended at the time of sending.
      old_functions: digests of functions for the worker to forget.
      inputs: results of other functions that this one uses, by their numbers.
    """

    number: int
    name: str
    digest: str
    fn: bytes | None
    arguments: bytes
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
