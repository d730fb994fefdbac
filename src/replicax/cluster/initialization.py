"""``initialize_workers``: connects the processes that run one program, as a resolver or the environment describes."""

from __future__ import annotations

import math
import os
import time

import jax

from replicax import _jax
from replicax.argument_checks import is_number
from replicax.cluster.preflight import bind_address, run_preflight
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.simple import SimpleClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.tf_config import VARIABLE, TFConfigClusterResolver
from replicax.cluster.worker_group import WorkerGroup, detected_group, group_from_environment, group_of
from replicax.system.addresses import host_and_port
from replicax.system.environment import environment_values

DEFAULT_TIMEOUT = 300.0
"""How many seconds workers wait for each other at the start, by default."""
_AFTER_PREFLIGHT = 30.0
"""How many seconds JAX has, at least, to connect workers that are all there, as the preflight check has found."""


def initialize_workers(
    cluster_resolver: ClusterResolver | None = None, timeout_seconds: float | None = DEFAULT_TIMEOUT
) -> None:
    """Connect this process to the others that run the same program: ``jax.distributed.initialize``, with the cluster.

    :class:`MultiWorkerMirroredStrategy` calls it. Call it yourself, at the top of the program, if devices are needed
    before the strategy is made. A second call does nothing, and neither does one for a process that is alone.

    The cluster is that of ``cluster_resolver``. Without one it is the first of these that exists: that of
    ``TF_CONFIG``; that of ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``; the one that JAX
    detects, on Slurm, Open MPI, Kubernetes and Cloud TPU. Worker 0 is the task ``"chief"``, or else ``"worker"`` 0, and
    the workers connect to its address, or to ``JAX_COORDINATOR_ADDRESS``. It listens on that address only, if that is
    this machine's. ``replicax launch`` sets these variables.

    Args:
      cluster_resolver: describes the cluster, and says which task this process is.
      timeout_seconds: how many seconds to wait for the other workers. ``None`` for ever.

    Raises:
      ValueError: the cluster is described wrongly, or in two ways: JAX has been initialized with another number of
        workers or as another one; ``TF_CONFIG`` and JAX's variables differ; the task is not a worker.
      TypeError: ``cluster_resolver`` is not a resolver.
      RuntimeError: JAX has made its devices already; the coordinator's port is in use; two processes are the same
        worker.
      TimeoutError: the coordinator can't be reached, or workers are missing; the message names them.

    >>> import replicax
    >>> replicax.initialize_workers()  # nothing tells of other processes
    """
    if timeout_seconds is not None and not (is_number(timeout_seconds) and timeout_seconds > 0):
        raise ValueError(f"timeout_seconds must be a positive number or None, got {timeout_seconds!r}")
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a replicax.cluster.ClusterResolver, got {cluster_resolver!r}; for a "
            "cluster that the program knows: replicax.cluster.SimpleClusterResolver"
        )
    told = group_from_environment() if cluster_resolver is None else group_of(cluster_resolver)
    if _jax.coordination_client() is not None:
        _check_agrees(told)
        return
    seconds = math.inf if timeout_seconds is None else timeout_seconds
    if told is None and cluster_resolver is None and not _jax.backends_are_initialized():
        told = detected_group(seconds)
    if told is None or told.count == 1:
        return
    if _jax.backends_are_initialized():
        raise RuntimeError(
            f"this process is {told.name_of(told.index)} of {told.count} ({told.source}), and JAX has made its devices "
            "already, so that it can't reach the others any more: make the strategy, or call "
            "replicax.initialize_workers(), at the top of the program, before any array is made and before "
            "jax.devices() is called"
        )
    _connect(told, seconds)


def resolver_of_this_process() -> ClusterResolver:
    """The resolver for a process whose caller gave none: ``TF_CONFIG``, or what JAX knows."""
    if os.environ.get(VARIABLE, "").strip():
        return TFConfigClusterResolver()
    return SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=_jax.process_index_and_count()[0])


def _connect(group: WorkerGroup, seconds: float) -> None:
    started = time.monotonic()
    bind = bind_address(group)
    run_preflight(group, bind, started + min(seconds, 1e9))
    left = max(_AFTER_PREFLIGHT, min(seconds, 1e6) - (time.monotonic() - started))
    # The workers have reached the coordinator without a proxy. JAX's client would take one, and JAX warns of it.
    jax.config.update("jax_check_proxy_envs", False)
    with environment_values({"no_grpc_proxy": host_and_port(group.coordinator, "the coordinator")[0]}):
        jax.distributed.initialize(
            group.coordinator,
            num_processes=group.count,
            process_id=group.index,
            coordinator_bind_address=bind,
            initialization_timeout=math.ceil(left),
            # The cluster that JAX detects determines a process' devices, too; don't use it for another cluster.
            cluster_detection_method=None if group.is_detected else "deactivate",
        )


def _check_agrees(told: WorkerGroup | None) -> None:
    """Raise if JAX has been initialized for another worker or cluster than ``told``."""
    index, count = _jax.process_index_and_count()
    if told is not None and (told.index, told.count) != (index, count):
        raise ValueError(
            f"{told.source} says that this process (pid {os.getpid()}) is worker {told.index} of {told.count}, and "
            f"jax.distributed.initialize was called for worker {index} of {count}. Leave that call out, as the "
            "strategy makes it, or give it the same cluster; workers are numbered with the "
            "chief first, and then the tasks of the job 'worker'"
        )
