"""``MirroredStrategy``: synchronous data parallelism on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from replicax.devices.selection import grouped_by_replica, resolve_devices
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy
from replicax.variables.partitioners import Partitioner


class MirroredStrategy(Strategy):
    """A replica on each of several devices, with a copy of every variable on each, or a piece.

    Each replica works on its slice of the batch; gradients are summed over the replicas, and all copies of a
    variable change alike.

    Args:
      devices: JAX devices, or strings such as ``"cpu:1"``, or an array of devices, such as a resolver's; ``None`` means
        all local devices.
      variable_partitioner: which variables to split over the devices, and how; see :class:`ShardedVariable`. By
        default none. :class:`ShardedStrategy` splits all but small ones.
      num_replicas: the number of replicas; a multiple of the number of devices. By default each device has one. A
        device with k of them runs them one after the other, between the collectives, with the same result as one device
        for each replica; see ``docs/replicas.md``.
      num_logical_devices: the number of consecutive devices that each replica uses; by default one.
        ``partition_dimensions`` of a variable and ``strategy.split_to_logical_devices`` split over them; see
        ``docs/placement.md``.
      replicas_at_once: how many of the replicas of a device run at the same time, at most, as one operation on the
        arrays of all of them (``jax.vmap``). By default they run one after the other. That needs the least memory, and
        is as fast if one replica keeps a device busy; with small steps several at once are faster. If the number of a
        device's replicas is not a multiple, the largest smaller divisor is used.
      reproducible: whether sums over replicas have a fixed order, so that steps have the same bits on any number of
        devices with as many replicas; by default the order is the fastest. ``docs/replicas.md`` lists what else is
        required, such as a flag for the compiler on CPUs.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that exist. Or ``num_replicas`` is
        not a multiple of the number of devices, or of the groups of logical devices. Or ``num_logical_devices`` does
        not divide the number of devices. Or ``reproducible`` comes with ``num_logical_devices`` or ``replicas_at_once``
        above 1.
      TypeError: ``variable_partitioner`` of another type.

    >>> import replicax, jax.numpy as jnp
    >>> replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    MirroredStrategy([cpu:0, cpu:1])
    >>> by_rows = replicax.variables.FixedShardsPartitioner(2)
    >>> with replicax.MirroredStrategy(["cpu:0", "cpu:1"], variable_partitioner=by_rows).scope():
    ...     replicax.Variable(jnp.arange(4.0), name="v")
    <Variable 'v' float32[4] split along dim 0 over 2 replicas: [0. 1. 2. 3.]>

    Two replicas of two devices each:

    >>> replicax.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"], num_logical_devices=2)
    MirroredStrategy([cpu:0, cpu:2], 2 logical devices each)

    Eight replicas on two devices:

    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=8)
    >>> strategy
    MirroredStrategy([cpu:0, cpu:1], 4 replicas on each)
    >>> ids = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group)
    >>> [int(i) for i in strategy.local_results(ids)], int(strategy.reduce("sum", ids))
    ([0, 1, 2, 3, 4, 5, 6, 7], 28)
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | np.ndarray | None = None,
        variable_partitioner: Partitioner | None = None,
        num_replicas: int | None = None,
        num_logical_devices: int = 1,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        replicas = grouped_by_replica(resolve_devices(devices, reproducible, num_replicas), num_logical_devices)
        super().__init__(
            StrategyExtended(
                replicas,
                variable_partitioner,
                num_replicas=num_replicas,
                replicas_at_once=replicas_at_once,
                reproducible=reproducible,
            )
        )
