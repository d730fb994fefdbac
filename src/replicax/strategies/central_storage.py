"""``CentralStorageStrategy``: variables on one device, used by all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax import _jax
from replicax.devices.selection import resolve_device, resolve_devices
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy


class CentralStorageStrategy(Strategy):
    """A replica on each of several devices, with the variables on one.

    Steps and their results are the same as under :class:`MirroredStrategy`. But between steps each variable is on only
    one device, usually the host CPU, which leaves the memory of the others free. Each call of a step copies the
    variables that it reads to the replicas' devices, and copies new values back. On-read variables stay on the
    replicas' devices, as each replica has its own copy.

    Args:
      compute_devices: JAX devices, or strings such as ``"gpu:1"``; ``None`` means all local devices.
      parameter_device: the device that holds the variables; ``None`` means the host's first CPU device.
      num_replicas: the number of replicas; a multiple of the number of compute devices, as in
        :class:`MirroredStrategy`. The variables are copied to a device once for all of its replicas.
      replicas_at_once: how many of a device's replicas run at the same time, at most; see :class:`MirroredStrategy`.
      reproducible: whether sums over replicas have a fixed order; see :class:`MirroredStrategy`.

    Raises:
      ValueError: a device is named twice, or does not exist; the message lists those that exist. Or ``num_replicas`` is
        not a multiple of the number of compute devices; or ``replicas_at_once`` comes with ``reproducible``; or only
        some of the devices exist (others are described, for plans).

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
        num_replicas: int | None = None,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        devices = resolve_devices(compute_devices, reproducible, num_replicas)
        home = resolve_device("cpu:0" if parameter_device is None else parameter_device)
        if _jax.is_absent(home) != _jax.is_absent(devices[0]):
            raise ValueError(
                f"CentralStorageStrategy copies variables between {home.platform}:{home.id} and "
                f"{devices[0].platform}:{devices[0].id}, of which one is only described and has no values: to plan, "
                "name a described parameter_device, too, as in CentralStorageStrategy(devices[1:], "
                "parameter_device=devices[0]), or plan MirroredStrategy(devices), whose step is the same but for the "
                "copies"
            )
        super().__init__(
            StrategyExtended(
                devices,
                parameter_device=home,
                num_replicas=num_replicas,
                replicas_at_once=replicas_at_once,
                reproducible=reproducible,
            )
        )
