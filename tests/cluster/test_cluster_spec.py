"""A cluster is jobs of tasks with addresses; what can't be one is refused with what was expected."""

from __future__ import annotations

import pytest

from replicax.cluster import ClusterSpec
from replicax.system.addresses import host_and_port, is_loopback, join_address, split_address


def test_jobs_and_tasks() -> None:
    cluster = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ("c:1",), "chief": {"0": "d:1"}})
    assert cluster.jobs == ["worker", "ps", "chief"]
    assert (cluster.num_tasks("worker"), cluster.task_indices("worker")) == (2, [0, 1])
    assert cluster.task_address("worker", 1) == "b:1"
    assert cluster.job_tasks("ps") == ["c:1"]
    assert cluster.as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["d:1"]}
    assert repr(cluster) == "ClusterSpec({'worker': ['a:1', 'b:1'], 'ps': ['c:1'], 'chief': ['d:1']})"


def test_not_all_tasks_have_to_be_known() -> None:
    sparse = ClusterSpec({"worker": {3: "d:1", 1: "b:1"}})
    assert sparse.num_tasks("worker") == 2
    assert sparse.task_indices("worker") == [1, 3]
    assert sparse.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert sparse.as_dict() == {"worker": {3: "d:1", 1: "b:1"}}
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []


def test_equal_clusters() -> None:
    cluster = ClusterSpec({"worker": ["a:1", "b:1"]})
    for same in (ClusterSpec(cluster), {"worker": {1: "b:1", 0: "a:1"}}, cluster.as_dict()):
        assert cluster == same
    assert cluster != ClusterSpec({"worker": ["b:1", "a:1"]})
    assert cluster != {"worker": 3}
    assert cluster != "worker"
    assert (bool(cluster), bool(ClusterSpec({}))) == (True, False)
    copy = cluster.as_dict()
    copy["worker"] = ["c:1"]
    assert cluster == {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (["a:1"], TypeError, r"expected a dict from jobs to lists of addresses, .*got \['a:1'\]"),
        ({0: ["a:1"]}, TypeError, "the name of a job is a string, such as 'worker'; got 0"),
        ({"worker": "a:1"}, TypeError, "the job 'worker' must be a list of addresses, or a dict .*got 'a:1'"),
        ({"worker": [1]}, TypeError, "the task 'worker' 0: expected an address as a string, .*'node0:2222'.*got 1"),
        ({"worker": {"x": "a:1"}}, ValueError, "the tasks of the job 'worker' are numbered from 0; got the index 'x'"),
        ({"worker": {-1: "a:1"}}, ValueError, "got the index -1"),
        ({"worker": ["a:1", "b:99999"]}, ValueError, "'worker' 1: 'b:99999' has the port '99999'; .*from 1 to 65535"),
        ({"worker": ["a:1", "grpc://b:1"]}, ValueError, "'worker' 1: expected an address, .*got 'grpc://b:1'"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, ValueError, "'worker' 0 and 'ps' 0 have the same address, 'a:1'; .*ports"),
    ],
)
def test_what_is_no_cluster(cluster, error, message) -> None:
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


def test_what_is_not_there() -> None:
    cluster = ClusterSpec({"worker": ["a:1", "b:1"]})
    with pytest.raises(ValueError, match="there is no job 'ps' in the cluster: it has 'worker'"):
        cluster.num_tasks("ps")
    with pytest.raises(ValueError, match="there is no task 2 in the job 'worker': it has 0, 1"):
        cluster.task_address("worker", 2)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("10.0.0.1", ("10.0.0.1", None)), ("[::1]:80", ("::1", 80)), ("fe80::1", ("fe80::1", None))],
)
def test_addresses(address, parts) -> None:
    assert split_address(address, "it") == parts
    if parts[1] is not None:
        assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", ":80", "a:", "a b:80", "a:b:80", "[::1", "[::1]80", "[::1]:", "a:0", "a:x", "a..b:80", "a" * 64]
)
def test_what_is_no_address(address) -> None:
    with pytest.raises(ValueError, match=r"^the chief: "):
        split_address(address, "the chief")


def test_an_address_that_needs_a_port() -> None:
    with pytest.raises(ValueError, match=r"^the chief: 'node0' has no port; expected 'HOST:PORT'.*Add the port"):
        host_and_port("node0", "the chief")


def test_addresses_of_this_machine_only() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.9", "::1", "10.0.0.1", "a")] == [True] * 3 + [
        False
    ] * 2
