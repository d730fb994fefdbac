"""What resolvers tell: TF_CONFIG's, the program's own, and several as one."""

from __future__ import annotations

import json

import pytest

import replicax
from replicax.cluster import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver, UnionClusterResolver

PAIR = {"worker": ["a:1", "b:1"]}


def config(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(fields))


# --- TF_CONFIG ------------------------------------------------------------------------------------------


def test_what_tf_config_says(monkeypatch) -> None:
    config(
        monkeypatch,
        cluster={"chief": ["c:1"], **PAIR},
        task={"type": "worker", "index": 1},
        rpc_layer="grpc",
        environment="cloud",
    )
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == {"chief": ["c:1"], **PAIR}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")
    assert resolver.master() == "grpc://b:1"
    assert resolver.master("chief", 0, rpc_layer="http") == "http://c:1"
    assert resolver.num_accelerators() == {}  # there are CPUs only
    other = TFConfigClusterResolver(task_type="chief", task_id=0, rpc_layer="", environment="lab")
    assert (other.task_type, other.task_id, other.environment, other.master()) == ("chief", 0, "lab", "c:1")
    other.task_type, other.task_id, other.rpc_layer = "worker", 0, "grpc"
    assert other.master() == "grpc://a:1"


def test_the_forms_that_are_met_elsewhere(monkeypatch) -> None:
    config(monkeypatch, cluster={"worker": {"1": "b:1", "0": "a:1"}}, task={"type": "worker", "index": "1"})
    assert TFConfigClusterResolver().task_id == 1
    config(monkeypatch, cluster=PAIR, task={"type": "evaluator", "index": 0})
    assert TFConfigClusterResolver().task_type == "evaluator"
    config(monkeypatch, cluster=PAIR, task={"type": "worker", "index": 0}, session_master="x:9")
    assert TFConfigClusterResolver().master() == "x:9"
    config(monkeypatch, cluster={"worker": ["a:1"]}, task={"type": "worker", "index": 0})
    assert TFConfigClusterResolver().master() == ""
    for text in ("", " ", "{}"):
        monkeypatch.setenv("TF_CONFIG", text)
        resolver = TFConfigClusterResolver()
        assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id, resolver.master()) == (
            {},
            None,
            None,
            "",
        )
    monkeypatch.delenv("TF_CONFIG")
    assert TFConfigClusterResolver().cluster_spec() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'cluster': {}}", r"TF_CONFIG is no JSON \(.*line 1 column 2.*\): \{'cluster': \{\}\}\. Expected such as \{"),
        ("[" * 100_000, r"TF_CONFIG is no JSON \(it is nested too deeply\): \[\[\[.*Expected such as \{"),
        ("[1]", r"TF_CONFIG must be a JSON object, got \[1\]"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG has no 'cluster'; it has 'task'.*Unset TF_CONFIG if"),
        ('{"cluster": ["a:1"]}', r"'cluster': expected a dict from jobs to lists .*\. It is \[\"a:1\"\]"),
        ('{"cluster": {"worker": ["a"]}}', "'cluster': the task 'worker' 0: 'a' has no port; expected 'HOST:PORT'"),
        ('{"cluster": {"worker": ["a:x"]}}', "'cluster': the task 'worker' 0: 'a:x' has the port 'x'; .*1 to 65535"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}}', "'worker' 0 and 'worker' 1 have the same address, 'a:1'"),
        ('{"cluster": {}, "task": 0}', r"'task': expected an object, \{.*\}; got 0"),
        ('{"cluster": {}, "task": {"type": 3}}', "'task': 'type' must be the name of a job, .*got 3"),
        ('{"cluster": {}, "task": {"index": "x"}}', "'task': 'index' must be a whole number, such as 0; got 'x'"),
        ('{"cluster": {}, "rpc_layer": 3}', "'rpc_layer': expected a string, got 3"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "trainer", "index": 0}}',
            "a task of the job 'trainer', and the cluster has the jobs 'worker' only. Correct 'type' of 'task'",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
            r"task 2 of the job 'worker', whose 2 task\(s\) are 0, 1. Correct 'index' of 'task'",
        ),
        (
            '{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}',
            r"task 0 of the job 'worker', whose 0 task\(s\) are none. Correct",
        ),
    ],
)
def test_what_is_wrong_in_tf_config(monkeypatch, text, message) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message):
        TFConfigClusterResolver()
    with pytest.raises(ValueError, match=message):  # which reads it, too
        replicax.initialize_workers()


# --- the program's own ----------------------------------------------------------------------------------


def test_what_a_simple_resolver_says() -> None:
    resolver = SimpleClusterResolver(ClusterSpec(PAIR), "m:1", "worker", 1, "lab", {"GPU": 8}, rpc_layer="grpc")
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "lab")
    assert resolver.master() == resolver.master("worker") == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {"GPU": 8}
    assert SimpleClusterResolver(ClusterSpec({})).master("worker", 0) == ""  # there is nothing to connect to
    assert repr(resolver).startswith(
        "SimpleClusterResolver(ClusterSpec({'worker': ['a:1', 'b:1']}), task_type='worker'"
    )


