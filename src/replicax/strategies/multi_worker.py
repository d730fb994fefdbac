"""``MultiWorkerMirroredStrategy``: synchronous data parallelism on the devices of several processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _jax
from replicax.cluster.cluster_resolver import ClusterResolver
from replicax.cluster.initialization import initialize_workers, resolver_of_this_process
from replicax.communication import CommunicationOptions, checked_options
from replicax.devices.cpu_arithmetic import fix_arithmetic
from replicax.devices.mesh import REPLICA_AXIS, replica_mesh
from replicax.devices.selection import in_replicas, resolve_devices
from replicax.extended import StrategyExtended
from replicax.old_names import keywords_renamed
from replicax.strategy import Strategy
from replicax.variables.partitioners import Partitioner
from replicax.workers.exchange import DEFAULT_TIMEOUT, Alone, DistributedWorkers
from replicax.workers.lockstep import Lockstep

_counter = itertools.count()


class MultiWorkerMirroredStrategy(Strategy):
    """A replica on each device of several workers, with a copy of every variable on each, or a piece.

    A *worker* is a process; workers may share a machine (*host*) or have one each; worker 0 is the *chief*. Each worker
    runs the same program, and drives the replicas on its own devices. The strategy connects them, if
    ``jax.distributed.initialize`` has not been called: see :func:`initialize_workers`, which finds the cluster.
    Steps are the same as under :class:`MirroredStrategy`, and so are their results; with one process this is the same
    strategy. Two things are local: ``local_results`` and ``distribute_values_from_function`` have this worker's
    replicas only, and plain values (NumPy arrays, numbers) are this worker's own, and must be the same on all workers.
    All else is global. See ``docs/workers.md``.

    Replicas are in the order of the workers, and on each worker in the order of its devices. Workers may have different
    numbers of devices.

    Args:
      devices: this worker's devices, or their names (``"cpu:1"``); ``None`` means all that it has.
      timeout_seconds: how many seconds to wait for missing workers where all must meet: to create a variable, to run a
        new step or a step on the exact executor, to assign from outside a step. Then an error names them. ``None`` for
        ever. The collectives of compiled steps have timeouts of their own: see ``communication_options``.
      communication_options: :class:`CommunicationOptions` of all collectives without options of their own: those of
        ``apply_gradients``, of ``reduce`` and ``gather``, and ``all_reduce`` and ``all_gather`` without options.
      cluster_resolver: tells of the cluster; ``None`` means that the environment does.
      variable_partitioner: which variables to split over the replicas of all workers, and how; see
        :class:`ShardedVariable`. By default none. :class:`ShardedStrategy` splits all that are not small.
      num_logical_devices: over how many of a worker's devices each replica is spread, one after the other; by default
        each has one. The same on all workers.
      num_replicas: how many replicas, on all workers; a multiple of the number of all their devices. Each device runs
        as many, one after the other; see :class:`MirroredStrategy`. By default each has one.
      reproducible: whether sums over replicas have one order, so that steps have the same bits on any number of devices
        with as many replicas; by default the order is the quickest. What else that takes, such as a flag for the
        compiler on CPUs, says ``docs/replicas.md``.

    Attributes:
      cluster_resolver: the resolver; if none was given, that of ``TF_CONFIG``, or one that knows only which task of
        the job ``"worker"`` this process is.

    Raises:
      RuntimeError: the devices were made before the workers were connected, or can't communicate; the workers
        have different versions, platforms or settings; a collective gave wrong numbers; and as
        :func:`initialize_workers`.
      ValueError: a device is named twice, does not exist or is another worker's; ``num_logical_devices`` does not
        divide the number of this worker's devices; ``num_replicas`` is no multiple of all devices; options that the
        devices don't support; and as :func:`initialize_workers`.
      TypeError: ``communication_options``, ``cluster_resolver`` or ``variable_partitioner`` of another type.
      TimeoutError: workers can't be reached when they are to be connected; the message names them.
      DeadlockError: a worker does not create a strategy; the message names it.

    Exchanges a message among the workers, and runs one small program to test the collectives.

    >>> import replicax
    >>> replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    MultiWorkerMirroredStrategy(2 replicas on 1 worker(s); here: cpu:0, cpu:1)
    >>> replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"], num_replicas=8)
    MultiWorkerMirroredStrategy(8 replicas on 1 worker(s); here: cpu:0, cpu:1, 4 on each device)
    """

    @keywords_renamed(
        communication="communication_options=replicax.CommunicationOptions(…)",
        num_gpus_per_worker="name this worker's devices: devices=['gpu:0', 'gpu:1']; without the argument all are used",
    )
    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        num_logical_devices: int = 1,
        num_replicas: int | None = None,
        reproducible: bool = False,
    ) -> None:
        connected = Connected(
            type(self).__name__,
            devices,
            timeout_seconds,
            communication_options,
            cluster_resolver,
            num_logical_devices,
            num_replicas,
            reproducible,
        )
        self.cluster_resolver = connected.cluster_resolver
        super().__init__(connected.extended(variable_partitioner))

    def __repr__(self) -> str:
        return on_workers(self)


class Connected:
    """This worker's devices and those of the workers that it has been connected with.

    Args:
      what: the strategy that is to have them.
      devices, timeout_seconds, communication_options, cluster_resolver, num_logical_devices, num_replicas,
        reproducible: as for :class:`MultiWorkerMirroredStrategy`, also for the errors.

    Attributes:
      cluster_resolver: the resolver, or what stands for it.
      devices: of the replicas of all workers, in their order: ``[replicas, logical devices]``.
    """

    def __init__(
        self,
        what: str,
        devices: Sequence[str | jax.Device] | None,
        timeout_seconds: float | None,
        communication_options: CommunicationOptions | None,
        cluster_resolver: ClusterResolver | None,
        num_logical_devices: int,
        num_replicas: int | None,
        reproducible: bool,
    ) -> None:
        if isinstance(devices, ClusterResolver):  # as in the original
            raise TypeError(f"{what}: the first argument names devices, and got {devices!r}: pass cluster_resolver=...")
        if reproducible:
            fix_arithmetic(num_replicas)
        self._num_replicas, self._reproducible = num_replicas, reproducible
        initialize_workers(cluster_resolver, timeout_seconds)
        self.cluster_resolver = cluster_resolver or resolver_of_this_process()
        _check_initialised()
        mine = in_replicas(resolve_devices(devices), num_logical_devices)
        self._options = checked_options(communication_options, mine[0, 0].platform, what)
        self._lockstep, self.devices = in_lockstep(mine, timeout_seconds)

    def extended(
        self,
        partitioner: Partitioner | None = None,
        replicas_at_once: int = 1,
    ) -> StrategyExtended:
        """The lower level of a strategy that has as many replicas on each of these devices, by default one."""
        return StrategyExtended(
            self.devices,
            partitioner,
            lockstep=self._lockstep,
            communication_options=self._options,
            num_replicas=self._num_replicas,
            replicas_at_once=replicas_at_once,
            reproducible=self._reproducible,
        )


def on_workers(strategy: Strategy) -> str:
    """What a strategy is in words: how many replicas and workers it has, and which devices are this worker's."""
    extended = strategy.extended
    here = ", ".join(
        f"{d.platform}:{d.local_hardware_id}"
        for i in extended.local_replicas[:: extended.replicas.per_device]
        for d in extended.logical_devices[i]
    )
    logical = extended.num_logical_devices
    each = f" of {logical} logical devices each" if logical > 1 else ""
    shared = f", {extended.replicas.per_device} on each device" if extended.replicas.per_device > 1 else ""
    return (
        f"{type(strategy).__name__}({extended.num_replicas} replicas{each} on {extended.workers.count} worker(s); "
        f"here: {here}{shared})"
    )


