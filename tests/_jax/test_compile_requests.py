"""What JAX hands to a compiler, caught: another process could compile it."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import TPUClusterResolver, _jax


def test_a_request_is_what_jax_would_compile(tmp_path) -> None:
    devices = TPUClusterResolver(topology="v5e:2x2").devices.ravel()
    split = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    lowered = jax.jit(lambda x: jnp.tanh(x) @ x.T, donate_argnums=0).lower(
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)
    )
    request = pickle.loads(pickle.dumps(_jax.compile_request(lowered, {"xla_dump_to": str(tmp_path)})))
    assert request.devices == tuple(d.id for d in devices)
    assert str(tmp_path).encode() in request.options
    size = _jax.compile_for(request, list(devices))
    assert size == lowered.compile().memory_analysis().generated_code_size_in_bytes > 0
    assert isinstance(lowered.compile(), jax.stages.Compiled)  # it is as it was
