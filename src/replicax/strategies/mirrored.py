"""``MirroredStrategy``: synchronous data parallelism on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax.devices.selection import resolve_devices
from replicax.extended import StrategyExtended
from replicax.old_names import keywords_renamed
from replicax.strategy import Strategy


class MirroredStrategy(Strategy):
    """A replica on each of several devices, with a copy of every variable on each.

    Each replica works on its slice of the batch; gradients are summed across replicas, and every copy of a
    variable changes alike.

    Args:
      devices: JAX devices, or strings such as ``"cpu:1"``; ``None`` means all local devices.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that exist.

    >>> import replicax
    >>> replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    MirroredStrategy([cpu:0, cpu:1])
    """

    @keywords_renamed(
        num_gpus="name the devices: devices=['gpu:0', 'gpu:1']; without the argument all are used",
        num_gpus_per_worker="name the devices: devices=['gpu:0', 'gpu:1']; without the argument all are used",
        cross_device_ops="each collective takes replicax.CommunicationOptions",
        cross_tower_ops="each collective takes replicax.CommunicationOptions",
    )
    def __init__(self, devices: Sequence[str | jax.Device] | None = None) -> None:
        super().__init__(StrategyExtended(resolve_devices(devices)))
