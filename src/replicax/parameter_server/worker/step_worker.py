"""A worker: runs scheduled functions in its own process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.data.options import InputOptions
from replicax.data.workers import InputContext
from replicax.devices.host_values import is_key
from replicax.devices.selection import resolve_devices
from replicax.errors import ContextError, WorkerError, line_of
from replicax.extended import StrategyExtended
from replicax.parameter_server.actors import ActorDiedError
from replicax.parameter_server.definitions import (
    CallOutcome,
    Definition,
    FunctionCall,
    OptimizerDefinition,
    VariableDefinition,
)
from replicax.parameter_server.pickling import Reference, loads
from replicax.parameter_server.server.messages import Ended
from replicax.parameter_server.server.servers import Servers
from replicax.parameter_server.worker.server_variables import ServerVariables
from replicax.parameter_server.worker.variables import (
    NotBuiltError,
    WorkerCollection,
    WorkerOptimizer,
    WorkerVariable,
    in_run,
)
from replicax.pytrees import is_leaf, registered
from replicax.strategy import Strategy
from replicax.training.step_hooks import using
from replicax.values import PerReplica
from replicax.variables.initial_layout import Stored
from replicax.variables.layout import Mirrored
from replicax.variables.variable import Variable

_KEPT_FUNCTIONS = 64


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """The settings of all workers, with JAX's settings, the same as the coordinator's."""

    count: int
    devices: int
    groups: int  # how many workers train synchronously; 1 in asynchronous mode
    jax: Mapping[str, Any]


class WorkerExtended(StrategyExtended):
    """The ``extended`` of a worker's strategy."""

    collection = WorkerCollection


