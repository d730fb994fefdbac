"""``CentralStorageStrategy``: variables in one place, computed on by all."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax.devices.selection import resolve_device, resolve_devices
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy


class CentralStorageStrategy(Strategy):
    """A replica on each of several devices, with the variables on one.

    Steps are the same as under :class:`MirroredStrategy`, and so are their results. But between steps each variable
    is on one device only, as a rule the host's, so that the others' memory is free: each call of a step copies
    what it reads to the devices that compute, and what it writes back. On-read variables stay where the replicas are,
    as each has its own.

    Args:
      compute_devices: JAX devices, or strings such as ``"gpu:1"``; ``None`` means all local devices.
      parameter_device: the device that holds the variables; ``None`` means the host's first CPU device.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that do.

    >>> import replicax
    >>> strategy = replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    >>> with strategy.scope():
    ...     v = replicax.Variable(1.0, name="v")
    >>> strategy.run(lambda: v.assign_add(1.0))
    <Variable 'v' float32[] on cpu:2, for 2 replicas: 2.>
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        home = resolve_device("cpu:0" if parameter_device is None else parameter_device)
        super().__init__(StrategyExtended(resolve_devices(compute_devices), parameter_device=home))
