"""The strategies of the original, each on its devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax import strategies
from replicax.compat.v1.distribution import DistributionStrategy
from replicax.compat.v1.error_translation import translating_errors
from replicax.strategies import tpu
from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.resolver import TPUClusterResolver


class OneDeviceStrategy(DistributionStrategy):
    """One tower, on a device of your choice; :class:`replicax.OneDeviceStrategy`.

    >>> from replicax.compat import v1
    >>> v1.OneDeviceStrategy("/device:CPU:1").worker_devices
    [CpuDevice(id=1)]
    """

    @translating_errors
    def __init__(self, device: str | jax.Device) -> None:
        self._begin(strategies.OneDeviceStrategy(device))


class MirroredStrategy(DistributionStrategy):
    """A tower on each of several devices, with a copy of each variable; :class:`replicax.MirroredStrategy`.

    Args:
      devices: JAX devices, or their names; ``None`` means all.
      num_gpus: instead, the number of GPUs.

    >>> from replicax.compat import v1
    >>> v1.MirroredStrategy(["/device:CPU:0", "/device:CPU:1"]).num_towers
    2
    """

    @translating_errors
    def __init__(self, devices: Sequence[str | jax.Device] | None = None, num_gpus: int | None = None) -> None:
        if num_gpus is not None:
            if devices is not None:
                raise ValueError("MirroredStrategy: pass devices or num_gpus, and not both")
            devices = [f"gpu:{i}" for i in range(num_gpus)]
        self._begin(strategies.MirroredStrategy(devices))


class TPUStrategy(OneDeviceStrategy):
    """A tower on each core of a TPU slice; :class:`replicax.TPUStrategy`.

    Args:
      tpu_cluster_resolver: a :class:`replicax.TPUClusterResolver`; ``None`` means the TPUs of this program.
      steps_per_run: how many steps ``run_steps_on_dataset`` is meant to run; stored, and otherwise unused.
      num_cores: the number of cores to use; ``None`` means all.

    Attributes:
      steps_per_run: as given; 1 if the strategy was made by ``of``.

    >>> import replicax
    >>> from replicax.compat import v1
    >>> v1.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2"), steps_per_run=10, num_cores=4).num_towers
    4
    """

    strategy: tpu.TPUStrategy
    steps_per_run: int = 1

    @translating_errors
    def __init__(
        self, tpu_cluster_resolver: TPUClusterResolver | None, steps_per_run: int, num_cores: int | None = None
    ) -> None:
        self.steps_per_run = steps_per_run
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        assignment = None
        if num_cores is not None and isinstance(resolver, TPUClusterResolver):
            assignment = DeviceAssignment.build(resolver.topology, num_replicas=num_cores)
        self._begin(tpu.TPUStrategy(resolver, assignment))

    @property
    def num_hosts(self) -> int:
        """The number of hosts that drive the cores; ``replicax.TPUStrategy.num_hosts``."""
        return self.strategy.num_hosts

    @property
    def num_towers_per_host(self) -> int:
        """The number of towers of a host; ``replicax.TPUStrategy.num_replicas_per_host``."""
        return self.strategy.num_replicas_per_host

    @translating_errors
    def get_host_cpu_device(self, host_id: int) -> jax.Device:
        """The CPU of a host; ``replicax.TPUStrategy.get_host_cpu_device``."""
        return self.strategy.get_host_cpu_device(host_id)

    @translating_errors
    def initialize(self) -> None:
        """Wait until every core answers; ``replicax.TPUStrategy.initialize``."""
        self.strategy.initialize()

    @translating_errors
    def finalize(self) -> None:
        """Wait until every core has finished its work; ``replicax.TPUStrategy.finalize``."""
        self.strategy.finalize()


DistributionStrategy._kinds.update(
    {
        strategies.OneDeviceStrategy: OneDeviceStrategy,
        strategies.MirroredStrategy: MirroredStrategy,
        tpu.TPUStrategy: TPUStrategy,
    }
)
