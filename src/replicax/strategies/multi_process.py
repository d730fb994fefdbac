"""``MultiProcessStrategy``: the base of strategies that use the devices of all workers, which it connects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax import lax

from replicax import _jax
from replicax.cluster.initialization import initialize_workers, resolver_of_this_process
from replicax.cluster.resolver import ClusterResolver
from replicax.communication import CommunicationImplementation, CommunicationOptions, checked_options
from replicax.devices.mesh import REPLICA_AXIS, per_replica_sharding, replica_mesh
from replicax.devices.selection import grouped_by_replica, resolve_devices
from replicax.extended import ReplicaOptions, StrategyExtended
from replicax.strategy import Strategy
from replicax.system import packages
from replicax.variables.partitioners import Partitioner
from replicax.workers.exchange import DEFAULT_TIMEOUT, Alone, DistributedWorkers
from replicax.workers.lockstep import Lockstep

_FIRST_IN_THE_ORIGINAL: dict[Any, str] = {
    ClusterResolver: "cluster_resolver=...",
    (CommunicationOptions, CommunicationImplementation): "communication_options=replicax.CommunicationOptions(...)",
}
"""What ``tf.distribute`` has in the place of the devices, and how it is passed here."""

_counter = itertools.count()


class MultiProcessStrategy(Strategy):
    """A strategy on the devices of all workers: it connects them, and checks that they agree.

    Args:
      partitioner: returns the partitioner for a number of blocks of devices of all workers. (That number is known only
        once the workers are connected.)
      devices, timeout_seconds, communication_options, cluster_resolver, num_logical_devices, replica_options: as for
        :class:`MultiWorkerMirroredStrategy`, also for the errors.

    Attributes:
      cluster_resolver: the resolver, or a replacement if none was given.
    """

    def __init__(
        self,
        partitioner: Callable[[int], Partitioner | None],
        devices: Sequence[str | jax.Device] | np.ndarray | None,
        timeout_seconds: float | None,
        communication_options: CommunicationOptions | None,
        cluster_resolver: ClusterResolver | None,
        num_logical_devices: int,
        **replica_options: Unpack[ReplicaOptions],
    ) -> None:
        what = type(self).__name__
        for kinds, instead in _FIRST_IN_THE_ORIGINAL.items():
            if isinstance(devices, kinds):
                raise TypeError(f"{what}: the first argument names devices, and got {devices!r}: pass {instead}")
        initialize_workers(cluster_resolver, timeout_seconds)
        self.cluster_resolver = cluster_resolver or resolver_of_this_process()
        _check_initialised()
        if devices is None and getattr(cluster_resolver, "kind", "attached") != "attached":
            devices = cluster_resolver.devices  # type: ignore[union-attr]  # described or emulated ones
        found = resolve_devices(devices, replica_options["reproducible"], replica_options["num_replicas"])
        mine = grouped_by_replica(found, num_logical_devices)
        options = checked_options(communication_options, mine[0, 0].platform, what)
        lockstep, everyones = check_workers_agree(mine, timeout_seconds, **replica_options)
        super().__init__(
            StrategyExtended(
                everyones,
                partitioner(len(everyones)),
                lockstep=lockstep,
                communication_options=options,
                **replica_options,
            )
        )

    def __repr__(self) -> str:
        extended = self.extended
        here = ", ".join(
            f"{d.platform}:{d.local_hardware_id}"
            for i in extended.local_replicas[:: extended.replicas.per_device]
            for d in extended.logical_devices[i]
        )
        logical = extended.num_logical_devices
        each = f" of {logical} logical devices each" if logical > 1 else ""
        shared = f", {extended.replicas.per_device} on each device" if extended.replicas.per_device > 1 else ""
        return (
            f"{type(self).__name__}({extended.num_replicas} replicas{each} on {extended.workers.count} worker(s); "
            f"here: {here}{shared})"
        )


def check_workers_agree(
    mine: np.ndarray, timeout_seconds: float | None = DEFAULT_TIMEOUT, **replica_options: Unpack[ReplicaOptions]
) -> tuple[Lockstep, np.ndarray]:
    """The lockstep of this worker with the others, and the devices of all; checks that the workers agree.

    ``mine`` are the devices of this worker's replicas, ``[replicas, logical devices]``; ``replica_options``, too, must
    be the same on all workers.
    """
    if jax.process_count() == 1 or _jax.is_absent(mine[0, 0]):  # plans need no other workers
        return Lockstep(Alone(), timeout=timeout_seconds), mine
    number = next(_counter)  # of the strategy: it separates its programs from those of others
    lockstep = Lockstep(DistributedWorkers(f"replicax/{number}"), f"lockstep {number}", timeout=timeout_seconds)
    everyones = _agreed_devices(mine, lockstep, replica_options)
    _check_collectives(everyones, lockstep)
    return lockstep, everyones


def _check_initialised() -> None:
    """Create the devices, after checking that they will be able to reach other processes' devices."""
    client_is_there = _jax.coordination_client() is not None
    count = _jax.process_index_and_count()[1]
    if not client_is_there or count == 1:
        return
    if not _jax.backends_are_initialized():
        if _jax.setting("jax_cpu_collectives_implementation") is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        return
    if jax.process_count() != count:
        raise RuntimeError(
            f"jax.distributed.initialize made this process one of {count}, but JAX had made its devices before: call "
            "it at the top of the program, before any array is made and before jax.devices() is called"
        )
    if jax.default_backend() == "cpu" and _jax.setting("jax_cpu_collectives_implementation") is None:
        raise RuntimeError(
            "JAX has made CPU devices that can't reach those of other processes: at the top of the program, call "
            "jax.config.update('jax_cpu_collectives_implementation', 'gloo')"
        )


