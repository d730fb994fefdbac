"""``ClusterCoordinator``: schedules functions on the workers of a ``ParameterServerStrategy``."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from replicax import context
from replicax.errors import ContextError, WorkerError
from replicax.parameter_server.actors import Actor, Actors, Reply
from replicax.parameter_server.dispatcher import Dispatcher
from replicax.parameter_server.pickling import Reference, dumps
from replicax.parameter_server.recovery import Recovery
from replicax.parameter_server.remote_values import PerWorkerDataset, PerWorkerIterator, RemoteValue
from replicax.parameter_server.served_variables import VariableHome
from replicax.parameter_server.server.servers import Servers
from replicax.parameter_server.server.shard_server import ShardServer
from replicax.parameter_server.server.shards import ShardChoice
from replicax.parameter_server.strategy import ParameterServerStrategy
from replicax.parameter_server.work_report import WorkReport
from replicax.parameter_server.worker.step_worker import StepWorker, WorkerSettings
from replicax.strategy import Strategy
from replicax.system.environment import threads_for, usable_cores
from replicax.training.optimizer import Optimizer
from replicax.user_functions import checked_args, checked_function, checked_kwargs, function_name
from replicax.variables.variable import Variable

_KEPT_FUNCTIONS = 64
_SENT_WITH_CALLS = 1 << 16
"""A larger pickled function goes into Ray's object store, from which a call takes a few milliseconds to get it."""
_SHARED_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)

log = logging.getLogger("replicax")


