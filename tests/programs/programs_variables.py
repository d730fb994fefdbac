"""Programs whose shared arguments are Replicax variables, and plain arrays in the reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.programs import integers, normal, program, together, weights

Array = jax.Array


@program("TM", normal(5, 3), shared=weights((3, 3), (3,)), variables=True)
def variables_in_the_body_of_scan(x: Array, w: Any, b: Any) -> Any:
    def body(carry: Any, row: Array) -> Any:
        h, fixed = carry
        return (jnp.tanh(h @ w + row * b), jnp.tanh(fixed + b)), None

    (h, fixed), _ = lax.scan(body, (jnp.zeros(3), jnp.zeros(3)), x)
    return h, fixed


@program("TTM", normal(2, 3), shared=weights((3, 3), (3,)), variables=True)
def variables_in_a_jitted_helper(x: Array, w: Any, b: Any) -> Any:
    @jax.jit
    def layer(h: Array) -> Array:
        return jnp.tanh(h @ w + b[None])

    @jax.jit
    def from_arguments(h: Array, w: Array, b: Array) -> Array:
        return h @ w + b[None]

    return layer(layer(x)), from_arguments(x, w, b), layer(jnp.ones((1, 3)))


@program("TM", normal(2, 3), shared=weights((3, 3), (3, 3)), variables=True)
def variables_in_checkpointed_layers(x: Array, w1: Any, w2: Any) -> Any:
    @jax.checkpoint
    def first(h: Array) -> Array:
        return jnp.tanh(h @ w1)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def second(h: Array) -> Array:
        return first(h) @ w2

    gradient = jax.grad(lambda h: second(h).sum())(jnp.ones((1, 3)))
    return second(x), gradient


@program("TTM", normal(4), shared=weights((4,), (4,)), variables=True)
def variables_in_branches_and_loops(x: Array, a: Any, b: Any) -> Any:
    chosen = lax.cond(x[0] > 0, lambda: a * 2, lambda: b + 0.0)
    halved = lax.while_loop(lambda v: jnp.abs(v).sum() > jnp.abs(a).sum() * 0.5, lambda v: v * 0.5 * b, x)
    return chosen, halved, lax.fori_loop(0, 3, lambda i, v: v * b + a, jnp.zeros(4))


@program("TTM", normal(4, 3), shared=weights((3,), (4, 3)), variables=True)
def variables_under_vmap_and_as_inputs_of_loops(x: Array, w: Any, rows: Any) -> Any:
    mapped = jax.vmap(lambda row: (row * w).sum())(x)
    carry, products = lax.scan(lambda c, r: (c + r[0], r[0] * r[1]), w, (rows, x))
    return mapped, products, carry


@program(
    "TTTM", normal(2, 3), shared=lambda: ({"w": weights((3, 2))()[0], "b": np.zeros(2, np.float32)},), variables=True
)
def variables_in_a_pytree(x: Array, params: Any) -> Any:
    def loss(params: Any) -> Array:
        return jnp.square(x @ params["w"] + params["b"][None]).mean()

    value, gradients = jax.value_and_grad(loss)(jax.tree.map(lambda v: v * 1.0, params))
    return value, gradients, sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


@program("TTM", together(ids=integers(0, 5, 3), x=normal(3, 2)), shared=weights((5, 2), (2,)), variables=True)
def variables_indexed_and_operated_on(data: Any, table: Any, scale: Any) -> Any:
    rows = table[data["ids"]] * scale[None] - 2.0 / (1.0 + jnp.abs(data["x"]))
    return rows, -(scale**2) @ data["x"].T, table.T @ table + jnp.exp(table.sum())


@program("TT", normal(3), shared=lambda: (jax.random.key(1), np.int32(3)), variables=True)
def variables_that_are_keys_and_counters(x: Array, key: Any, count: Any) -> Any:
    noise = jax.random.normal(jax.random.fold_in(jnp.asarray(key), count + 1), (3,))
    return x + noise, jnp.where(count > 2, x, noise)


@program("TM", normal(3), shared=weights((3,)), variables=True)
def variables_in_callbacks(x: Array, a: Any) -> Any:
    kind = jax.ShapeDtypeStruct((3,), jnp.float32)

    def host(u: Any, v: Any) -> Any:
        return np.asarray(u) * np.asarray(v)

    return jax.pure_callback(host, kind, x, a), jax.pure_callback(host, kind, a, a)


@program("TM", normal(2, 4), shared=weights((4, 4), (4,)), variables=True)
def variables_in_custom_rules(x: Array, w: Any, b: Any) -> Any:
    @jax.custom_jvp
    def f(h: Array, w: Array) -> Array:
        return jnp.tanh(h @ w)

    @f.defjvp
    def f_jvp(primals: Any, tangents: Any) -> Any:
        y = f(*primals)
        return y, (1 - y**2) * (tangents[0] @ primals[1] + primals[0] @ tangents[1])

    return f(x, w), jax.grad(lambda b: f(b[None], jnp.eye(4)).sum())(b + 0.0)
