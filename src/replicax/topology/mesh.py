"""The device mesh: replicas along one axis, and later the logical devices of a replica along others."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

REPLICA_AXIS = "replica"
"""The mesh axis along which replicas lie."""


def replica_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with one replica on each device.

    There is no axis for logical devices when a replica has only one: JAX refuses host callbacks while some
    axis of the mesh is partitioned automatically.
    """
    return Mesh(np.array(devices, dtype=object), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
