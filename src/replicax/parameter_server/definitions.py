"""What workers are told: of variables, optimizers and datasets, and which function to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from replicax.parameter_server.engine.actors import Actor
from replicax.parameter_server.serving.shards import Shards
from replicax.training.optimizer import Optimizer
from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class VariableDefinition:
    """A variable, and where its parts are."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    aggregation: str
    shards: Shards


@dataclasses.dataclass(frozen=True)
class OptimizerDefinition:
    """An optimizer that has been built: the pytree of its variables, pickled."""

    number: int
    variables: bytes


@dataclasses.dataclass(frozen=True)
class DatasetDefinition:
    """A function that makes a worker's dataset, pickled."""

    number: int
    dataset_fn: bytes


@dataclasses.dataclass(frozen=True)
class ServersDefinition:
    """The processes that are the servers now; values that were read before are out of date."""

    actors: tuple[Actor, ...]


class Definitions:
    """All that has been defined, in its order; a worker is told what it does not know yet.

    Args:
      dumps: pickles objects that refer to variables.

    Attributes:
      shards: of each variable, by number.
    """

    def __init__(self, dumps: Callable[[Any], bytes]) -> None:
        self._dumps = dumps
        self._all: list[Any] = []
        self.shards: dict[int, Shards] = {}

    def since(self, known: int) -> Sequence[Any]:
        """Those after the first ``known``."""
        return tuple(self._all[known:])

    def add_variable(self, variable: Variable, shards: Shards) -> None:
        """Define a variable, or move it to other servers."""
        self.shards[variable.number] = shards
        self._all.append(
            VariableDefinition(
                variable.number,
                variable.name,
                tuple(variable.shape),
                variable.dtype,
                variable.trainable,
                variable.aggregation.value,
                shards,
            )
        )

    def add_optimizer(self, number: int, optimizer: Optimizer) -> None:
        """Define an optimizer that has been built."""
        self._all.append(OptimizerDefinition(number, self._dumps(optimizer.parameters)))

    def add_servers(self, actors: Sequence[Actor]) -> None:
        """Define which processes are the servers."""
        self._all.append(ServersDefinition(tuple(actors)))

    def add_dataset(self, number: int, dataset_fn: bytes) -> None:
        """Define a dataset of each worker."""
        self._all.append(DatasetDefinition(number, dataset_fn))


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A scheduled function, on its way to a worker.

    Attributes:
      number: of the call, from 0, in the order of scheduling.
      name: of the function.
      digest: tells its function from others.
      fn: the function, pickled; ``None`` if the worker has it.
      arguments: ``(args, kwargs)``, pickled.
      definitions: those that the worker does not know yet.
      finished_below: see :class:`replicax.parameter_server.serving.pushes.Push`.
      place: among the calls of this worker's process, from 0.
      failures: how many functions that have failed in this process the coordinator knew of. If there are more, this
        one is not to be run.
    """

    number: int
    name: str
    digest: str
    fn: bytes | None
    arguments: bytes
    definitions: Sequence[Any]
    finished_below: int
    place: int
    failures: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a function raised on a worker: the error's type and text, the user's line, and all of the traceback."""

    kind: str
    text: str
    line: str
    traceback: str
    error: bytes | None


@dataclasses.dataclass(frozen=True)
class CallOutcome:
    """How a call has ended; at most one of failure, to_build and lost is set.

    Attributes:
      value: what the function returned.
      staleness: of each of its pushes.
      failure: what it raised.
      to_build: an optimizer that it needs, and the pytree of the variables that it is for, pickled.
      lost: the worker or a server has died; how.
      is_server: whether that was a server, so that others can try it again.
      seconds: how long the function has computed.
      failures: how many functions have failed in this process; with a failure.
      is_called_off: whether it was not run, because a function has failed in this process that the coordinator did not
        know of when it made the call.
    """

    value: Any = None
    staleness: tuple[int, ...] = ()
    failure: Failure | None = None
    to_build: tuple[int, bytes] | None = None
    lost: str | None = None
    is_server: bool = False
    seconds: float | None = None
    failures: int = 0
    is_called_off: bool = False
