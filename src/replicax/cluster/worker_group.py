"""The workers of a cluster that run one program: their number, this process' index, and the coordinator's address."""

from __future__ import annotations

import dataclasses
import os

from replicax import _jax
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.tf_config import VARIABLE, TFConfigClusterResolver
from replicax.system.addresses import host_and_port

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"

_TRAINING = ("chief", "worker")
"""The jobs whose tasks are workers, in the order of their numbers."""
_BESIDE = ("ps", "evaluator")
"""The jobs of ``tf.distribute`` whose tasks do not take part in synchronous training."""


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
    """The workers of one program."""

    coordinator: str  # the address at which worker 0 listens and the others connect; ``""`` if the source has none
    count: int  # the number of workers
    index: int  # of this process
    source: str  # of this description, for errors
    addresses: tuple[str, ...] = ()  # of each worker, by number; may be empty
    is_detected: bool = False  # whether JAX has detected the workers, and so determines this process' devices, too

    def name_of(self, index: int) -> str:
        """The name of a worker in errors."""
        return f"worker {index}" + (f" ({self.addresses[index]})" if self.addresses else "")


def group_of(resolver: ClusterResolver) -> WorkerGroup | None:
    """The workers that a resolver describes; ``None`` if there is no cluster, so that this process is alone.

    Raises a ValueError if it does not say which task this process is, the task is not a worker, or JAX's environment
    variables contradict it.
    """
    source = VARIABLE if isinstance(resolver, TFConfigClusterResolver) else type(resolver).__name__
    cluster = resolver.cluster_spec()
    if not cluster:
        return None
    addresses = worker_addresses(cluster, source)
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        if len(addresses) == 1:
            return None
        raise ValueError(
            f"{source} has a cluster of {len(addresses)} workers, and does not say which of them this process is: "
            f"task_type is {task_type!r} and task_id is {task_id!r}. "
            + ('Add "task": {"type": "worker", "index": 0} to it' if source == VARIABLE else "Set them")
        )
    index = index_of(cluster, task_type, task_id, source)
    return _with_jax_variables(WorkerGroup(addresses[0], len(addresses), index, source, addresses))


def worker_addresses(cluster: ClusterSpec, source: str) -> tuple[str, ...]:
    """The addresses of a cluster's workers, by number: the chief first, then the tasks of the job ``"worker"``.

    Raises a ValueError if there is none, there are several chiefs, a job is unknown, or an address is missing.
    """
    unknown = [job for job in cluster.jobs if job not in (*_TRAINING, *_BESIDE)]
    if unknown:
        raise ValueError(
            f"{source}: the cluster has the unknown job {unknown[0]!r}; expected 'chief' and 'worker', whose tasks "
            "train ('ps' and 'evaluator' are left out). Rename it"
        )
    addresses = []
    for job in _TRAINING:
        if job not in cluster.jobs:
            continue
        tasks = cluster.task_indices(job)
        if job == "chief" and len(tasks) > 1:
            raise ValueError(f"{source}: expected one task of the job 'chief', got {len(tasks)}")
        if tasks != list(range(len(tasks))):
            raise ValueError(
                f"{source}: the tasks {tasks} of the job {job!r} are not all from 0 to {tasks[-1]}: each worker must "
                "know of all"
            )
        addresses += [cluster.task_address(job, i) for i in tasks]
    if not addresses:
        raise ValueError(
            f"{source}: the cluster has no task of the jobs 'chief' and 'worker', which train; it is {cluster!r}"
        )
    return tuple(addresses)


