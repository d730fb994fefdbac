"""``MultiWorkerMirroredStrategy``: synchronous data parallelism on the devices of several processes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from replicax.cluster.resolver import ClusterResolver
from replicax.communication import CommunicationOptions
from replicax.strategies.multi_process import MultiProcessStrategy
from replicax.variables.partitioners import Partitioner
from replicax.workers.exchange import DEFAULT_TIMEOUT


class MultiWorkerMirroredStrategy(MultiProcessStrategy):
    """A replica on each device of several workers, with a copy of every variable on each, or a piece.

    A *worker* is a process; workers may share a machine (*host*) or have one each; worker 0 is the *chief*. Each worker
    runs the same program, and drives the replicas on its own devices. The strategy connects them, unless
    ``jax.distributed.initialize`` has been called: see :func:`initialize_workers`, which finds the cluster.
    Steps and their results are the same as under :class:`MirroredStrategy`; with one process the strategies are the
    same. Two things are local: ``local_results`` and ``distribute_values_from_function`` have only this worker's
    replicas, and plain values (NumPy arrays, numbers) are this worker's own, and must be the same on all workers.
    Everything else is global. See ``docs/workers.md``.

    Replicas are in the order of the workers, and on each worker in the order of its devices. Workers may have different
    numbers of devices.

    Args:
      devices: this worker's devices, or their names (``"cpu:1"``); ``None`` means all of them, or
        those that ``cluster_resolver`` describes or emulates.
      timeout_seconds: how many seconds to wait for missing workers where all are needed: to create a variable, to run a
        new step or one on the per-replica executor, to assign outside a step. Then an error names them. ``None`` for
        ever. The collectives of compiled steps have separate timeouts: see ``communication_options``.
      communication_options: :class:`CommunicationOptions` of all collectives without their own: those of
        ``apply_gradients``, of ``reduce`` and ``gather``, and ``all_reduce`` and ``all_gather`` without options.
      cluster_resolver: describes the cluster; ``None`` means that the environment does.
      variable_partitioner: which variables to split over the replicas of all workers, and how; see
        :class:`ShardedVariable`. By default none. :class:`ShardedStrategy` splits all but small ones.
      num_logical_devices: the number of consecutive devices of a worker that each replica uses, the
        same on all workers; by default one.
      num_replicas: the number of replicas on all workers; a multiple of the number of all their devices. Each device
        runs as many, one after the other; see :class:`MirroredStrategy`. By default each has one.
      replicas_at_once: how many of a device's replicas run at the same time, at most; see :class:`MirroredStrategy`.
      reproducible: whether sums over replicas have a fixed order; see :class:`MirroredStrategy`.

    Attributes:
      cluster_resolver: the resolver; if none was given, that of ``TF_CONFIG``, or one that knows only the number of
        this process in the job ``"worker"``.

    Raises:
      RuntimeError: the devices were created before the workers were connected, or can't communicate; the workers
        have different versions, platforms or settings; a collective gave wrong numbers; and as
        :func:`initialize_workers`.
      ValueError: a device is named twice, does not exist or is another worker's; ``num_logical_devices`` does not
        divide the number of this worker's devices; ``num_replicas`` is not a multiple of the number of all devices;
        options that the devices don't support; and as :func:`initialize_workers`.
      TypeError: ``communication_options``, ``cluster_resolver`` or ``variable_partitioner`` of another type.
      TimeoutError: workers can't be reached when connecting; the message names them.
      DeadlockError: a worker does not create a strategy; the message names it.

    Exchanges a message among the workers, and runs one small program to test the collectives.

    >>> import replicax
    >>> replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    MultiWorkerMirroredStrategy(2 replicas on 1 worker(s); here: cpu:0, cpu:1)
    >>> replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"], num_replicas=8)
    MultiWorkerMirroredStrategy(8 replicas on 1 worker(s); here: cpu:0, cpu:1, 4 on each device)
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | np.ndarray | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        num_logical_devices: int = 1,
        num_replicas: int | None = None,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        super().__init__(
            lambda blocks: variable_partitioner,
            devices,
            timeout_seconds,
            communication_options,
            cluster_resolver,
            num_logical_devices,
            num_replicas=num_replicas,
            replicas_at_once=replicas_at_once,
            reproducible=reproducible,
        )