class ClusterCoordinator:
    """Starts the servers and workers of a strategy, and runs functions on the workers.

    Each function runs on one worker; functions start in the order of scheduling, as workers become free. If a worker
    dies, another process takes its place and runs the function again; its changes are applied exactly once. A function
    is pickled: the variables, optimizers and strategy that it uses become the worker's own, and everything else that it
    captures is copied.

    Between functions ``variable.numpy()`` and ``variable.assign`` in this program act on the servers' values, and
    :class:`Checkpoint` saves and restores them.

    End it with :meth:`close`, or use it as a context manager; the end of the program ends it, too.

    Args:
      strategy: with the variables and workers.

    Raises:
      TypeError: ``strategy`` is not a :class:`ParameterServerStrategy`.
      ValueError: it has a coordinator already.
      ImportError: Ray is not installed.

    >>> import optax, replicax
    >>> strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1, max_staleness=0)
    >>> with strategy.scope():
    ...     w = replicax.Variable(0.0, name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.25))
    >>> def step(x):
    ...     loss, gradients = replicax.value_and_grad(lambda: (w - x) ** 2, [w])()
    ...     optimizer.apply_gradients(zip(gradients, [w]))
    ...     return loss
    >>> def train(iterator):  # runs on a worker
    ...     return strategy.run(step, args=(next(iterator),))
    >>> with replicax.ClusterCoordinator(strategy) as coordinator:
    ...     numbers = iter(coordinator.create_per_worker_dataset(lambda: [4.0] * 10))
    ...     losses = [coordinator.schedule(train, args=(numbers,)) for _ in range(10)]
    ...     gain = coordinator.schedule(lambda first, last: float(first - last), args=(losses[0], losses[1]))
    ...     report = coordinator.join()
    ...     report.functions, float(w), float(losses[0].fetch()), gain.fetch()
    (11, 3.99609375, 16.0, 12.0)
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(f"ClusterCoordinator(strategy): expected a ParameterServerStrategy, got {strategy!r}")
        present: Any = strategy.coordinator()
        if present is not None and present._finalizer.alive:
            raise ValueError(f"ClusterCoordinator: {strategy!r} has a coordinator already; close that first")
        self.strategy = strategy
        self._cluster = _Cluster(strategy, _make_actors())
        strategy.coordinator = weakref.ref(self)
        self._finalizer = weakref.finalize(self, _Cluster.end, self._cluster)

    # --- methods of tf.distribute -----------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Run ``fn(*args, **kwargs)`` on a worker; returns at once.

        Args:
          fn: runs in the strategy's scope on the worker, where it may call ``strategy.run``. A worker gets it, with
            what it captures and its object's attributes, as they are at this call; it keeps one that stays the same.
          args: its arguments. Per-worker iterators become the worker's own; a :class:`RemoteValue` becomes its value,
            after waiting for it.
          kwargs: the same, by name.

        Returns:
          A :class:`RemoteValue`, whose ``fetch`` waits for the result.

        Raises:
          WorkerError: an earlier function has failed. The error is raised once, and names the worker and the line.
            Waiting functions are cancelled.
          TypeError: ``fn`` is not a function, or uses something that can't be pickled.
          ValueError: it uses another strategy or its variables, or a result of another coordinator's function.
        """
        self._check_open("schedule")
        what = "ClusterCoordinator.schedule(fn, args, kwargs)"
        checked_function(fn, what)
        arguments = tuple(checked_args(args, what)), dict(checked_kwargs(kwargs, what))
        return self._cluster.schedule(fn, arguments)

    def join(self, timeout_seconds: float | None = None) -> WorkReport:
        """Wait until all scheduled functions are done.

        In synchronous mode a last step of fewer functions than usual uses those that there are.

        Args:
          timeout_seconds: how long to wait; ``None`` for ever.

        Returns:
          The number of functions since the last ``join``, their rate, and the age of the variables that they used.

        Raises:
          WorkerError: as :meth:`schedule`.
          TimeoutError: the time has passed; the message says what each worker runs. The functions continue.
        """
        self._check_open("join")
        return self._cluster.dispatcher.join(timeout_seconds)

    def done(self) -> bool:
        """Return whether all scheduled functions are done.

        Raises:
          WorkerError: as :meth:`schedule`.
        """
        self._check_open("done")
        return self._cluster.dispatcher.done()

    def fetch(self, values: Any) -> Any:
        """Wait for results: a pytree in which each :class:`RemoteValue` is replaced by its value.

        Raises:
          WorkerError: as :meth:`RemoteValue.fetch`.
        """
        return jax.tree_util.tree_map(lambda v: v.fetch() if isinstance(v, RemoteValue) else v, values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Have each worker make a dataset.

        Args:
          dataset_fn: called on each worker, in the strategy's scope, when the worker first needs the dataset. It
            returns an iterable, such as ``strategy.distribute_dataset(…)``, or
            ``strategy.distribute_datasets_from_function(…)``, whose function gets the worker's number.

        Returns:
          A dataset whose iterators are arguments of scheduled functions.

        Raises:
          TypeError: ``dataset_fn`` is not a function, or can't be pickled.
          ValueError: it uses the result of a scheduled function.
        """
        self._check_open("create_per_worker_dataset")
        checked_function(dataset_fn, "ClusterCoordinator.create_per_worker_dataset(dataset_fn)", "dataset_fn")
        uses: list[Any] = []
        pickled = self._cluster.dumps(dataset_fn, "dataset_fn", uses)
        if results := [used for used in uses if isinstance(used, RemoteValue)]:
            raise ValueError(
                f"create_per_worker_dataset: dataset_fn uses {results[0]!r}, which only a scheduled function can wait "
                "for: use its value, from fetch()"
            )
        return PerWorkerDataset(pickled, uses, self._cluster.home.definitions)

    # --- shutdown ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fetch the variables, and end the servers and workers; a second call does nothing.

        Running and waiting functions are cancelled. Afterwards the variables are in this process, and the strategy may
        get another coordinator.
        """
        if self._finalizer.alive and self._cluster.dispatcher.is_idle:
            with contextlib.suppress(WorkerError, TimeoutError):  # raised below, where the variables are fetched
                self._cluster.home.restore_servers()
        if self._finalizer.detach() is not None:
            self._cluster.stop()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            return self.close()
        with contextlib.suppress(WorkerError):  # the user's error says more than that dead servers can't be read
            if self._finalizer.detach() is not None:
                self._cluster.stop()

    def _check_open(self, method: str) -> None:
        if context.in_step():
            raise ContextError(f"ClusterCoordinator.{method} was called inside a step: call it outside")
        if not self._finalizer.alive:
            raise ContextError(f"ClusterCoordinator.{method}: this coordinator has been closed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClusterCoordinator is not for workers: schedule functions from the coordinator's program")

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"ClusterCoordinator({self.strategy!r}{state})"


_make_actors: Callable[[], Actors] = Actors
"""Starts processes; tests replace it."""


class _Cluster:
    """The processes of a strategy, as the coordinator's program sees them."""

    def __init__(self, strategy: ParameterServerStrategy, actors: Actors) -> None:
        self._strategy = weakref.ref(strategy)
        self._actors = actors
        settings = {name: getattr(jax.config, name) for name in _SHARED_SETTINGS}
        self._settings = WorkerSettings(strategy.num_workers, strategy.devices_per_worker, strategy.groups, settings)
        self._stored: dict[str, Reply] = {}  # large functions, by their digests, the most recently used last

        # The results of an update need new memory; with small pages getting it takes several times as long as the
        # update. Other systems and older versions ignore the tunable.
        tunables = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")

        def start_server(index: int) -> Actor:
            env = {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": tunables}
            return actors.start(ShardServer, strategy.groups, settings, env=env)

        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(actors.stop)
            self.servers = Servers([start_server(index) for index in range(strategy.num_servers)])
            choice = ShardChoice(strategy.num_servers, strategy.variable_partitioner)
            self.home = VariableHome(strategy.extended.variables, self.servers, choice, self.dumps)
            self.dispatcher = Dispatcher(
                strategy.num_workers,
                self._start_worker,
                Recovery(self.home, start_server, actors.check),
                strategy.groups,
                strategy.max_staleness,
            )
            if_it_fails.callback(self.dispatcher.close, "the coordinator could not be started")
            self.home.dispatcher = self.dispatcher
            self.servers.ended = self.dispatcher.ended
            self.servers.wait_until_ready()
            if_it_fails.pop_all()

    def _start_worker(self, index: int) -> Actor:
        env = _worker_environment(self._settings.devices)
        return self._actors.start(StepWorker, index, self._settings, env=env)

    def schedule(self, fn: Callable[..., Any], arguments: Any) -> RemoteValue:
        name = function_name(fn)
        uses: list[Any] = []
        data = self.dumps(fn, f"the scheduled function {name!r}", uses)  # each time: it may use objects that change
        pickled = self.dumps(arguments, f"an argument of the scheduled function {name!r}", uses)
        self.home.define()
        digest, stored = hashlib.sha256(data).hexdigest(), self._stored
        if len(data) <= _SENT_WITH_CALLS:
            return self.dispatcher.schedule(name, digest, data, pickled, uses)
        known = stored.pop(digest, None) or self._actors.store(np.frombuffer(data, np.uint8))
        stored[digest] = known
        if len(stored) > _KEPT_FUNCTIONS:
            del stored[next(iter(stored))]
        return self.dispatcher.schedule(name, digest, known, pickled, uses)

    def dumps(self, value: Any, what: str, uses: list[Any] | None = None) -> bytes:
        """Pickle ``value``, called ``what`` in messages, for workers; ``uses`` gets the objects that it refers to."""
        return dumps(value, self._reference_of, what, uses)

    def _reference_of(self, value: Any) -> Reference | None:
        """The reference to ``value``; ``None`` if it must be copied."""
        strategy = self._strategy()
        if isinstance(value, RemoteValue):
            value.check_owner(self.dispatcher)
        if isinstance(value, RemoteValue | PerWorkerDataset | PerWorkerIterator):
            return value.reference
        if isinstance(value, Variable):
            if value.strategy is not strategy:
                raise ValueError(
                    f"{value.describe()} belongs to {value.strategy!r}, and can't be used by a function that is "
                    f"scheduled for {strategy!r}: create it inside this strategy's scope()"
                )
            return "variable", value.number
        if isinstance(value, Optimizer):
            return "optimizer", self.home.number_of(value)
        if isinstance(value, Strategy):
            if value is not strategy:
                raise ValueError(f"a scheduled function uses {value!r}, but runs under {strategy!r}")
            return "strategy", 0
        return None

    def end(self) -> None:
        """Stop at the end of the program, or with the last reference to the coordinator, where no caller gets an error.

        Logs that variables can't be fetched, unless the program has already got an error.
        """
        was_told = self.dispatcher.closed is not None
        try:
            self.stop()
        except WorkerError as error:
            if not was_told:
                log.warning("%s", error)

    def stop(self) -> None:
        """Fetch the variables into this process, and end all processes."""
        try:
            self.dispatcher.close("the coordinator has been closed")
            self.home.leave()
        finally:
            self._actors.stop()


def _worker_environment(devices: int) -> dict[str, str]:
    """The environment of a worker: this process' platform, and as many emulated devices as the strategy requests."""
    env = {}
    platforms = os.environ.get("JAX_PLATFORMS") or ("cpu" if jax.default_backend() == "cpu" else "")
    if platforms:
        env["JAX_PLATFORMS"] = platforms
    if devices > 1 and platforms == "cpu":
        env["JAX_NUM_CPU_DEVICES"] = str(devices)
        env["NPROC"] = str(max(threads_for(devices), usable_cores()))
    return env
