"""What collectives of arrays that differ in size between replicas become when programs are joined.

They are then collectives of arrays with room for the largest (:mod:`replicax.ragged.joint_program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import collectives
from replicax.devices.mesh import REPLICA_AXIS


def gathered(array: Any, *, axis: int, sizes: Sequence[int], options: Any, axes: Any) -> Any:
    """What ``uneven_gather`` is, of arrays with room for the largest."""
    everyone = collectives.all_gather(array[None], 0, options)
    parts = [lax.slice_in_dim(everyone[i], 0, size, axis=axis) for i, size in enumerate(sizes)]
    return jnp.concatenate(parts, axis)


def part_of_sum(array: Any, *, axis: int, sizes: Sequence[int], options: Any, axes: Any, own: int) -> Any:
    """What ``uneven_part`` is, with room for the largest."""
    [total] = collectives.sum_over_replicas([array], options)
    starts = jnp.asarray(np.cumsum([0, *sizes[:-1]]).astype(np.int32))
    mine = lax.dynamic_index_in_dim(starts, lax.axis_index(REPLICA_AXIS), keepdims=False)
    config = [(0, max(sizes) if i == axis else 0, 0) for i in range(array.ndim)]
    return lax.dynamic_slice_in_dim(lax.pad(total, np.zeros((), total.dtype), config), mine, max(sizes), axis)