def test_what_a_simple_resolver_does_not_take() -> None:
    with pytest.raises(
        TypeError, match=r"cluster_spec must be a replicax.cluster.ClusterSpec, got \{'worker'.*make one"
    ):
        SimpleClusterResolver(PAIR)
    with pytest.raises(TypeError, match="master must be an address as a string, got 3"):
        SimpleClusterResolver(ClusterSpec(PAIR), master=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'config_proto'"):
        SimpleClusterResolver(ClusterSpec(PAIR)).num_accelerators(config_proto=None)


def test_a_resolver_of_ones_own() -> None:
    class Two(replicax.cluster.ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec(PAIR)

    unknown = Two()
    assert (unknown.task_type, unknown.task_id, unknown.master(), unknown.environment) == (None, None, "", "")
    assert unknown.num_accelerators() == {}
    with pytest.raises(ValueError, match="there is no task 7 in the job 'worker': it has 0, 1"):
        unknown.master("worker", 7)
    second = Two("worker", 1)
    with pytest.raises(
        ValueError, match=r"this is 'worker' 1, which sees its own devices only, .*'worker' 0 was asked"
    ):
        second.num_accelerators("worker", 0)
    with pytest.raises(ValueError, match="Two has a cluster of 2 workers, and does not say which.*Set them"):
        replicax.initialize_workers(unknown)
    with pytest.raises(TypeError, match="abstract"):
        replicax.cluster.ClusterResolver()


# --- several as one -------------------------------------------------------------------------------------


def simple(cluster: dict, *args: object, **kwargs: object) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), *args, **kwargs)


def test_the_first_with_an_answer() -> None:
    first = simple({"ps": ["p:1"]}, rpc_layer="grpc")
    second = simple(PAIR, "m:1", "worker", 1, "lab", {"GPU": 2})
    union = UnionClusterResolver(first, second)
    assert union.cluster_spec() == {"ps": ["p:1"], **PAIR}
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("worker", 1, "grpc", "lab")
    assert (union.master(), union.master("worker", 1)) == ("m:1", "grpc://b:1")
    assert union.num_accelerators() == {"GPU": 2}
    given = UnionClusterResolver(first, second, task_type="ps", task_id=0, rpc_layer="http")
    assert (given.task_type, given.task_id, given.master("ps", 0)) == ("ps", 0, "http://p:1")
    given.task_type, given.task_id, given.rpc_layer = "worker", 0, None
    assert (given.task_type, given.task_id, given.rpc_layer) == ("worker", 0, "grpc")


def test_jobs_are_put_together() -> None:
    def union(*clusters: dict) -> ClusterSpec:
        return UnionClusterResolver(*map(simple, clusters)).cluster_spec()

    assert union(PAIR, PAIR) == PAIR  # as in the original's example of overriding the number of GPUs
    assert union(PAIR, {"worker": ["c:1"]}) == {"worker": ["a:1", "b:1", "c:1"]}
    assert union({"worker": ["a:1"]}, {"worker": ["b:1"]}, {"worker": ["b:1"]}) == PAIR
    assert union({"worker": {0: "a:1"}}, {"worker": {2: "c:1"}}) == {"worker": {0: "a:1", 2: "c:1"}}
    assert union({"worker": {1: "b:1"}}, PAIR) == PAIR
    whole = [{"worker": [*tasks]} for tasks in (["a:1"], ["b:1"], ["a:1", "b:1"], ["c:1"])]
    assert union(*whole) == {"worker": ["a:1", "b:1", "c:1"]}


def test_a_task_has_its_index_in_the_concatenated_list() -> None:
    first, second = simple(PAIR), simple({"worker": ["c:1"]}, task_type="worker", task_id=0)
    assert UnionClusterResolver(first, second).task_id == 2
    assert UnionClusterResolver(second, first).task_id == 0
    unknown = UnionClusterResolver(simple(PAIR, task_type="worker"))
    assert (unknown.task_type, unknown.task_id) == ("worker", None)
    elsewhere = simple({"ps": ["p:1"]}, task_type="worker", task_id=1)  # only the other has the addresses of its job
    assert UnionClusterResolver(first, elsewhere).task_id == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            ["a:1", "b:1"],
            {1: "c:1"},
            r"'worker' 1 is at 'b:1' by resolver 0 \(Simple\w+\), which has \['a:1', 'b:1'\], and at 'c:1' by "
            r"resolver 1 \(Simple\w+\), which has \{1: 'c:1'\}\. Give it the same address in both",
        ),
        ({1: "a:1"}, {1: "b:1"}, "'worker' 1 is at 'a:1' .*and at 'b:1'"),
        (["a:1", "b:1"], ["b:1", "c:1"], "'worker' 0 is at 'a:1' .*and at 'b:1' .*no address in common"),
    ],
)
def test_resolvers_that_contradict_each_other(ours, theirs, message) -> None:
    union = UnionClusterResolver(simple({"worker": ours}), simple({"worker": theirs}))
    with pytest.raises(ValueError, match=message):
        union.cluster_spec()


def test_what_is_no_union() -> None:
    with pytest.raises(ValueError, match="give at least one resolver, got none"):
        UnionClusterResolver()
    with pytest.raises(TypeError, match="expected resolvers, .*got 'worker'"):
        UnionClusterResolver("worker")
