"""Check that the devices have room for what is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax.checkpoint.device_blocks import LARGE, is_here
from replicax.models.safetensors.names import TensorSource
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax.models.safetensors.files import Tensor


def check_room(
    path: Any, leaves: Mapping[str, Any], sources: Mapping[str, TensorSource], tensors: Mapping[str, Tensor]
) -> None:
    """Raise unless each device that tells how much memory it has is able to take its parts of all arrays.

    New arrays are there together. A variable's new value is beside its old one while it is loaded, unless that is
    large: then the old one is freed first.
    """
    free: dict[Any, int | None] = {}
    taken = Counter[Any]()
    for at, source in sources.items():
        owner, kind = leaves[at].owner, leaves[at].kind
        if isinstance(owner, np.ndarray | np.generic):
            continue
        is_variable = isinstance(owner, Variable)
        shape = owner.layout.stored_shape(owner.shape) if is_variable else owner.shape
        sharding = owner.sharding or SingleDeviceSharding(jax.local_devices()[0])
        size = math.prod(sharding.shard_shape(shape)) * kind.numpy_dtype.itemsize
        for device in filter(is_here, sharding.device_set):
            if device not in free:
                free[device] = _free(device)
            left, needed = free[device], taken[device] + (0 if is_variable and size > LARGE else size)
            if left is not None and needed > left:
                tensor = tensors[source.names[0]]
                raise MemoryError(
                    f"{device} has {left:,} bytes free, and the weights in {path} need {needed:,} there, up to {at}, "
                    f"{kind} ({tensor.name} in {tensor.file.name}); nothing was loaded. Split the arrays over more "
                    "devices, or free others first"
                )
            if not is_variable:
                taken[device] = needed


def _free(device: Any) -> int | None:
    """The bytes that a device has left; ``None`` if it does not tell."""
    stats = _stats(device)
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    return None if limit is None or used is None else int(limit) - int(used)


def _stats(device: Any) -> Mapping[str, int]:
    return device.memory_stats() or {}
