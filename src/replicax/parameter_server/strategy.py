"""``ParameterServerStrategy``: variables on servers, and workers that read and change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from replicax.argument_checks import checked_integer
from replicax.cluster.resolver import ClusterResolver
from replicax.devices.selection import resolve_device
from replicax.errors import ContextError
from replicax.extended import StrategyExtended
from replicax.parameter_server.served_variables import ServedCollection, for_servers
from replicax.strategy import Strategy
from replicax.variables.partitioners import PieceCounts, checked_partitioner

Mode = Literal["async", "sync"]


class _ServedExtended(StrategyExtended):
    collection = ServedCollection


class ParameterServerStrategy(Strategy):
    """Variables live on servers; workers read them, compute, and send back changes.

    One program, the *coordinator's*, creates the variables and schedules functions with a :class:`ClusterCoordinator`,
    which starts the servers and workers: processes on this machine, or on the Ray cluster that the program is connected
    to. Each function runs on one worker, and calls ``strategy.run(step)`` there, which runs the step on the worker's
    devices: the same step as under any other strategy. See ``docs/parameter_server.md``.

    Args:
      cluster_resolver: its cluster determines the numbers of workers and servers: the tasks of the jobs ``"worker"``
        and ``"ps"``. Ray decides where they run.
      num_workers: the number of workers; by default the resolver's, or 2.
      num_servers: the number of servers; by default the resolver's, or 1.
      variable_partitioner: how to split each variable over the servers; see :class:`MinSizePartitioner`. By default
        each variable is whole, on the server with the fewest bytes. A variable may have its own ``partitioner``.
      mode: ``"async"``: the servers apply a function's changes when they arrive, whatever the others do. ``"sync"``:
        functions form groups of ``num_workers``, in the order of scheduling, and each group is one step: all its
        functions read the same values, and their gradients are summed before the update. The result is that of
        :class:`MirroredStrategy` with as many replicas.
      max_staleness: asynchronous only: how many other functions may change variables between the time when a function
        reads them and the time when its change is applied. A function that might exceed that waits before it
        begins. Below ``num_workers - 1`` some workers are always idle. ``None`` for no limit.
      devices_per_worker: the number of devices of each worker, which run its replicas; the worker sums their gradients.
        On CPU they are emulated.

    Raises:
      ValueError: an unknown mode; a number below 1; numbers that differ from the resolver's; ``max_staleness`` in the
        synchronous mode, or below 0; a :class:`GroupPartitioner`.
      TypeError: a ``variable_partitioner`` or a ``cluster_resolver`` of another type.

    >>> import replicax
    >>> strategy = replicax.ParameterServerStrategy(num_workers=4, num_servers=2, mode="sync")
    >>> strategy, strategy.num_replicas_in_sync
    (ParameterServerStrategy(4 workers, 2 servers, mode='sync'), 4)
    >>> with strategy.scope():
    ...     w = replicax.Variable([1.0, 2.0], name="w")
    >>> w.numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        num_workers: int | None = None,
        num_servers: int | None = None,
        variable_partitioner: PieceCounts | None = None,
        mode: Mode = "async",
        max_staleness: int | None = None,
        devices_per_worker: int = 1,
    ) -> None:
        if mode not in ("async", "sync"):
            raise ValueError(f"ParameterServerStrategy: mode must be 'async' or 'sync', got {mode!r}")
        if max_staleness is not None and mode == "sync":
            raise ValueError(
                "ParameterServerStrategy: max_staleness is for mode='async'; in the synchronous mode nothing is stale"
            )
        if max_staleness is not None:
            max_staleness = checked_integer(max_staleness, "ParameterServerStrategy: max_staleness", 0)
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(
                "ParameterServerStrategy: cluster_resolver must be a replicax.cluster.ClusterResolver, got "
                f"{cluster_resolver!r}; num_workers and num_servers can be given by themselves"
            )
        self.cluster_resolver = cluster_resolver
        self.num_workers = _count(cluster_resolver, "worker", "num_workers", num_workers, 2)
        self.num_servers = _count(cluster_resolver, "ps", "num_servers", num_servers, 1)
        self.devices_per_worker = checked_integer(devices_per_worker, "ParameterServerStrategy: devices_per_worker")
        self.mode: Mode = mode
        self.max_staleness = max_staleness
        self.variable_partitioner = for_servers(checked_partitioner(variable_partitioner))
        self.coordinator: Callable[[], Any] = lambda: None
        super().__init__(_ServedExtended([resolve_device("cpu:0")]))

    @property
    def groups(self) -> int:
        """The number of scheduled functions of one step."""
        return self.num_workers if self.mode == "sync" else 1

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of a global batch: those of one worker, or, in synchronous mode, of all."""
        return self.devices_per_worker * self.groups

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: steps run only in scheduled functions, on workers, where this is :meth:`Strategy.run`."""
        raise ContextError(
            "ParameterServerStrategy.run was called in the program that schedules: steps run on workers. Put it in a "
            "function, and schedule that: replicax.ClusterCoordinator(strategy).schedule(fn, args)"
        )

    def run_steps(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: parameter servers don't support it."""
        raise ContextError(
            "ParameterServerStrategy has no run_steps: each step reads the servers' variables, and changes them. "
            "Schedule a function for each step, or for a few calls of strategy.run."
        )

    def _distribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: datasets are made only in functions that workers call."""
        raise ContextError(
            "ParameterServerStrategy: datasets are made on workers. Call this in a function without arguments, and "
            "pass that to ClusterCoordinator.create_per_worker_dataset."
        )

    distribute_dataset = experimental_distribute_dataset = _distribute
    distribute_datasets_from_function = experimental_distribute_datasets_from_function = _distribute

    def __repr__(self) -> str:
        bound = "" if self.max_staleness is None else f", max_staleness={self.max_staleness}"
        return (
            f"{type(self).__name__}({self.num_workers} workers, {self.num_servers} servers, mode={self.mode!r}{bound})"
        )


def _count(resolver: ClusterResolver | None, job: str, name: str, given: int | None, default: int) -> int:
    """The number of tasks of a job."""
    if given is not None:
        given = checked_integer(given, f"ParameterServerStrategy: {name}")
    if resolver is None:
        return default if given is None else given
    cluster = resolver.cluster_spec()
    tasks = cluster.num_tasks(job) if job in cluster.jobs else 0
    if not tasks:
        cure = ""
        if getattr(resolver, "kind", "") == "absent":
            cure = ". Its devices are described for plans, which are of steps that are one program: those of "
            cure += "MirroredStrategy(resolver.devices), say"
        raise ValueError(
            f"ParameterServerStrategy: the cluster of {resolver!r} has no job {job!r}; it has {cluster.jobs}{cure}"
        )
    if given is not None and given != tasks:
        raise ValueError(
            f"ParameterServerStrategy: {name} is {given}, but the cluster resolver has {tasks} tasks of the job "
            f"{job!r}: leave one out"
        )
    return tasks
