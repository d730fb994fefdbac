"""``TPUStrategy``: replicas on the cores of a TPU slice."""

from __future__ import annotations

from typing import Unpack

import jax
import numpy as np

from replicax import context
from replicax.devices.mesh import is_here
from replicax.errors import shortened
from replicax.extended import ReplicaOptions, StrategyExtended
from replicax.strategies.multi_process import check_workers_agree
from replicax.strategy import Strategy
from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.resolver import TPUClusterResolver
from replicax.variables.partitioners import Partitioner
from replicax.workers.lockstep import Lockstep


class TPUStrategy(Strategy):
    """A replica on each core of a TPU slice, or on each block of cores of a device assignment; or several on each.

    It is only a placement: steps are the same as under :class:`MirroredStrategy`. On emulated devices it trains
    exactly as on real devices. All slices use the same assignment, and replicas are numbered slice by slice.
    With several hosts a process on each host runs the same program after
    ``jax.distributed.initialize``; the same things are local and global as in
    :class:`MultiWorkerMirroredStrategy`.

    Args:
      tpu_cluster_resolver: finds the TPUs; ``None`` means those that JAX finds.
      device_assignment: the cores of each replica, in each slice; see :meth:`DeviceAssignment.build`. ``None`` means
        a replica on each core.
      variable_partitioner: which variables to split over the replicas of all slices, and how; see
        :class:`ShardedVariable`. By default none. Each logical device of a replica has the replica's piece.
      num_replicas: the number of replicas in all slices; a multiple of the number of cores, or of blocks of cores. Each
        of these runs as many, one after the other, like the devices of :class:`MirroredStrategy`.
      replicas_at_once: how many of these run at the same time, at most; see :class:`MirroredStrategy`.
      reproducible: whether sums over replicas have a fixed order; see :class:`MirroredStrategy`. Emulated cores then
        have the same bits for any number of them; nothing more is known about a TPU's compiler.

    Attributes:
      cluster_resolver: the resolver.
      device_assignment: the assignment.

    Raises:
      RuntimeError: there is no TPU.
      ValueError: the assignment is for another topology than the resolver's; it leaves a process without devices; or
        ``num_replicas`` is not a multiple of the number of cores, or of blocks of cores; or ``reproducible`` comes with
        replicas of several cores, or with ``replicas_at_once``.
      TypeError: ``variable_partitioner``, or another argument, of another type.

    >>> import replicax
    >>> resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    >>> strategy = replicax.TPUStrategy(resolver)
    >>> strategy.num_replicas_in_sync, strategy.num_hosts
    (8, 1)
    >>> pairs = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[1, 1, 2], num_replicas=4)
    >>> replicax.TPUStrategy(resolver, pairs).num_replicas_in_sync
    4
    >>> replicax.TPUStrategy(resolver, pairs, num_replicas=16).num_replicas_in_sync
    16
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
        variable_partitioner: Partitioner | None = None,
        num_replicas: int | None = None,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        if not isinstance(resolver, TPUClusterResolver):
            raise TypeError(
                f"TPUStrategy: expected a TPUClusterResolver, got {shortened(repr(resolver))}. For GPUs: "
                "MirroredStrategy(resolver.devices) or ShardedStrategy(resolver.devices), with num_logical_devices= "
                "for a device assignment"
            )
        if device_assignment is None:
            device_assignment = DeviceAssignment.one_core_each(resolver.topology)
        if not isinstance(device_assignment, DeviceAssignment):
            raise TypeError(f"TPUStrategy: expected a DeviceAssignment, got {device_assignment!r}")
        devices = resolver.logical_devices(device_assignment)
        replica_options = ReplicaOptions(
            num_replicas=num_replicas, replicas_at_once=replicas_at_once, reproducible=reproducible
        )
        lockstep = _lockstep(resolver, devices, **replica_options)
        super().__init__(
            StrategyExtended(
                devices, variable_partitioner, lockstep=lockstep, slices=resolver.slices, **replica_options
            )
        )
        self.cluster_resolver = resolver
        self.device_assignment = device_assignment

    @property
    def num_hosts(self) -> int:
        """The number of hosts that drive the devices of the strategy."""
        return len(self._hosts)

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas with their first logical device on a host; if hosts differ, the largest number."""
        return int(np.max(np.bincount(self.device_assignment.tasks()[:, 0]))) * self._replicas.per_device

    @property
    def _hosts(self) -> list[int]:
        in_slice = np.unique(self.device_assignment.tasks())
        return [int(first + task) for first in self.cluster_resolver.first_tasks for task in in_slice]

    def get_host_cpu_device(self, host_id: int) -> jax.Device:
        """The CPU of a host, for values that need no TPU.

        Args:
          host_id: the number of the host in the strategy, from 0 to ``num_hosts - 1``.

        Raises:
          ValueError: there is no such host.
          RuntimeError: the slice does not exist, so it has no CPU.

        >>> import replicax
        >>> replicax.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2")).get_host_cpu_device(0)
        CpuDevice(id=0)
        """
        if not 0 <= host_id < self.num_hosts:
            raise ValueError(f"there is no host {host_id}: the strategy has {self.num_hosts}, numbered from 0")
        if self.cluster_resolver.kind == "absent":
            raise RuntimeError(f"host {host_id} has no CPU device: {self.cluster_resolver!r} is not there")
        process = self.cluster_resolver.devices[self._hosts[host_id], 0].process_index
        return next(d for d in jax.devices("cpu") if d.process_index == process)

    def initialize(self) -> None:
        """Wait until every replica answers, so that a broken device is found before training.

        You need not call it: devices are ready when JAX has created them. One all-reduce.

        Raises:
          ContextError: called inside a step.
          AbsentDeviceError: the slice is only described.
          RuntimeError: the sum over the replicas is wrong.
        """
        self._sum_ones("strategy.initialize")

    def finalize(self) -> None:
        """Wait until every device has done its work, host callbacks included. One all-reduce.

        Raises:
          ContextError: called inside a step.
        """
        self._sum_ones("strategy.finalize")
        jax.effects_barrier()

    def _sum_ones(self, method: str) -> None:
        context.check_cross_replica(self._replicas, method, "Call it outside, before and after all steps.")
        context.check_present(self._replicas, method)
        ones = self.distribute_values_from_function(lambda _: 1)
        total = int(self.reduce("sum", ones))
        if total != self.num_replicas_in_sync:
            raise RuntimeError(f"{self.num_replicas_in_sync} replicas, but {total} answered")


def _lockstep(
    resolver: TPUClusterResolver, devices: np.ndarray, **replica_options: Unpack[ReplicaOptions]
) -> Lockstep | None:
    """The lockstep of the processes that drive the devices; ``None`` with a single process."""
    if resolver.kind != "attached" or jax.process_count() == 1:
        return None
    driving = sorted({d.process_index for d in devices.flat})
    if len(driving) < jax.process_count():
        raise ValueError(
            f"the device assignment has devices of {len(driving)} processes, {driving}, but {jax.process_count()} run "
            "this program, and each must drive some: assign cores of every host"
        )
    mine = np.array(list(filter(is_here, devices.flat)), dtype=object)
    return check_workers_agree(mine.reshape(-1, 1), **replica_options)[0]