def in_lockstep(mine: np.ndarray, timeout_seconds: float | None = DEFAULT_TIMEOUT) -> tuple[Lockstep, np.ndarray]:
    """The lockstep of this worker with the others, and the devices of all; checks that the workers fit together.

    Args:
      mine: the devices of this worker's replicas: ``[replicas, logical devices]``.
      timeout_seconds: how long to wait for the others.
    """
    if jax.process_count() == 1 or _jax.is_absent(mine[0, 0]):  # what is only planned needs nobody
        return Lockstep(Alone(), timeout=timeout_seconds), mine
    number = next(_counter)  # of the strategy: its programs are not those of another
    lockstep = Lockstep(DistributedWorkers(f"replicax/{number}"), f"lockstep {number}", timeout=timeout_seconds)
    everyones = _agreed_devices(mine, lockstep)
    _check_collectives(everyones, lockstep)
    return lockstep, everyones


def _check_initialised() -> None:
    """Make the devices, after checking that they will be able to reach other processes' devices.

    Raises:
      RuntimeError: they won't.
    """
    client_is_there = _jax.coordination_client() is not None
    count = _jax.process_index_and_count()[1]
    if not client_is_there or count == 1:
        return
    if not _jax.backends_are_initialized():
        if jax.config.values["jax_cpu_collectives_implementation"] is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        return
    if jax.process_count() != count:
        raise RuntimeError(
            f"jax.distributed.initialize made this process one of {count}, but JAX had made its devices before: call "
            "it at the top of the program, before any array is made and before jax.devices() is called"
        )
    if jax.default_backend() == "cpu" and jax.config.values["jax_cpu_collectives_implementation"] is None:
        raise RuntimeError(
            "JAX has made CPU devices that can't reach those of other processes: at the top of the program, call "
            "jax.config.update('jax_cpu_collectives_implementation', 'gloo')"
        )


