from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, strategies as st

from replicax import DeviceAssignment, Topology
from replicax.tpu.core_owners import SHARED, core_owners


def test_without_an_assignment_cores_belong_to_hosts() -> None:
    topology = Topology.from_name("v3:4x4")
    picture = core_owners(topology, None)
    assert picture.whose == "host"
    for at in itertools.product(range(4), range(4), [0], range(2)):
        task = topology.task_ordinal_at_coordinates(at)
        assert picture.label(at) == f"{task}·{topology.tpu_device_ordinal_at_coordinates(at)}"


def test_with_one_they_belong_to_replicas() -> None:
    whole = Topology.from_name("v5e:4x4")
    topology = Topology(mesh_shape=whole.mesh_shape, device_coordinates=whole.device_coordinates[1:])
    assignment = DeviceAssignment.build(topology, [1, 2, 1], num_replicas=2)
    picture = core_owners(topology, assignment)
    for replica, core in itertools.product(range(2), range(2)):
        assert picture.label(assignment.coordinates(replica, core)) == f"{replica}·{core}"
    assert (picture.owner == -2).sum() == 4
    assert (picture.owner == -1).sum() == 8
    assert (picture.label((3, 3, 0, 0)), picture.colour((3, 3, 0, 0))) == ("", SHARED)
    assert core_owners(topology, DeviceAssignment.build(topology, num_replicas=9)).label((2, 0, 0, 0)) == "0"


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)),
    st.integers(1, 2),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
)
@example((4, 4, 2), 1, (1, 1, 1))  # above each other are replicas whose numbers differ by twice the number of colours
@example((4, 2, 2), 2, (1, 1, 1))
def test_neighbours_have_different_colours(chips, cores, shape) -> None:
    topology = Topology.of_chips(chips, cores, wrap=(True, True, True))
    if any(a > b for a, b in zip(shape, chips, strict=True)):
        return
    picture = core_owners(topology, DeviceAssignment.build(topology, [*shape, cores], num_replicas=None))
    for a, b in topology.torus.links().tolist():
        one, other = picture.owner[(*a, 0)], picture.owner[(*b, 0)]
        if one != other and min(one, other) >= 0:
            assert picture.colours[one] != picture.colours[other]


def test_an_assignment_of_another_topology() -> None:
    with pytest.raises(ValueError, match="another topology: .*v3:2x2.* not .*v3:4x4"):
        core_owners(Topology.from_name("v3:4x4"), DeviceAssignment.build(Topology.from_name("v3:2x2")))
