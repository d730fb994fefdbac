"""A process that keeps compiled programs on disk, for ``test_operations.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import replicax


def run(folder: str) -> list[float]:
    """What a step returns of each replica; its programs go to ``folder``, or come from there."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    pair = replicax.MirroredStrategy()
    x = pair.distribute_values_from_function(lambda ctx: jnp.ones(3) * ctx.replica_id_in_sync_group)
    options = replicax.RunOptions(executor="per_replica")
    found = pair.run(lambda x: jnp.sin(x) + x @ x, args=(x,), options=options)
    return [float(value[0]) for value in pair.local_results(found)]
