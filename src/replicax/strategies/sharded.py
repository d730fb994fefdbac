"""``ShardedStrategy``: data parallelism in which no device has the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from replicax.cluster.resolver import ClusterResolver
from replicax.communication import CommunicationOptions
from replicax.strategies.multi_process import MultiProcessStrategy
from replicax.strategy import Strategy
from replicax.variables.partitioners import Partitioner, over_all
from replicax.workers.exchange import DEFAULT_TIMEOUT


class ShardedStrategy(MultiProcessStrategy):
    """A replica on each of several devices, with a piece of every variable on each (FSDP, or ZeRO stage 3).

    Steps and their results are the same as under :class:`MirroredStrategy`. But parameters, gradients and
    optimizer slots are split over the n replicas: a device keeps 1/n of each variable. The parameters of a layer are
    gathered just before it runs, freed afterwards, and gathered again for the backward pass; the sum of its gradient is
    reduce-scattered. So a device holds a few layers at a time instead of the whole model.

    In a program of several workers the replicas are on the devices of all of them, and this strategy connects them:
    it is :class:`MultiWorkerMirroredStrategy` with a ``variable_partitioner``, and the same things are local and
    global. Reading a split variable outside a step (``v.numpy()``) then requires all workers, as each has pieces of it;
    see :meth:`Variable.read_value`.

    Args:
      devices: JAX devices, or strings such as ``"cpu:1"``; ``None`` means all local devices. Each of several workers
        names its own.
      variable_partitioner: which variables to split, and how; see :class:`ShardedVariable`. By default all of at least
        1 KiB, over all replicas, along the largest dim that divides evenly, or else along the largest dim.
      timeout_seconds: how many seconds to wait for missing workers; see :class:`MultiWorkerMirroredStrategy`.
      communication_options: of all collectives without options of their own.
      cluster_resolver: describes the cluster; ``None`` means that the environment does.
      num_replicas: the number of replicas; a multiple of the number of devices, as in :class:`MirroredStrategy`.
        Variables are split over the devices. For each of its replicas a device gathers the parameters of a layer, and
        scatters the sum of its gradient, so that it never holds the whole model.
      num_logical_devices: the number of devices of each replica; see :class:`MultiWorkerMirroredStrategy`. Variables
        with parts on logical devices (``partition_dimensions``) are split over the replicas part by part.
      replicas_at_once: how many of a device's replicas run at the same time, at most; see :class:`MirroredStrategy`.
      reproducible: whether sums over replicas have a fixed order; see :class:`MirroredStrategy`.

    Attributes:
      cluster_resolver: as in :class:`MultiWorkerMirroredStrategy`.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that exist. Or
        ``num_logical_devices`` does not divide their number; or ``num_replicas`` is not a multiple of it.
      Exception: with several workers, as :class:`MultiWorkerMirroredStrategy`.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019.

    >>> import replicax, jax.numpy as jnp
    >>> strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(jnp.zeros((512, 4)), name="w")
    >>> w.layout.describe(strategy.extended.mesh), strategy.local_results(w)[0].shape
    ('split along dim 0 over 2 replicas', (256, 4))

    Eight replicas on two devices, each of which has half of a variable:

    >>> strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"], num_replicas=8)
    >>> with strategy.scope():
    ...     w = replicax.Variable(jnp.zeros((512, 4)), name="w")
    >>> w.layout.describe(strategy.extended.mesh, 4), [piece.shape for piece in strategy.local_results(w)][::4]
    ('split along dim 0 over 2 devices', [(256, 4), (256, 4)])
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | np.ndarray | None = None,
        variable_partitioner: Partitioner | None = None,
        timeout_seconds: float | None = DEFAULT_TIMEOUT,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | None = None,
        num_replicas: int | None = None,
        num_logical_devices: int = 1,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        super().__init__(
            over_all if variable_partitioner is None else lambda blocks: variable_partitioner,
            devices,
            timeout_seconds,
            communication_options,
            cluster_resolver,
            num_logical_devices,
            num_replicas=num_replicas,
            replicas_at_once=replicas_at_once,
            reproducible=reproducible,
        )

    def __repr__(self) -> str:
        return super().__repr__() if self.extended.lockstep.several else Strategy.__repr__(self)
