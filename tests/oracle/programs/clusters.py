"""Clusters: what resolvers tell of jobs, tasks and addresses."""

from __future__ import annotations

import contextlib
import json
import os
import types
from collections.abc import Iterator
from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("clusters")

CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
ONE_ADDRESS = "Two tasks with one address are an error where the cluster is described, as neither could be reached."


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """With these variables, and all GPUs visible; then with what was there before."""
    before = {name: os.environ.get(name) for name in (*variables, "CUDA_VISIBLE_DEVICES")}
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _told(resolver: Any) -> list[Any]:
    """All that a resolver tells."""
    cluster = resolver.cluster_spec().as_dict()  # first, as one of the original's finds out its task in it
    return [cluster, resolver.task_type, resolver.task_id, resolver.master(), resolver.rpc_layer]


@topic.program("a specification")
def specification(d: Library) -> Any:
    cluster = d.clusters.ClusterSpec(CLUSTER)
    sparse = d.clusters.ClusterSpec({"worker": {"1": "b:1", 3: "d:1"}})
    return [
        [cluster.jobs, cluster.num_tasks("worker"), cluster.task_indices("worker"), cluster.job_tasks("worker")],
        [cluster.task_address("worker", 1), cluster.as_dict(), bool(cluster), bool(d.clusters.ClusterSpec({}))],
        [sparse.num_tasks("worker"), sparse.task_indices("worker"), sparse.job_tasks("worker"), sparse.as_dict()],
        [d.clusters.ClusterSpec(cluster) == cluster, cluster == sparse],
        d.attempt(lambda: cluster.num_tasks("chief")),
        d.attempt(lambda: cluster.task_address("worker", 2)),
        d.attempt(lambda: d.clusters.ClusterSpec({"worker": "a:1"})),
        d.attempt(lambda: d.clusters.ClusterSpec(["a:1"])),
    ]


@topic.program("one address twice", differs=ONE_ADDRESS)
def one_address_twice(d: Library) -> Any:
    return d.clusters.ClusterSpec({"worker": ["a:1", "a:1"]}).as_dict()


@topic.program("TF_CONFIG")
def tf_config(d: Library) -> Any:
    with environment(
        TF_CONFIG=json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "x"})
    ):
        resolver = d.clusters.TFConfigClusterResolver()
        other = d.clusters.TFConfigClusterResolver(task_type="ps", task_id=0, rpc_layer="grpc")
        return [_told(resolver), resolver.master("worker", 0), _told(other), dict(resolver.num_accelerators())]


@topic.program("TF_CONFIG of one task, and of none")
def tf_config_alone(d: Library) -> Any:
    with environment(TF_CONFIG=json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})):
        alone = _told(d.clusters.TFConfigClusterResolver())
    with environment(TF_CONFIG="{}"):
        return [alone, _told(d.clusters.TFConfigClusterResolver())]


@topic.program("a master of the session's own")
def session_master(d: Library) -> Any:
    with environment(TF_CONFIG=json.dumps({"cluster": CLUSTER, "session_master": "m:1"})):
        return d.clusters.TFConfigClusterResolver().master()


@topic.program(
    "TF_CONFIG with an index out of range",
    differs="What is wrong in TF_CONFIG is an error when it is read, and not when an address is asked for.",
)
def out_of_range(d: Library) -> Any:
    with environment(TF_CONFIG=json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 7}})):
        return d.clusters.TFConfigClusterResolver().task_id


@topic.program("a cluster that the program knows")
def simple(d: Library) -> Any:
    resolver = d.clusters.SimpleClusterResolver(
        d.clusters.ClusterSpec(CLUSTER), "m:1", "worker", 0, "lab", {"GPU": 2}, rpc_layer="grpc"
    )
    return [
        [*_told(resolver), resolver.environment, resolver.num_accelerators()],
        [resolver.master("worker", 1), resolver.master("worker", 1, "x"), resolver.master("worker")],
        d.attempt(lambda: d.clusters.SimpleClusterResolver(CLUSTER)),
    ]


