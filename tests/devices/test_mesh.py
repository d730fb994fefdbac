from __future__ import annotations

import jax
import numpy as np
import pytest

from replicax.devices.mesh import logical_axes, replica_mesh


@pytest.mark.parametrize(("count", "sizes"), [(1, []), (2, [2]), (4, [2, 2]), (6, [2, 3]), (7, [7]), (8, [2, 2, 2])])
def test_logical_devices_lie_along_prime_axes(count, sizes) -> None:
    assert list(logical_axes(count).values()) == sizes


def test_replicas_come_first() -> None:
    devices = np.array(jax.devices()[:8], dtype=object).reshape(2, 4)
    mesh = replica_mesh(devices)
    assert dict(mesh.shape) == {"replica": 2, "logical0": 2, "logical1": 2}
    assert mesh.devices.reshape(2, 4).tolist() == devices.tolist()


def test_one_device_a_replica_has_one_axis() -> None:
    assert replica_mesh(jax.devices()[:3]).axis_names == ("replica",)
