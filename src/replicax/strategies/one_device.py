"""``OneDeviceStrategy``: everything on one device of your choice."""

from __future__ import annotations

import jax

from replicax.devices.selection import resolve_device
from replicax.extended import StrategyExtended
from replicax.old_names import keywords_renamed
from replicax.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """One replica, with its variables and its input, on ``device``.

    It is the reference for other strategies: the same step, without collectives.

    Args:
      device: a JAX device, or a string such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
      ValueError: there is no such device; the message lists those that exist.

    >>> import replicax
    >>> strategy = replicax.OneDeviceStrategy("cpu:1")
    >>> strategy.run(lambda x: x + 1, args=(1.0,)).devices()
    {CpuDevice(id=1)}
    """

    @keywords_renamed(variable_partitioner="leave it out: there is one replica, which has all of each variable")
    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(StrategyExtended([resolve_device(device)]))
