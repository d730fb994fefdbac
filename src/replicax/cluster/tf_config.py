"""``TFConfigClusterResolver``: the cluster that the environment variable TF_CONFIG describes."""

from __future__ import annotations

import json
import os
from typing import Any

from replicax.argument_checks import as_integer
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.errors import few, shortened
from replicax.system.addresses import host_and_port
from replicax.system.json_files import parsed

VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["node0:2222", "node1:2222"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable ``TF_CONFIG`` describes; read when the resolver is created.

    It is JSON: the addresses of each job's tasks, and the task of this process. ``replicax launch``, Kubeflow and
    others set it. If it is not set, empty or ``{}``, the cluster is empty, and a strategy for several workers has only
    this one.

    Args:
      task_type: replaces the job that ``TF_CONFIG`` names.
      task_id: replaces the index that it names.
      rpc_layer: replaces its ``"rpc_layer"``.
      environment: replaces its ``"environment"``.

    Raises:
      ValueError: ``TF_CONFIG`` is not JSON, or not as above; the message says what is wrong and where.

    >>> import json, os, replicax
    >>> cluster = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}
    >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    >>> resolver = replicax.cluster.TFConfigClusterResolver()
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, '127.0.0.1:2223')
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = _read_variable()
        self._cluster_spec = _cluster(config)
        theirs, index = _task(config)
        task_type = theirs if task_type is None else task_type
        task_id = index if task_id is None else task_id
        super().__init__(task_type, task_id, _text(config, "rpc_layer") if rpc_layer is None else rpc_layer)
        self._environment = (_text(config, "environment") or "") if environment is None else environment
        self._session_master = _text(config, "session_master")
        _check_task(self._cluster_spec, task_type, task_id)

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; ``""`` if there is only one task.

        ``"session_master"`` in ``TF_CONFIG`` takes precedence.

        Args:
          task_type: a job; ``None`` means this process's.
          task_id: a number in the job; ``None`` means this process's.
          rpc_layer: put before the address; ``None`` means the resolver's.

        Raises:
          ValueError: there is no such task.
        """
        if self._session_master is not None:
            return self._session_master
        cluster = self._cluster_spec
        if sum(cluster.num_tasks(job) for job in cluster.jobs) < 2:
            return ""
        return super().master(task_type, task_id, rpc_layer)


def _read_variable() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        config = parsed(text)
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE} is no JSON ({error}): {shortened(text, 200)}. Expected such as {_EXAMPLE}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{VARIABLE} must be a JSON object, got {shortened(text, 200)}. Expected such as {_EXAMPLE}")
    if config and "cluster" not in config:
        raise ValueError(
            f"{VARIABLE} has no 'cluster'; it has {', '.join(map(repr, config))}. Expected such as {_EXAMPLE}. Unset "
            f"{VARIABLE} if this process is alone"
        )
    return config


def _cluster(config: dict[str, Any]) -> ClusterSpec:
    cluster = config.get("cluster", {})
    try:
        spec = ClusterSpec(cluster)
        for job in spec.jobs:
            for index in spec.task_indices(job):
                host_and_port(spec.task_address(job, index), f"the task {job!r} {index}")
    except (TypeError, ValueError) as error:
        message = str(error).removeprefix("ClusterSpec: ")
        raise ValueError(f"{VARIABLE}, 'cluster': {message}. It is {shortened(json.dumps(cluster), 200)}") from error
    return spec


def _task(config: dict[str, Any]) -> tuple[str | None, int | None]:
    task = config.get("task", {})
    if not isinstance(task, dict):
        raise ValueError(
            f'{VARIABLE}, \'task\': expected an object, {{"type": "worker", "index": 0}}; got {json.dumps(task)}'
        )
    kind, index = task.get("type"), task.get("index")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"{VARIABLE}, 'task': 'type' must be the name of a job, such as \"worker\"; got {kind!r}")
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if index is not None and as_integer(index) is None:
        raise ValueError(f"{VARIABLE}, 'task': 'index' must be a whole number, such as 0; got {index!r}")
    return kind, index


def _check_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    if not spec or task_type is None or task_type == "evaluator":  # an evaluator has no address
        return
    if task_type not in spec.jobs:
        raise ValueError(
            f"{VARIABLE}: this process is a task of the job {task_type!r}, and the cluster has the jobs "
            f"{', '.join(map(repr, spec.jobs))} only. Correct 'type' of 'task', or add the job to 'cluster'"
        )
    tasks = spec.task_indices(task_type)
    if task_id is not None and task_id not in tasks:
        raise ValueError(
            f"{VARIABLE}: this process is task {task_id} of the job {task_type!r}, whose {len(tasks)} task(s) are "
            f"{few([*map(str, tasks)], 8) or 'none'}. Correct 'index' of 'task', or add its address to 'cluster'"
        )


def _text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{VARIABLE}, {key!r}: expected a string, got {value!r}")
    return value
