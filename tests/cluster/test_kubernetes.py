"""Running pods as a cluster; the client has the shape of ``kubernetes.client.CoreV1Api``."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

from replicax.cluster import KubernetesClusterResolver, KubernetesExecutableLocation


@dataclasses.dataclass
class Metadata:
    name: str
    namespace: str
    labels: dict[str, str]
    annotations: dict[str, str] | None


@dataclasses.dataclass
class Status:
    phase: str
    pod_ip: str | None
    host_ip: str = "192.168.0.1"


@dataclasses.dataclass
class Pod:
    metadata: Metadata
    status: Status


@dataclasses.dataclass
class PodList:
    items: list[Pod]


class CoreV1Api:
    """As far as pods are listed."""

    def __init__(self, *pods: Pod) -> None:
        self.pods = list(pods)

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> PodList:
        key, value = label_selector.split("=")
        return PodList([pod for pod in self.pods if pod.metadata.labels.get(key) == value])

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> PodList:
        listed = self.list_pod_for_all_namespaces(label_selector=label_selector)
        return PodList([pod for pod in listed.items if pod.metadata.namespace == namespace])


def pod(name: str, ip: str | None, job: str = "digits", phase: str = "Running", **more: Any) -> Pod:
    index = more.get("index")
    annotations = None if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
    return Pod(Metadata(name, more.get("namespace", "default"), {"job-name": job}, annotations), Status(phase, ip))


WORKERS = {"worker": ["job-name=digits"]}


def test_pods_are_tasks() -> None:
    client = CoreV1Api(
        pod("digits-10", "10.0.0.3"), pod("digits-9", "10.0.0.2"), pod("first", "10.0.0.1", "chief"), pod("x", "y", "z")
    )
    resolver = KubernetesClusterResolver({"chief": ["job-name=chief"], **WORKERS}, override_client=client)
    assert resolver.cluster_spec() == {"chief": ["10.0.0.1:8470"], "worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert resolver.environment == "kubernetes"
    assert resolver.master("chief", 0) == "grpc://10.0.0.1:8470"
    client.pods.append(pod("digits-11", "fd00::4"))  # they are listed anew
    assert resolver.cluster_spec().task_address("worker", 2) == "[fd00::4]:8470"
    several = {"worker": ["job-name=digits", "job-name=chief", "job-name=digits"]}
    spec = KubernetesClusterResolver(several, 2222, override_client=client).cluster_spec()
    assert spec.job_tasks("worker") == ["10.0.0.2:2222", "10.0.0.3:2222", "[fd00::4]:2222", "10.0.0.1:2222"]


def test_an_indexed_job_has_its_own_order() -> None:
    client = CoreV1Api(pod("digits-0-zz", "10.0.0.1", index=0), pod("digits-1-aa", "10.0.0.2", index=1))
    client.pods += [pod(f"a-{i}", f"10.0.1.{i}", index=i) for i in range(10, 1, -1)]
    tasks = KubernetesClusterResolver(WORKERS, override_client=client).cluster_spec().job_tasks("worker")
    assert tasks == ["10.0.0.1:8470", "10.0.0.2:8470", *(f"10.0.1.{i}:8470" for i in range(2, 11))]


def test_a_pod_finds_itself(monkeypatch) -> None:
    client = CoreV1Api(pod("digits-0", "10.0.0.1"), pod("digits-1", "10.0.0.2"))
    resolver = KubernetesClusterResolver(WORKERS, override_client=client)
    monkeypatch.setenv("HOSTNAME", "digits-1")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://10.0.0.2:8470")
    monkeypatch.setenv("HOSTNAME", "elsewhere")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.0.0.1:8470"


def test_one_namespace() -> None:
    client = CoreV1Api(pod("a", "10.0.0.1"), pod("b", "10.0.0.2", namespace="lab"))
    resolver = KubernetesClusterResolver(WORKERS, override_client=client, namespace="lab")
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470"]}
    nowhere = KubernetesClusterResolver(WORKERS, override_client=client, namespace="none")
    with pytest.raises(
        RuntimeError, match=r"no pod in the namespace 'none' has the labels .*'worker', \['job-name=digits'"
    ):
        nowhere.cluster_spec()


@pytest.mark.parametrize(("phase", "ip"), [("Pending", None), ("Failed", "10.0.0.1"), ("Running", None)])
def test_pods_that_do_not_run(phase, ip) -> None:
    resolver = KubernetesClusterResolver(WORKERS, override_client=CoreV1Api(pod("digits-0", ip, phase=phase)))
    with pytest.raises(
        RuntimeError, match=f"the pod 'digits-0' of the job 'worker' is not running; its phase is '{phase}'"
    ):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ("job-name=digits", TypeError),
        ({"worker": "job-name=digits"}, TypeError),
        ({}, ValueError),
        ({"a": []}, ValueError),
    ],
)
def test_what_are_no_selectors(mapping, error) -> None:
    with pytest.raises(error, match=r"job_to_label_mapping=.*expected \{'worker': \['job-name=digits'\]\}"):
        KubernetesClusterResolver(mapping, override_client=CoreV1Api())


def test_the_package_is_asked_where_the_program_runs(monkeypatch) -> None:
    asked = []
    package = types.ModuleType("kubernetes")
    package.config = types.SimpleNamespace(
        load_incluster_config=lambda: asked.append("in"), load_kube_config=lambda: asked.append("off")
    )
    package.client = types.SimpleNamespace(CoreV1Api=lambda: CoreV1Api(pod("digits-0", "10.0.0.1")))
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    for location in (KubernetesExecutableLocation.WITHIN_CLUSTER, "off_cluster"):
        resolver = KubernetesClusterResolver(WORKERS, executable_location=location)
        assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert asked == ["in", "off"]
    with pytest.raises(ValueError, match="executable_location must be one of 'within_cluster', 'off_cluster'"):
        KubernetesClusterResolver(WORKERS, executable_location="moon")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(
        ImportError, match=r"needs the package kubernetes: pip install kubernetes. Or pass override_client"
    ):
        KubernetesClusterResolver(WORKERS)