def _agreed_devices(mine: np.ndarray, lockstep: Lockstep) -> np.ndarray:
    """The devices of all workers' replicas, after checking that the workers fit together.

    Raises:
      RuntimeError: they don't; the message names a worker that differs from worker 0, and the difference.
    """
    import jaxlib.version

    seen = {
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
        "the platform": mine[0, 0].platform,
        "the number of processes": jax.process_count(),
        "the number of devices of all processes": jax.device_count(),
        "the number of logical devices of a replica": mine.shape[1],
        "jax_enable_x64": jax.config.values["jax_enable_x64"],
        "jax_default_prng_impl": str(jax.config.values["jax_default_prng_impl"]),
        "jax_threefry_partitionable": jax.config.values["jax_threefry_partitionable"],
    }
    offers = lockstep.share("creates a strategy for several workers", (seen, [d.id for d in mine.flat]))
    for worker, (theirs, _) in enumerate(offers):
        for what, value in theirs.items():
            if value != offers[0][0][what]:
                raise RuntimeError(
                    f"the workers do not fit together: {what} is {offers[0][0][what]!r} on worker 0 and {value!r} on "
                    f"worker {worker}"
                )
    by_id = {d.id: d for d in jax.devices(mine[0, 0].platform)}
    everyones = np.array([by_id[i] for _, ids in offers for i in ids], dtype=object)
    return everyones.reshape(-1, mine.shape[1])


def _check_collectives(devices: np.ndarray, lockstep: Lockstep) -> None:
    """Raise unless sums and gathers over all devices are right.

    Raises:
      RuntimeError: they are not; the message names the collective.
    """
    mesh = replica_mesh(devices.reshape(-1))
    n = devices.size
    size = 1 << 18  # 1 MiB of float32: large enough for collectives that a backend does in pieces

    # Small numbers, so that sums over any likely number of replicas are exact.
    base = (np.arange(size) % 509).astype(np.float32)
    added = (np.arange(n) % 251).astype(np.float32)

    def given(index: Any) -> Any:
        return base + added[index[0]][:, None]

    # The host computes the operands: to compile that would take longer than everything else here.
    def body(mine: Any) -> Any:
        return lax.psum(mine, REPLICA_AXIS), lax.all_gather(mine[:, :1000], REPLICA_AXIS, axis=1, tiled=True)

    split = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    numbers_given = jax.make_array_from_callback((n, size), split, given)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)
    totals, everyones = jax.jit(mapped, out_shardings=split)(numbers_given)
    verdict = [
        all(np.array_equal(np.asarray(shard.data)[0], expected) for shard in found.addressable_shards)
        for found, expected in (
            (totals, base * n + added.sum()),
            (everyones, (base[:1000] + added[:, None]).reshape(-1)),
        )
    ]
    for worker, theirs in enumerate(lockstep.share("checks its collectives", verdict)):
        for what, is_right in zip(("all-reduce", "all-gather"), theirs, strict=True):
            if not is_right:
                raise RuntimeError(
                    f"an {what} over the {n} devices gave wrong numbers on worker {worker}: this build of jaxlib "
                    f"({jax.__version__}) can't be relied on with these devices"
                )