def _simple(d: Library, cluster: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return d.clusters.SimpleClusterResolver(d.clusters.ClusterSpec(cluster), *args, **kwargs)


def _union(d: Library, *clusters: dict[str, Any]) -> Any:
    return d.clusters.UnionClusterResolver(*(_simple(d, cluster) for cluster in clusters)).cluster_spec().as_dict()


@topic.program("several resolvers")
def several(d: Library) -> Any:
    first = _simple(d, {"worker": ["a:1"]}, "m:1", "worker", 0, rpc_layer="grpc")
    union = d.clusters.UnionClusterResolver(first, _simple(d, {"ps": ["c:1"]}))
    given = d.clusters.UnionClusterResolver(first, task_type="ps", task_id=3, rpc_layer="x")
    return [
        [*_told(union), union.master("ps", 0, "y")],
        [given.task_type, given.task_id, given.rpc_layer],
        _union(d, {"worker": ["a:1"]}, {"worker": ["b:1"]}),
        _union(d, {"worker": {1: "a:1"}}, {"worker": ["b:1"]}),
        d.attempt(lambda: d.clusters.UnionClusterResolver()),
        d.attempt(lambda: d.clusters.UnionClusterResolver("a")),
    ]


@topic.program(
    "the layer before the address of a task of several resolvers",
    differs="master puts what rpc_layer says before every address: the original's leaves it out where a task is named.",
)
def layer_of_several(d: Library) -> Any:
    union = d.clusters.UnionClusterResolver(_simple(d, {"worker": ["a:1"]}, rpc_layer="grpc"))
    return [union.rpc_layer, union.master("worker", 0)]


@topic.program(
    "resolvers with the same tasks",
    differs="Two resolvers with one list of a job mean the same tasks, as in the original's own example of overriding "
    "the number of accelerators, whose workers it has twice.",
)
def same_tasks(d: Library) -> Any:
    return _union(d, CLUSTER, CLUSTER)


@topic.program(
    "the first resolver does not know its task",
    differs="The task is that of the first resolver that knows which it is: the original's is that of the first one.",
)
def first_with_an_answer(d: Library) -> Any:
    union = d.clusters.UnionClusterResolver(
        _simple(d, {"ps": ["c:1"]}), _simple(d, {"worker": ["a:1"]}, "", "worker", 0)
    )
    return [union.task_type, union.task_id]


STEP = {"SLURM_STEP_NODELIST": "n[1-2],m", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_TASKS": "5"}


@topic.program("a Slurm step")
def slurm(d: Library) -> Any:
    with environment(
        **STEP | {"SLURM_STEP_NODELIST": "m,n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}, SLURM_PROCID="3"
    ):
        resolver = d.clusters.SlurmClusterResolver({"worker": 4, "chief": 1}, 7000, gpus_per_node=4, gpus_per_task=2)
        told = [*_told(resolver), os.environ["CUDA_VISIBLE_DEVICES"], resolver.num_accelerators()]
        return [told, d.attempt(lambda: d.clusters.SlurmClusterResolver({"worker": 4}, gpus_per_node=4))]


@topic.program(
    "a Slurm step whose nodes are not in the order of their names",
    differs="Tasks are in the order in which Slurm numbers them: the original sorts the nodes by name, and takes one "
    "task for another.",
)
def slurm_order(d: Library) -> Any:
    with environment(**STEP, SLURM_PROCID="3"):
        return _told(d.clusters.SlurmClusterResolver(gpus_per_node=2))


class _Pods:
    """A client of Kubernetes, as far as it lists pods."""

    def __init__(self, *pods: Any) -> None:
        self._pods = pods

    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        return types.SimpleNamespace(items=[pod for pod in self._pods if label_selector in pod.labels])


def _pod(name: str, job: str, ip: str, phase: str = "Running") -> Any:
    return types.SimpleNamespace(
        labels=[f"job-name={job}"],
        metadata=types.SimpleNamespace(name=name, namespace="default", annotations=None),
        status=types.SimpleNamespace(phase=phase, host_ip=ip, pod_ip=ip),
    )


@topic.program("pods of Kubernetes")
def kubernetes(d: Library) -> Any:
    pods = _Pods(_pod("b", "w", "10.0.0.2"), _pod("a", "w", "10.0.0.1"), _pod("c", "p", "10.0.0.3"))
    jobs = {"worker": ["job-name=w"], "ps": ["job-name=p"]}
    resolver = d.clusters.KubernetesClusterResolver(jobs, override_client=pods)
    resolver.task_type, resolver.task_id = "worker", 1
    waiting = d.clusters.KubernetesClusterResolver(jobs, 1, override_client=_Pods(_pod("a", "w", "x", "Pending")))
    return [_told(resolver), d.attempt(waiting.cluster_spec)]


@topic.program(
    "pods with numbers",
    differs="Pods are in the order of the numbers in their names, so that pod-10 comes after pod-9.",
)
def kubernetes_numbers(d: Library) -> Any:
    pods = _Pods(*(_pod(f"pod-{i}", "w", f"10.0.0.{i}") for i in (10, 9)))
    return (
        d.clusters.KubernetesClusterResolver({"worker": ["job-name=w"]}, override_client=pods).cluster_spec().as_dict()
    )
