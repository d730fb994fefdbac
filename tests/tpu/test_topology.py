from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, strategies as st

from replicax import Topology

PAIR = [[(0, 0, 0, 0), (1, 0, 0, 0)]]


def test_the_original_arguments() -> None:
    topology = Topology(
        mesh_shape=[2, 2, 1, 2], device_coordinates=[[(x, y, 0, c)] for x in (0, 1) for y in (0, 1) for c in (0, 1)]
    )
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.mesh_rank == 4
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.num_devices) == (8, 1, 8)
    assert topology.device_coordinates.shape == (8, 1, 4)
    assert topology.device_coordinates.dtype == topology.mesh_shape.dtype == np.int32
    assert topology.missing_devices.shape == (0, 4)
    assert topology.task_ordinal_at_coordinates((1, 0, 0, 1)) == 5
    assert topology.tpu_device_ordinal_at_coordinates((1, 0, 0, 1)) == 0
    assert topology.cpu_device_name_at_coordinates((1, 0, 0, 1)) == "/task:5/device:CPU:0"
    assert topology.tpu_device_name_at_coordinates((1, 0, 0, 1), job="w") == "/job:w/task:5/device:TPU:0"


def test_three_numbers_are_x_y_core() -> None:
    planar = Topology(mesh_shape=[2, 1, 2], device_coordinates=[[(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]])
    spatial = Topology(
        mesh_shape=[2, 1, 1, 2], device_coordinates=[[(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]]
    )
    assert planar == spatial
    assert hash(planar) == hash(spatial)
    assert copy.deepcopy(planar) is planar
    assert planar != "v3:2x2"
    assert planar.tpu_device_ordinal_at_coordinates((1, 0, 1)) == 3
    assert int(planar.hops((0, 0, 1), (1, 0, 0))) == 1
    assert int(planar.hops((0, 0, 1), (0, 0, 0))) == 0


def test_there_is_no_way_out_of_the_mesh() -> None:
    topology = Topology.from_name("v5e:16x16")
    for at in ((99, 0, 0), (0, -1, 0), (0, 0, 1, 0), [(0, 0, 0), (0, 16, 0)]):
        for a, b in ((at, (0, 0, 0)), ((0, 0, 0), at)):
            with pytest.raises(ValueError, match=r" is at \(.*\), outside the mesh of \(16, 16, 1, 1\)"):
                topology.hops(a, b)


def test_missing_devices() -> None:
    topology = Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=[[(0, 0, 0, 0)], [(1, 1, 0, 0)]])
    assert topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert topology.has_devices([(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 7, 0), (-1, 0, 0, 0)]).tolist() == [
        True,
        False,
        False,
        False,
    ]
    assert "2 devices missing" in repr(topology)
    with pytest.raises(ValueError, match=r"no core at \(1, 0, 0, 0\): Topology\(.*\) has a mesh of \(2, 2, 1, 1\)"):
        topology.task_ordinal_at_coordinates((1, 0, 0, 0))


@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(1, 2), st.tuples(*[st.booleans()] * 3))
def test_full_slices(chips, cores, wrap) -> None:
    topology = Topology.of_chips(chips, cores, wrap)
    assert topology.missing_devices.size == 0
    assert topology.num_devices == np.prod(chips) * cores
    for task in range(topology.num_tasks):
        for ordinal in range(topology.num_tpus_per_task):
            at = topology.device_coordinates[task, ordinal]
            assert topology.task_ordinal_at_coordinates(at) == task
            assert topology.tpu_device_ordinal_at_coordinates(at) == ordinal
        own = topology.device_coordinates[task]
        assert (np.ptp(own[:, :3], axis=0) < (2, 2, 1)).all()  # a host's chips lie in a square
    assert Topology(serialized=topology.serialized()) == topology


@pytest.mark.parametrize(
    ("name", "hosts", "devices", "text"),
    [
        ("v5e:1x1", 1, 1, "Topology('v5e:1x1', 1x1x1 chip of 1 device, 1 host, no wrap-around)"),
        ("v3:2x2", 1, 8, "Topology('v3:2x2', 2x2x1 chips of 2 devices, 1 host, no wrap-around)"),
        ("v5e:8x16", 32, 4, "Topology('v5e:8x16', 8x16x1 chips of 1 device, 32 hosts, wraps around along y)"),
    ],
)
def test_by_name(name, hosts, devices, text) -> None:
    topology = Topology.from_name(name)
    assert (topology.num_tasks, topology.num_tpus_per_task) == (hosts, devices)
    assert repr(topology) == text
    assert Topology(serialized=topology.serialized()).name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs mesh_shape and device_coordinates, or serialized"),
        ({"mesh_shape": [2, 1, 1, 1]}, "needs mesh_shape and device_coordinates"),
        (
            {"mesh_shape": [2, 1], "device_coordinates": PAIR},
            r"mesh_shape must be integers \(x, y, z, core\).*got \[2, 1\]",
        ),
        ({"mesh_shape": [2, 0, 1, 1], "device_coordinates": PAIR}, "four positive integers, got"),
        ({"mesh_shape": [2.0, 1, 1, 1], "device_coordinates": PAIR}, "must be integers"),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": PAIR[0]},
            r"shape \[tasks, devices of a task, 4\], got \[2, 4\]",
        ),
        (
            {"mesh_shape": [1, 1, 1, 1], "device_coordinates": PAIR},
            r"device 1 of task 0 is at \(1, 0, 0, 0\), outside the mesh",
        ),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[(1, 0, 0, 0)], [(1, 0, 0, 0)]]},
            r"device 0 of task 0 and device 0 of task 1 are both at \(1, 0, 0, 0\)",
        ),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[(0, 0, 0, 0)], []]},
            "device_coordinates must be integers",
        ),
        *(
            ({"mesh_shape": [2, 1, 1, 1], "device_coordinates": PAIR, "wrap": wrap}, "wrap is a bool each for x, y")
            for wrap in ((True,), True)
        ),
        ({"mesh_shape": [2, 1, 1, 1], "device_coordinates": np.zeros((0, 4, 4), int)}, r"got \[0, 4, 4\]"),
        ({"serialized": b"rubbish"}, r"must be what Topology.serialized\(\) returned, got b'rubbish'"),
        ({"serialized": b"{}"}, "must be what Topology.serialized"),
    ],
)
def test_what_is_no_topology(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize("chips", [(2, 2), (2, 2, 0), (2, 2, 1, 1)])
def test_what_is_no_slice(chips) -> None:
    with pytest.raises(ValueError, match="chips"):
        Topology.of_chips(chips)


def test_one_core_of_each_chip_is_another_slice_than_chips_of_one_core() -> None:
    whole = Topology.of_chips((2, 2, 1))
    half = Topology(mesh_shape=(2, 2, 1, 2), device_coordinates=whole.device_coordinates)
    assert whole == Topology.of_chips((2, 2, 1))
    assert half != whole
    assert len(half.missing_devices) == 4
