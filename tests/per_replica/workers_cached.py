"""A process that keeps compiled programs on disk, for ``test_operations.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import replicax
from replicax.per_replica.eager import operations


def run(folder: str) -> tuple[list[list[float]], int]:
    """What a step returns of each replica, compiled into ``folder`` and read from there; how often JAX found some."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    pair = replicax.MirroredStrategy()
    x = pair.distribute_values_from_function(lambda ctx: jnp.ones(3) * ctx.replica_id_in_sync_group)
    options = replicax.RunOptions(executor="per_replica")
    found: list[list[float]] = []
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    for _ in range(2):
        jax.clear_caches()
        for kept in (operations._programs, operations._calls):
            kept.clear()  # as in another process
        result = pair.run(lambda x: jnp.sin(x) + x @ x, args=(x,), options=options)
        found.append([float(value[0]) for value in pair.local_results(result)])
    return found, events.count("/jax/compilation_cache/cache_hits")