def _agreed_devices(devices: np.ndarray, lockstep: Lockstep, replica_options: Mapping[str, Any]) -> np.ndarray:
    """The devices of all workers' replicas, after checking that the workers agree.

    If they don't, a RuntimeError names a worker that differs from worker 0, and the difference.
    """
    import jaxlib.version

    seen = {
        "the version of Replicax": packages.VERSION,
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
        "the platform": devices[0, 0].platform,
        "the number of processes": jax.process_count(),
        "the number of devices of all processes": jax.device_count(),
        "the number of logical devices of a replica": devices.shape[1],
        "jax_enable_x64": _jax.setting("jax_enable_x64"),
        "jax_default_prng_impl": str(_jax.setting("jax_default_prng_impl")),
        "jax_threefry_partitionable": _jax.setting("jax_threefry_partitionable"),
        **{
            name: choice if isinstance(choice, int | None) else repr(choice) for name, choice in replica_options.items()
        },
    }
    offers = lockstep.exchange("creates a strategy for several workers", (seen, [d.id for d in devices.flat]))
    for worker, (theirs, _) in enumerate(offers):
        for what, value in theirs.items():
            if value != offers[0][0][what]:
                raise RuntimeError(
                    f"the workers do not fit together: {what} is {offers[0][0][what]!r} on worker 0 and {value!r} on "
                    f"worker {worker}; it must be the same on all"
                )
    by_id = {d.id: d for d in jax.devices(devices[0, 0].platform)}
    everyones = np.array([by_id[i] for _, ids in offers for i in ids], dtype=object)
    return everyones.reshape(-1, devices.shape[1])


@jax.disable_jit(False)
def _check_collectives(devices: np.ndarray, lockstep: Lockstep) -> None:
    """Raise a RuntimeError that names the collective unless sums and gathers over all devices are correct."""
    mesh = replica_mesh(devices.reshape(-1))
    n = devices.size
    size = 1 << 18  # 1 MiB of float32: large enough for collectives that a backend splits

    # Small numbers, so that sums over any likely number of replicas are exact.
    base = (np.arange(size) % 509).astype(np.float32)
    added = (np.arange(n) % 251).astype(np.float32)

    def given(index: Any) -> Any:
        return base + added[index[0]][:, None]

    # The host computes the operands: compiling that would take longer than everything else here.
    def body(mine: Any) -> Any:
        return lax.psum(mine, REPLICA_AXIS), lax.all_gather(mine[:, :1000], REPLICA_AXIS, axis=1, tiled=True)

    split = per_replica_sharding(mesh)
    numbers_given = jax.make_array_from_callback((n, size), split, given)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)
    totals, everyones = jax.jit(mapped, out_shardings=split)(numbers_given)

    def is_right_here(found: Any, expected: Any) -> bool:
        return all(np.array_equal(np.asarray(shard.data)[0], expected) for shard in found.addressable_shards)

    gathered = (base[:1000] + added[:, None]).reshape(-1)
    verdict = [is_right_here(totals, base * n + added.sum()), is_right_here(everyones, gathered)]
    for worker, theirs in enumerate(lockstep.exchange("checks its collectives", verdict)):
        for what, is_right in zip(("all-reduce", "all-gather"), theirs, strict=True):
            if not is_right:
                raise RuntimeError(
                    f"an {what} over the {n} devices gave wrong numbers on worker {worker}: this build of jaxlib "
                    f"({jax.__version__}) can't be relied on with these devices"
                )
