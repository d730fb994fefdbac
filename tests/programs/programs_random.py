"""Random numbers keyed for all and keyed for each replica, and calls of the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import replicax
from tests.programs.programs import by_replica, normal, program, weights

Array = jax.Array


def _replica_id() -> Any:
    return replicax.get_replica_context().replica_id_in_sync_group


def _dropout(key: Array, x: Array, rate: float = 0.5) -> Array:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0.0)


# --- random numbers -------------------------------------------------------------------------------------


@program("MT", normal(4))
def a_constant_key(x: Array) -> Any:
    key = jax.random.key(3)
    return jax.random.normal(key, (4,)), _dropout(key, x)


def _noise_of(replica: Any, x: Array, key: Array) -> Any:
    mine = jax.random.fold_in(key, replica)
    return jax.random.normal(mine, (4,)), _dropout(mine, jnp.ones(16)), _dropout(mine, x), _dropout(key, jnp.ones(4))


@program("TTTM", normal(4), shared=lambda: (jax.random.key(5),), across=by_replica(_noise_of))
def dropout_keyed_for_each_replica(x: Array, key: Array) -> Any:
    return _noise_of(_replica_id(), x, key)


def _keys_of(replica: Any, x: Array, key: Array) -> Any:
    mine = jax.random.fold_in(key, replica)
    first, *rest = jax.random.split(key, 3)
    return mine, jax.random.split(mine, 2), first, rest, jax.random.key_data(mine), jax.random.PRNGKey(1), x


@program("TTMMMTMT", normal(2), shared=lambda: (jax.random.key(6),), across=by_replica(_keys_of))
def keys_as_results(x: Array, key: Array) -> Any:
    return _keys_of(_replica_id(), x, key)


@program("MTM", normal(3, 4), shared=lambda: (jax.random.key(7),))
def a_key_carried_through_scan(x: Array, key: Array) -> Any:
    def body(key: Array, row: Array) -> Any:
        key, used = jax.random.split(key)
        return key, (_dropout(used, row), jax.random.uniform(used))

    last, (rows, numbers) = lax.scan(body, key, x)
    return last, rows, numbers


@program("TTM", normal(6), shared=lambda: (jax.random.key(9),))
def choices_and_permutations(x: Array, key: Array) -> Any:
    order = jax.random.permutation(key, 6)
    return jax.random.categorical(key, x, shape=(20,)), x[order], order


def _reparametrised(replica: Any, x: Array, w: Array, key: Array) -> Any:
    def loss(w: Array) -> Array:
        mean, spread = jnp.split(x @ w, 2, axis=-1)
        noise = jax.random.normal(jax.random.fold_in(key, replica), mean.shape)
        return jnp.square(mean + jnp.exp(0.1 * spread) * noise).mean() + 0.5 * (mean**2 - spread).mean()

    return jax.value_and_grad(loss)(w)


@program("TT", normal(4, 3), shared=lambda: (*weights((3, 4))(), jax.random.key(2)), across=by_replica(_reparametrised))
def gradient_through_noise(x: Array, w: Array, key: Array) -> Any:
    return _reparametrised(_replica_id(), x, w, key)


# --- the host -------------------------------------------------------------------------------------------


@program("TMT", normal(4), shared=weights((4,)))
def pure_callback(x: Array, a: Array) -> Any:
    def host(v: Any) -> Any:
        return np.sort(np.asarray(v)) * np.float32(2)

    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    rows = jax.vmap(lambda v: jax.pure_callback(host, kind, v, vmap_method="sequential"))(jnp.stack([x, a]))
    return jax.pure_callback(host, kind, x), jax.pure_callback(host, kind, a), rows


@program("TTM", normal(3, 2))
def pure_callback_with_a_derivative_in_scan(x: Array) -> Any:
    def host(v: Any) -> Any:
        return np.tanh(np.asarray(v))

    @jax.custom_vjp
    def tanh(v: Array) -> Array:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    def forward(v: Array) -> Any:
        y = tanh(v)
        return y, y

    tanh.defvjp(forward, lambda y, g: (g * (1 - y * y),))

    def loss(x: Array) -> Array:
        return lax.scan(lambda c, row: (tanh(c + row), None), jnp.zeros(2), x)[0].sum()

    return *jax.value_and_grad(loss)(x), tanh(jnp.ones(2))


@program("TT", normal(2), differ=False)
def io_callback_answers_each_replica_by_itself(x: Array) -> Any:
    def host(v: Any) -> Any:
        return np.asarray(v) + np.float32(1)

    kind = jax.ShapeDtypeStruct((2,), jnp.float32)
    return io_callback(host, kind, x), io_callback(host, kind, jnp.ones(2))


@program("TM", normal(3, 2))
def prints_in_loops_and_branches(x: Array) -> Any:
    def body(carry: Array, row: Array) -> Any:
        jax.debug.callback(lambda v: None, row)
        lax.cond(row[0] > 0, lambda: jax.debug.callback(lambda: None), lambda: None)
        return carry + row, None

    jax.debug.print("", ordered=False)
    return lax.scan(body, jnp.zeros(2), x)[0], jnp.ones(2)
