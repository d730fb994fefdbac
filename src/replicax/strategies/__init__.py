"""The strategies: each is a short file that chooses devices (``tpu`` is loaded on demand)."""

from replicax.strategies import default
from replicax.strategies.central_storage import CentralStorageStrategy
from replicax.strategies.mirrored import MirroredStrategy
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy
from replicax.strategies.one_device import OneDeviceStrategy
from replicax.strategies.sharded import ShardedStrategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ShardedStrategy",
    "default",
]