def index_of(cluster: ClusterSpec, task_type: str | None, task_id: int | None, what: str) -> int:
    """The number of the worker that a task is; raises a ValueError if it is not a worker."""
    if task_type in _BESIDE:
        others = "parameter servers" if task_type == "ps" else "evaluators"
        instead = (
            "for parameter servers there is replicax.ParameterServerStrategy, on Ray"
            if task_type == "ps"
            else "evaluate in a program of its own, without a cluster, or in the workers"
        )
        raise ValueError(
            f"{what}: this process is {task_type!r} {task_id}, and training on several workers is synchronous, without "
            f"{others}. Start the tasks of 'chief' and 'worker' only; {instead}"
        )
    if task_type not in _TRAINING or task_type not in cluster.jobs:
        training_jobs = [job for job in _TRAINING if job in cluster.jobs]
        raise ValueError(
            f"{what}: this process is a task of the unknown job {task_type!r}; expected one of "
            f"{', '.join(map(repr, training_jobs))}, which the cluster has"
        )
    count = cluster.num_tasks(task_type)
    if task_id is None or task_id not in cluster.task_indices(task_type):
        raise ValueError(f"{what}: there is no {task_type!r} {task_id}: the cluster has {count}, numbered from 0")
    before = cluster.num_tasks("chief") if task_type == "worker" and "chief" in cluster.jobs else 0
    return before + task_id


def group_from_environment() -> WorkerGroup | None:
    """The workers that this process' environment describes: TF_CONFIG or JAX's variables; ``None`` if neither is set.

    Raises a ValueError if one is wrong, only some of JAX's are set, or they contradict each other.
    """
    if os.environ.get(VARIABLE, "").strip():
        return group_of(TFConfigClusterResolver())
    count, index = _number(COUNT), _number(INDEX)
    if count is None and index is None:
        return None
    coordinator = os.environ.get(COORDINATOR, "")
    values = {COORDINATOR: coordinator or None, COUNT: count, INDEX: index}
    if None in values.values():
        given = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        raise ValueError(
            f"{given} is set, and {' and '.join(name for name, value in values.items() if value is None)} is not: set "
            f"all of {', '.join(values)}, or none"
        )
    assert count is not None
    assert index is not None
    host_and_port(coordinator, COORDINATOR)
    if not index < count:
        raise ValueError(f"{INDEX}={index}: expected a number from 0 to {count - 1}, as {COUNT}={count}")
    return WorkerGroup(coordinator, count, index, f"{COORDINATOR}, {COUNT} and {INDEX}")


def detected_group(timeout_seconds: float) -> WorkerGroup | None:
    """The workers that JAX detects, on Slurm, Open MPI, Kubernetes and Cloud TPU; ``None`` if there are none.

    Raises:
      RuntimeError: JAX detects such a cluster, but fails to read it.
      ValueError: the coordinator has no valid address.
    """
    try:
        detected = _jax.detected_cluster(timeout_seconds)
    except (ValueError, LookupError) as error:
        raise RuntimeError(
            f"JAX detects a cluster, such as that of Slurm or Open MPI, but fails to read its variables "
            f"({type(error).__name__}: {error}): correct them, or set {COORDINATOR}, {COUNT} and {INDEX}"
        ) from error
    if detected is None:
        return None
    source, from_environment = f"the {detected.name} that JAX finds", os.environ.get(COORDINATOR)
    coordinator = from_environment or detected.coordinator
    host_and_port(coordinator, COORDINATOR if from_environment else source)
    return WorkerGroup(coordinator, detected.count, detected.index, source, is_detected=True)


def _with_jax_variables(group: WorkerGroup) -> WorkerGroup:
    """The group with the coordinator that JAX's variable names; raises if the other variables don't agree with it."""
    for variable, ours, what in ((COUNT, group.count, "workers"), (INDEX, group.index, "as this worker's number")):
        theirs = _number(variable)
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"{group.source} says {ours} {what}, and {variable} says {theirs}. Workers are numbered with the chief "
                "first, and then the tasks of the job 'worker'. Unset one of the two, or make them agree"
            )
    if coordinator := os.environ.get(COORDINATOR):
        host_and_port(coordinator, COORDINATOR)
        source = group.source if coordinator == group.coordinator else f"{group.source} and {COORDINATOR}"
        return dataclasses.replace(group, coordinator=coordinator, source=source)
    return group


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    least = 1 if variable == COUNT else 0
    if text and not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{variable}={text}: expected a whole number, {least} or more")
    return int(text) if text else None
