from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from replicax import DeviceAssignment, Topology

SMALL = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))
TOPOLOGIES = st.builds(
    lambda chips, cores, wrap: Topology.of_chips(chips, cores, wrap),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)),
    st.integers(1, 2),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)


def footprint(cores: np.ndarray) -> list[tuple[int, ...]]:
    """Where a replica's cores lie, seen from its first corner."""
    return sorted(map(tuple, (cores - cores.min(0)).tolist()))


def blocks(topology: Topology, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many replicas there is room for, counted along each dim: blocks side by side, woven into each other."""
    return math.prod(n // (a * s) * s for n, a, s in zip(topology.mesh_shape.tolist(), shape, stride, strict=True))


@given(TOPOLOGIES, SMALL, SMALL)
def test_replicas_tile_the_slice(topology, shape, stride) -> None:
    fits = all(a * s <= n for a, s, n in zip(shape, stride, topology.mesh_shape, strict=True))
    if not fits:
        with pytest.raises(ValueError, match="has a footprint of .* which exceeds the mesh"):
            DeviceAssignment.build(topology, shape, stride)
        return
    room = blocks(topology, shape, stride)
    assignment = DeviceAssignment.build(topology, shape, stride, num_replicas=None)
    cores = assignment.core_assignment
    assert cores.shape == (room, math.prod(shape), 4)
    assert len({tuple(c) for c in cores.reshape(-1, 4).tolist()}) == cores.size // 4  # each core once
    assert all(footprint(replica) == footprint(cores[0]) for replica in cores)
    assert footprint(cores[0]) == [tuple(np.multiply(p, stride)) for p in np.ndindex(*shape)]
    with pytest.raises(ValueError, match=f"{room + 1} replicas wanted, but there is room for {room}: "):
        DeviceAssignment.build(topology, shape, stride, num_replicas=room + 1)


@given(TOPOLOGIES, SMALL, SMALL)
@example(Topology.of_chips((3, 3, 1), wrap=(False, True, False)), (3, 3, 1, 1), (1, 1, 1, 1))
@example(Topology.of_chips((4, 3, 1)), (4, 3, 1, 1), (1, 1, 1, 1))  # a comb along x would have three teeth
def test_logical_devices_follow_the_links(topology, shape, stride) -> None:
    if any(a * s > n for a, s, n in zip(shape, stride, topology.mesh_shape, strict=True)):
        return
    assignment = DeviceAssignment.build(topology, shape, stride)
    cores, hops = assignment.core_assignment[0], assignment.hops()[0]
    chips = cores[:: shape[3], :3]
    # The cores of a chip follow on each other, ...
    assert all((group[:, :3] == group[0, :3]).all() for group in cores.reshape(-1, shape[3], 4))
    # ... and each chip is beside the last one: as far away as the stride along the dim in which they differ.
    for a, b in itertools.pairwise(chips):
        (dim,) = np.flatnonzero(a != b)
        apart, size = abs(int(b[dim]) - int(a[dim])), topology.torus.shape[dim]
        assert apart == stride[dim] or (topology.torus.wrap[dim] and size - apart == stride[dim])
        assert topology.hops((*a, 0), (*b, 0)) <= stride[dim]
    # Back to the first one it is one step as well, wherever there is a ring.
    n, wide = len(chips), sum(size > 1 for size in shape[:3])
    around = [
        wraps and a * s == size and a > 2
        for wraps, a, s, size in zip(topology.torus.wrap, shape, stride, topology.torus.shape, strict=False)
    ]
    if n == 1 or any(around) or n == 2 or (n % 2 == 0 and wide > 1):
        assert hops[-1] <= max(stride[:3])


@given(TOPOLOGIES, SMALL, st.integers(1, 12))
def test_as_many_as_are_wanted_lie_together(topology, shape, wanted) -> None:
    if any(a > n for a, n in zip(shape, topology.mesh_shape, strict=True)):
        return
    ones = (1, 1, 1, 1)
    if wanted > blocks(topology, shape, ones):
        return
    assignment = DeviceAssignment.build(topology, shape, num_replicas=wanted)
    cores = assignment.core_assignment
    assert cores.shape[0] == wanted
    assert len({tuple(c) for c in cores.reshape(-1, 4).tolist()}) == cores.size // 4
    box = np.ptp(cores.reshape(-1, 4), axis=0) + 1
    # No side of the box that holds them could be a block shorter.
    for dim in range(4):
        shorter = np.where(np.arange(4) == dim, box - shape, box)
        assert math.prod(int(s) // a for s, a in zip(shorter, shape, strict=True)) < wanted
    tasks = assignment.tasks()[:, 0].tolist()
    assert tasks == sorted(tasks)  # a host feeds replicas that follow on each other


@pytest.mark.parametrize(
    ("name", "wanted", "box"),
    [
        ("v3:4x4", 4, (2, 1, 1, 2)),  # cores of a chip first
        ("v3:2x2", 2, (1, 1, 1, 2)),  # also where there is as much room along x and y
        ("v3:4x4", 8, (2, 2, 1, 2)),
        ("v5e:4x4", 4, (2, 2, 1, 1)),
        ("v4:4x4x4", 8, (2, 2, 2, 1)),
        ("v4:4x4x4", 27, (3, 3, 3, 1)),
        ("v5p:16x16x16", 4096, (16, 16, 16, 1)),
    ],
)
def test_replicas_are_as_close_to_a_cube_as_possible(name, wanted, box) -> None:
    assignment = DeviceAssignment.build(Topology.from_name(name), num_replicas=wanted)
    assert tuple((np.ptp(assignment.core_assignment[:, 0], axis=0) + 1).tolist()) == box


@given(TOPOLOGIES, SMALL, st.data())
def test_missing_cores_are_left_out(topology, shape, data) -> None:
    if any(a > n for a, n in zip(shape, topology.mesh_shape, strict=True)) or topology.num_tasks < 2:
        return
    gone = data.draw(st.integers(0, topology.num_tasks - 1))
    holes = Topology(
        mesh_shape=topology.mesh_shape, device_coordinates=np.delete(topology.device_coordinates, gone, axis=0)
    )
    whole = DeviceAssignment.build(topology, shape, num_replicas=None)
    left = [r for r in whole.core_assignment if holes.has_devices(r).all()]
    if not left:
        with pytest.raises(ValueError, match="every block of .* cores has one that is missing"):
            DeviceAssignment.build(holes, shape, num_replicas=None)
        return
    assignment = DeviceAssignment.build(holes, shape, num_replicas=None)
    assert sorted(map(footprint, assignment.core_assignment)) == sorted(map(footprint, left))
    assert {tuple(r[0]) for r in assignment.core_assignment.tolist()} == {tuple(r[0]) for r in np.array(left).tolist()}
    with pytest.raises(ValueError, match=f"wanted, but there is room for {len(left)}: "):
        DeviceAssignment.build(holes, shape, num_replicas=len(left) + 1)


def test_a_stride_weaves_replicas() -> None:
    assignment = DeviceAssignment.build(Topology.from_name("v5e:4x4"), [2, 1, 1, 1], [2, 1, 1, 1], num_replicas=None)
    first = {tuple(r[:, 0].tolist()) for r in assignment.core_assignment}
    assert first == {(0, 2), (1, 3)}
    assert assignment.num_replicas == 8


@pytest.mark.parametrize("wrap", [False, True])
def test_a_ring_that_only_the_wrap_around_closes(wrap: bool) -> None:
    topology = Topology.of_chips((5, 3, 1), wrap=(wrap, False, False))
    hops = DeviceAssignment.build(topology, [5, 3, 1, 1]).hops()[0]
    assert (hops[:-1] == 1).all()
    assert (hops[-1] == 1) == wrap


def test_the_order_of_the_mesh() -> None:
    topology = Topology.from_name("v3:4x4")
    cores = DeviceAssignment.build(topology, [2, 2, 2], device_order_mode="mesh").core_assignment[0]
    assert cores.tolist() == [[x, y, 0, c] for x in (0, 1) for y in (0, 1) for c in (0, 1)]
    assert DeviceAssignment.build(topology, [2, 2, 2], device_order_mode="ring") == DeviceAssignment.build(
        topology, [2, 2, 2]
    )


def test_what_the_original_has() -> None:
    topology = Topology.from_name("v3:4x4")
    assignment = DeviceAssignment.build(topology.serialized(), computation_shape=[1, 1, 2], num_replicas=16)
    assert assignment.topology == topology
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (16, 2)
    assert assignment.core_assignment.shape == (16, 2, 4)
    assert assignment.core_assignment.dtype == np.int32
    assert assignment.logical_to_tpu is assignment.core_assignment
    assert assignment.coordinates(5, 1) == (3, 0, 0, 1)
    assert assignment.tpu_ordinal(5, 1) == 3
    assert assignment.tpu_ordinal() == 0
    assert assignment.host_device(5) == "/task:1/device:CPU:0"
    assert assignment.host_device(5, 1, job="w") == "/job:w/task:1/device:CPU:0"
    assert assignment.tpu_device(5, 1) == "/task:1/device:TPU:3"
    assert assignment.lookup_replicas(3, 1) == [12, 13, 14, 15]
    assert DeviceAssignment.build(topology).core_assignment.tolist() == [[[0, 0, 0, 0]]]
    assert (
        DeviceAssignment.one_core_each(topology).core_assignment[:, 0].tolist()
        == topology.device_coordinates.reshape(-1, 4).tolist()
    )


def test_lookups_that_find_nothing() -> None:
    assignment = DeviceAssignment.build(Topology.from_name("v3:4x4"), [1, 1, 2], num_replicas=4)
    with pytest.raises(ValueError, match=r"task 3 drives no logical core 1 of any replica; tasks that do: \[0\]"):
        assignment.lookup_replicas(3, 1)
    with pytest.raises(ValueError, match="no logical core 2: this assignment has 2, from 0 to 1"):
        assignment.lookup_replicas(0, 2)
    with pytest.raises(ValueError, match="no replica 4: this assignment has 4, from 0 to 3"):
        assignment.coordinates(4, 0)
    with pytest.raises(ValueError, match="no replica -1"):
        assignment.tpu_device(-1)
    for index in (None, 1.5):
        with pytest.raises(ValueError, match=f"no replica {index}"):
            assignment.coordinates(index, 0)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ([(0, 0, 0, 0)], r"must have the shape \[replicas, cores of a replica, 4\], got \[1, 4\]"),
        ([[(0, 0)]], r"core_assignment must be integers \(x, y, z, core\)"),
        ([[(0, 0, 0.5)]], "must be integers"),
        (np.zeros((0, 1, 4), int), "must have the shape"),
        (
            [[(0, 0, 0)], [(0, 4, 0)]],
            r"replica 1, logical core 0: there is no core at \(0, 4, 0, 0\); the mesh is \(4, 4, 1, 2\)",
        ),
        ([[(0, 0, 0), (-1, 0, 0)]], r"replica 0, logical core 1: there is no core at \(-1, 0, 0, 0\)"),
        (
            [[(0, 0, 0), (0, 0, 1)], [(1, 0, 0), (0, 0, 1)]],
            r"core at \(0, 0, 0, 1\) is given to replica 0, logical core 1, and to replica 1, logical core 1",
        ),
    ],
)
def test_lists_of_cores_that_are_off(cores, message) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceAssignment(Topology.from_name("v3:4x4"), cores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"computation_shape": [5, 1, 1]},
            r"\(5, 1, 1, 1\), which exceeds the mesh of \(4, 4, 1, 2\) .*Three numbers mean",
        ),
        (
            {"computation_shape": [1, 1, 2, 1]},
            r"footprint of \(1, 1, 2, 1\), which exceeds the mesh of \(4, 4, 1, 2\) \(x, y, z, core\)$",
        ),
        (
            {"computation_shape": [2, 2, 1], "computation_stride": [3, 1, 1]},
            r"footprint of \(6, 2, 1, 1\), which exceeds",
        ),
        ({"computation_shape": [2, 2]}, r"computation_shape must be integers \(x, y, z, core\).*got \[2, 2\]"),
        ({"computation_shape": [2, 0, 1]}, r"computation_shape must be positive integers, got \[2, 0, 1\]"),
        ({"computation_stride": [1, -1, 1]}, r"computation_stride must be positive integers, got \[1, -1, 1\]"),
        ({"computation_shape": 2}, "computation_shape must be integers"),
        ({"num_replicas": 33}, "33 replicas wanted, but there is room for 32: each takes 1 core"),
        ({"num_replicas": 0}, "num_replicas must be an int of at least 1, got 0"),
        ({"num_replicas": 2.0}, "num_replicas must be an int of at least 1, got 2.0"),
        ({"num_replicas": True}, "num_replicas must be an int of at least 1, got True"),
        ({"device_order_mode": "best"}, "device_order_mode must be 'auto', 'ring' or 'mesh', got 'best'"),
    ],
)
def test_impossible_requests(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(Topology.from_name("v3:4x4"), **arguments)


def test_what_is_no_topology() -> None:
    for make in (lambda t: DeviceAssignment.build(t), lambda t: DeviceAssignment(t, [[(0, 0, 0)]])):
        with pytest.raises(TypeError, match="topology must be a Topology, got 'v3'"):
            make("v3")


def test_too_many_for_a_slice_with_a_hole() -> None:
    whole = Topology.from_name("v5e:4x4")
    holes = Topology(mesh_shape=whole.mesh_shape, device_coordinates=whole.device_coordinates[1:])
    message = "4 replicas wanted, but there is room for 3: each takes 4 core.* in which 4 cores are missing"
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(holes, [2, 2, 1], num_replicas=4)
