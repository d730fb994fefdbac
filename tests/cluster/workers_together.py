"""What processes do that find their cluster in the environment: ``python -m tests.cluster.workers_together WHAT``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

import replicax


def summed() -> Any:
    """The sum over all replicas of their numbers, and who this is; connected by the strategy."""
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=30)
    numbers = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1.0)
    workers = strategy.extended.workers
    task = [strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id]
    return [float(strategy.reduce("sum", numbers)), workers.index, workers.count, *task]


def devices_first() -> Any:
    """Devices, a strategy by a resolver, and then again what disagrees with it."""
    resolver = replicax.cluster.TFConfigClusterResolver()
    replicax.initialize_workers(resolver, timeout_seconds=30)
    replicax.initialize_workers()
    seen = len(jax.devices())
    strategy = replicax.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    same = strategy.cluster_resolver is resolver
    other = replicax.cluster.SimpleClusterResolver(
        replicax.cluster.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]}),
        task_type="worker",
        task_id=2,
    )
    return [seen, same, resolver.num_accelerators("worker", 0), _error(lambda: replicax.initialize_workers(other))]


def too_late() -> Any:
    jax.devices()
    return _error(replicax.MultiWorkerMirroredStrategy)


def refused() -> Any:
    return _error(lambda: replicax.initialize_workers(timeout_seconds=20))


def _error(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    print("answer:", json.dumps(globals()[sys.argv[1]]()), flush=True)
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
