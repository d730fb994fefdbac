"""``OneDeviceStrategy``: everything on one device of your choice."""

from __future__ import annotations

import jax

from replicax.devices.selection import resolve_devices
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica, with its variables and its input, on ``device``; or several, one after the other.

    It is the reference for other strategies: the same step, without collectives. With several replicas it is gradient
    accumulation for any step: each replica has its part of a batch, and only one part at a time needs memory.

    Args:
      device: a JAX device, or a string such as ``"cpu:0"`` or ``"gpu:1"``.
      num_replicas: the number of replicas, by default one; see :class:`MirroredStrategy`.
      replicas_at_once: how many of these run at the same time, at most.
      reproducible: whether several replicas produce the same bits as on several devices; see
        :class:`MirroredStrategy`.

    Raises:
      ValueError: there is no such device; the message lists those that exist. Or ``num_replicas`` is below 1, or
        ``replicas_at_once`` comes with ``reproducible``.

    >>> import replicax
    >>> strategy = replicax.OneDeviceStrategy("cpu:1")
    >>> strategy.run(lambda x: x + 1, args=(1.0,)).devices()
    {CpuDevice(id=1)}
    >>> replicax.OneDeviceStrategy("cpu:1", num_replicas=4)
    OneDeviceStrategy([cpu:1], 4 replicas on each)
    """

    def __init__(
        self,
        device: str | jax.Device,
        num_replicas: int | None = None,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        devices = resolve_devices([device], reproducible, num_replicas)
        super().__init__(
            StrategyExtended(
                devices, num_replicas=num_replicas, replicas_at_once=replicas_at_once, reproducible=reproducible
            )
        )
