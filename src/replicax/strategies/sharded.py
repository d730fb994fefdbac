"""``ShardedStrategy``: data parallelism in which no device has the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax.devices.selection import resolve_devices
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy
from replicax.variables.partitioners import Partitioner, over_all


class ShardedStrategy(Strategy):
    """A replica on each of several devices, with a piece of every variable on each (FSDP, or ZeRO stage 3).

    Steps are the same as under :class:`MirroredStrategy`, and so are their results. But parameters, gradients and
    optimizer slots are split over the n replicas: a device keeps 1/n of each variable. The parameters of a layer are
    gathered just before it runs, freed afterwards, and gathered again for the backward pass; the sum of its gradient is
    reduce-scattered. So a device holds a few layers at a time and not the whole model.

    Args:
      devices: JAX devices, or strings such as ``"cpu:1"``; ``None`` means all local devices.
      partitioner: which variables to split, and how; see :class:`ShardedVariable`. By default all of at least 1 KiB,
        over all replicas, along the largest dim that divides evenly, or else along the largest dim.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that exist.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019.

    >>> import replicax, jax.numpy as jnp
    >>> strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(jnp.zeros((512, 4)), name="w")
    >>> w.layout.describe(strategy.extended.mesh), strategy.local_results(w)[0].shape
    ('split along dim 0 over 2 replicas', (256, 4))
    """

    def __init__(
        self, devices: Sequence[str | jax.Device] | None = None, partitioner: Partitioner | None = None
    ) -> None:
        resolved = resolve_devices(devices)
        super().__init__(StrategyExtended(resolved, partitioner or over_all(len(resolved))))