class WorkerStrategy(Strategy):
    """The ``strategy`` inside a scheduled function, on the worker's own devices."""

    def __init__(self, index: int, settings: WorkerSettings, server_variables: ServerVariables) -> None:
        extended = WorkerExtended(resolve_devices(None)[: settings.devices])
        extended.remote_variables = server_variables
        super().__init__(extended)
        self.worker_index = index
        self.num_workers = settings.count

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Do the same as in other strategies; the function gets the number of this worker."""
        mine = InputContext(self.num_workers, self.worker_index, self.num_replicas_in_sync)
        return super().distribute_datasets_from_function(lambda _: dataset_fn(mine), options)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, which in the synchronous mode is part of one of several workers; reductions beside it are not."""
        with using(in_run, True):
            return super().run(*args, **kwargs)

    def run_steps(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: each step has to read the servers' variables, and change them."""
        raise ContextError(
            "strategy.run_steps was called in a scheduled function: its steps would not reach the parameter servers in "
            "between. Call strategy.run for each."
        )


class WorkerIterator:
    """A worker's own iterator: it returns elements again to a function that has to run again."""

    def __init__(self, elements: Any) -> None:
        self._elements = elements
        self._taken: list[Any] = []

    def begin(self) -> None:
        """Begin a function."""
        self._taken = []

    def take_back(self) -> None:
        """Take back the elements: the function will run again."""
        self._elements = itertools.chain(self._taken, self._elements)

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        element = next(self._elements)
        self._taken.append(element)
        return element

    get_next = __next__


class StepWorker:
    """Runs scheduled functions, one after the other, with variables on servers."""

    def __init__(self, index: int, settings: WorkerSettings) -> None:
        for name, value in settings.jax.items():
            jax.config.update(name, value)
        self._settings = settings
        self.server_variables = ServerVariables(Servers(()), settings.groups)  # which are defined with the first call
        self.strategy = WorkerStrategy(index, settings, self.server_variables)
        if settings.groups > 1:
            with self._collection.opened():
                self.server_variables.group = Variable(np.int32(0), name="place in the step")
        self._functions: dict[str, Any] = {}  # by their digests, the most recently used last
        self._definitions: dict[Reference, Any] = {}
        self._objects: dict[Reference, Any] = {}  # of the definitions; each is made when a function needs it
        self._inputs: Mapping[int, Any] = {}

    @property
    def _collection(self) -> WorkerCollection:
        collection = self.strategy.extended.variables
        assert isinstance(collection, WorkerCollection)
        return collection

    def ready(self) -> int:
        """The id of its process; answers once it has started. Raises a ``ValueError`` if its devices are too few."""
        found = self.strategy.extended.worker_devices
        if len(found) < self._settings.devices:
            raise ValueError(
                f"worker {self.strategy.worker_index} has {len(found)} {found[0].platform} device(s), and the "
                f"strategy's devices_per_worker is {self._settings.devices}: pass devices_per_worker={len(found)}"
            )
        return os.getpid()

    # --- running ----------------------------------------------------------------------------------------

    def work(
        self,
        call: FunctionCall,
        data: bytes | np.ndarray,
        definitions: Sequence[Definition],
        ended: Ended,
        inputs: Mapping[int, Any],
    ) -> CallOutcome:
        """Run a scheduled function, pickled as ``data``; returns when the servers have applied its changes.

        ``definitions`` are those that this worker does not know yet; ``inputs`` are results of other functions that
        this one uses, by their numbers.
        """
        self._define_all(definitions)
        self._inputs = inputs
        self.server_variables.begin(call.number, ended)
        outcome = self._run(call, data)
        try:
            return dataclasses.replace(outcome, staleness=self.server_variables.settle())
        except (ActorDiedError, TimeoutError):
            return CallOutcome(has_lost_server=True)
        except Exception as error:  # a server could not apply the change
            return outcome if outcome.error is not None else self._failed_outcome(call, error)

    def _run(self, call: FunctionCall, data: bytes | np.ndarray) -> CallOutcome:
        """Run it, without waiting until its changes are applied."""
        try:
            known, digest = self._functions, call.digest
            fn = known.pop(digest) if digest in known else loads(bytes(data), self._find, call.name)
            known[digest] = fn
            if len(known) > _KEPT_FUNCTIONS:
                del known[next(iter(known))]
            args, kwargs = loads(call.arguments, self._find, f"an argument of {call.name}")
            for iterator in self._iterators:
                iterator.begin()
            with self.strategy.scope():
                returned = fn(*args, **kwargs)
                self.server_variables.end()
                return CallOutcome(_fetched_result(self.strategy, returned))
        except NotBuiltError as needed:
            for iterator in self._iterators:
                iterator.take_back()
            return CallOutcome(to_build=(needed.number, needed.variables))
        except ActorDiedError:
            return CallOutcome(has_lost_server=True)
        except BaseException as error:  # also SystemExit, or asyncio's CancelledError
            return self._failed_outcome(call, error)

    def _failed_outcome(self, call: FunctionCall, error: BaseException) -> CallOutcome:
        """The outcome of a function that has raised an error here."""
        from ray import cloudpickle

        where = f"worker {self.strategy.worker_index}"
        told = WorkerError(f"{call} failed on {where} at {line_of(error)}: {type(error).__name__}: {error}")
        told.add_note(f"On {where}:\n{''.join(traceback.format_exception(error)).rstrip()}")
        cause: bytes | None = None
        with contextlib.suppress(Exception):  # some errors can't be pickled or unpickled
            dumps: Any = cloudpickle.dumps  # by value where the class is the program's own
            pickle.loads(data := dumps(error))
            cause = data
        return CallOutcome(error=told, cause=cause)

    def _define_all(self, definitions: Sequence[Definition]) -> None:
        for reference, content in definitions:
            kind, number = reference
            if content is None:
                del self._definitions[reference]
                dropped = self._objects.pop(reference, None)
                if kind == "variable":
                    self.server_variables.forget(number, dropped)
                continue
            self._definitions[reference] = content
            if kind == "variable":
                self.server_variables.shards[number] = content.shards
            elif kind == "servers":
                self.server_variables.servers.actors = content

    # --- references of functions ------------------------------------------------------------------------

    @property
    def _iterators(self) -> list[WorkerIterator]:
        return [one for one in self._objects.values() if isinstance(one, WorkerIterator)]

    def _find(self, reference: Reference) -> Any:
        kind, number = reference
        if kind == "strategy":
            return self.strategy
        if kind == "value":
            return self._inputs[number]
        if reference not in self._objects:
            make: Callable[[int, Any], Any] = getattr(self, f"_{kind}")
            self._objects[reference] = make(number, self._definitions[reference])
        return self._objects[reference]

    def _variable(self, number: int, told: VariableDefinition) -> WorkerVariable:
        with self._collection.opened():
            # Its value is fetched before a program that reads it, or never if only rows of it are read.
            nothing = jax.device_put(np.zeros((), told.dtype), Mirrored().sharding(self.strategy.extended.mesh))
            return WorkerVariable(
                self.server_variables,
                number,
                Stored(nothing, Mirrored(), told.shape),
                trainable=told.trainable,
                name=told.name,
                aggregation=told.aggregation,
            )

    def _optimizer(self, number: int, told: OptimizerDefinition) -> WorkerOptimizer:
        def built_for() -> Any:
            """The pytree of variables that it has been built for by now; ``None`` if it has not been built."""
            data = self._definitions["optimizer", number].variables
            return None if data is None else loads(data, self._find, "the pytree of an optimizer's variables")

        return WorkerOptimizer(self.server_variables, number, told.name, built_for)

    def _dataset(self, _: int, pickled_fn: bytes) -> Any:
        dataset_fn = loads(pickled_fn, self._find, "dataset_fn")
        with self.strategy.scope():
            dataset = dataset_fn()
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            returned = "None; does it lack its return?" if dataset is None else type(dataset).__name__
            raise TypeError(
                "create_per_worker_dataset: dataset_fn is to return a dataset, or another iterable; it returned "
                f"{returned}"
            )
        return dataset

    def _iterator(self, _: int, dataset: int) -> WorkerIterator:
        elements = self._find(("dataset", dataset))
        with self.strategy.scope():
            return WorkerIterator(iter(elements))


def _fetched_result(strategy: Strategy, returned: Any) -> Any:
    """Return a function's result as NumPy arrays, or keys: a tuple of them for values that differ between replicas."""

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            leaf = leaf.read_value()
        if isinstance(leaf, PerReplica):
            return tuple(on_host(part) for part in strategy.local_results(leaf))
        return np.asarray(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf.dtype) else leaf

    return jax.tree_util.tree_map(on_host, registered(returned), is_leaf=is_leaf)
