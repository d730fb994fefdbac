"""``KubernetesClusterResolver``: the running pods with certain labels."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.argument_checks import parse_enum
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.system.addresses import join_address

_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation that an indexed Job gives each of its pods."""


class KubernetesExecutableLocation(enum.Enum):
    """The place where the program runs, which determines how it reaches the cluster's API.

    >>> import replicax
    >>> replicax.cluster.KubernetesExecutableLocation("off_cluster")  # with a kubeconfig file
    <KubernetesExecutableLocation.OFF_CLUSTER: 'off_cluster'>
    """

    WITHIN_CLUSTER = "within_cluster"
    OFF_CLUSTER = "off_cluster"


class KubernetesClusterResolver(ClusterResolver):
    """The running pods with certain labels, as the Kubernetes API lists them at each call.

    You do not need it to train in an indexed Job or a JobSet: without a resolver JAX finds the pods. This resolver is
    for pods of several Jobs, or of none.

    The tasks of a job are its pods in the order of their completion indices, where all have one, and otherwise of
    their names, with numbers as numbers. The task of this process is that of the pod with the name in the environment
    variable ``HOSTNAME``; where that is not a pod's name, set ``task_type`` and ``task_id``.

    Args:
      job_to_label_mapping: by the name of a job, the label selectors of its pods:
        ``{"worker": ["job-name=digits"]}``.
      tf_server_port: the port of every task; that of the chief has to be free.
      rpc_layer: the prefix of the addresses that :meth:`master` returns.
      override_client: a ``kubernetes.client.CoreV1Api`` to use; ``None`` makes one as ``executable_location``
        requires.
      executable_location: whether the program runs in a pod, or outside with a ``kubeconfig`` file.
      namespace: where to look for pods; ``None`` means all namespaces, which requires the right to list them.

    Raises:
      ImportError: the package ``kubernetes`` is not installed, and no client is given.
      ValueError: ``job_to_label_mapping`` is empty, or ``executable_location`` unknown.
      TypeError: the selectors are not lists of strings.

    >>> from types import SimpleNamespace as Some  # instead of the client: a list of one pod
    >>> import replicax
    >>> metadata = Some(name="digits-0", namespace="default", annotations=None)
    >>> pods = [Some(metadata=metadata, status=Some(phase="Running", pod_ip="10.0.0.7"))]
    >>> client = Some(list_pod_for_all_namespaces=lambda label_selector: Some(items=pods))
    >>> resolver = replicax.cluster.KubernetesClusterResolver({"worker": ["job-name=digits"]}, override_client=client)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.7:8470']})
    """

    _environment = "kubernetes"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]],
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation | str = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._selectors = _checked_mapping(job_to_label_mapping)
        self._port = tf_server_port
        self._namespace = namespace
        location = parse_enum(KubernetesExecutableLocation, executable_location, "executable_location")
        self._client = _client(location) if override_client is None else override_client

    def cluster_spec(self) -> ClusterSpec:
        """The present pods.

        Raises:
          RuntimeError: a pod is not running, or there is none for a job; the message names it.
        """
        return ClusterSpec(
            {job: [join_address(pod.status.pod_ip, self._port) for pod in pods] for job, pods in self._pods().items()}
        )

    def _own_task(self) -> tuple[str | None, int | None]:
        name = os.environ.get("HOSTNAME")
        for job, pods in self._pods().items():
            for index, pod in enumerate(pods):
                if pod.metadata.name == name:
                    return job, index
        return None, None

    def _pods(self) -> dict[str, list[Any]]:
        return {job: self._of_job(job, selectors) for job, selectors in self._selectors.items()}

    def _of_job(self, job: str, selectors: Sequence[str]) -> list[Any]:
        pods: dict[tuple[str, str], Any] = {}
        for selector in selectors:
            if self._namespace is None:
                listed = self._client.list_pod_for_all_namespaces(label_selector=selector)
            else:
                listed = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
            for pod in _in_order(listed.items):
                pods.setdefault((pod.metadata.namespace, pod.metadata.name), pod)
        where = "any namespace" if self._namespace is None else f"the namespace {self._namespace!r}"
        if not pods:
            raise RuntimeError(
                f"KubernetesClusterResolver: no pod in {where} has the labels of the job {job!r}, {list(selectors)}. "
                f"Look for them: kubectl get pods --selector {selectors[0]}"
            )
        for pod in pods.values():
            if pod.status.phase != "Running" or not pod.status.pod_ip:
                raise RuntimeError(
                    f"KubernetesClusterResolver: the pod {pod.metadata.name!r} of the job {job!r} is not running; its "
                    f"phase is {pod.status.phase!r}. Try again when all pods run, or delete those that are over"
                )
        return list(pods.values())


def _checked_mapping(mapping: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    expected = "expected {'worker': ['job-name=digits']}, label selectors by the name of a job"
    if not isinstance(mapping, Mapping) or any(isinstance(selectors, str) for selectors in mapping.values()):
        raise TypeError(f"KubernetesClusterResolver: job_to_label_mapping={mapping!r}; {expected}")
    selectors = {job: list(selectors) for job, selectors in mapping.items()}
    if not selectors or not all(selectors.values()):
        raise ValueError(f"KubernetesClusterResolver: job_to_label_mapping={mapping!r} has no selector; {expected}")
    return selectors


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package kubernetes: pip install kubernetes. Or pass override_client"
        ) from error
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()


def _in_order(pods: Sequence[Any]) -> list[Any]:
    indices = [str((pod.metadata.annotations or {}).get(_COMPLETION_INDEX)) for pod in pods]
    if all(index.isdigit() for index in indices):
        return [pods[i] for i in sorted(range(len(pods)), key=lambda i: int(indices[i]))]
    return sorted(pods, key=lambda pod: _natural(pod.metadata.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts ``"pod-10"`` after ``"pod-9"``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
