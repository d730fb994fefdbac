"""Models written in plain JAX: layers, recurrences, attention, routing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.programs import integers, normal, program, together, weights

Array = jax.Array


def _dense(h: Array, w: Array) -> Array:
    return h @ w


def _cross_entropy(logits: Array, labels: Array) -> Array:
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, labels[:, None], axis=-1).mean()


@program("TTTT", together(x=normal(4, 3), y=integers(0, 5, 4)), shared=weights((3, 6), (6,), (6, 5)))
def a_multilayer_perceptron(batch: Any, w1: Array, b1: Array, w2: Array) -> Any:
    def loss(w1: Array, b1: Array, w2: Array) -> Array:
        return _cross_entropy(jax.nn.gelu(_dense(batch["x"], w1) + b1[None]) @ w2, batch["y"])

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(w1, b1, w2)


@program("TTM", normal(2, 4, 6), shared=weights((6, 18)))
def causal_attention(x: Array, w: Array) -> Any:
    def attend(w: Array, x: Array) -> Array:
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 6**0.5
        mask = jnp.tril(jnp.ones((4, 4), bool))
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(mask[None], scores, -1e9)), v)

    mask = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 4), bool)), 0.0, -1e9))
    return attend(w, x), jax.grad(lambda w: attend(w, x).sum())(w), mask


@program("T", together(x=normal(2, 4, 6), length=integers(1, 5, 2)))
def attention_over_sequences_of_some_length(batch: Any) -> Any:
    heads = batch["x"].reshape(2, 4, 2, 3)
    mask = jnp.arange(4)[None, :] < batch["length"][:, None]
    return jax.nn.dot_product_attention(heads, heads, heads, mask=mask[:, None, None, :])


@program("TTTT", normal(5, 2, 3), shared=weights((3, 16), (4, 16)))
def lstm_by_scan(x: Array, wx: Array, wh: Array) -> Any:
    def loss(wx: Array, wh: Array) -> Any:
        def cell(carry: Any, row: Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ wx + h @ wh, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((2, 4))  # the same on every replica, until the first row comes in
        (h, c), hs = lax.scan(cell, (zeros, zeros), x)
        return (hs**2).mean(), h + c

    (value, last), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(wx, wh)
    return value, last, *gradients


@program("TTT", normal(6, 4), shared=weights((4, 3), (3, 4, 4)))
def experts_chosen_by_a_router(x: Array, router: Array, experts: Array) -> Any:
    def loss(router: Array, experts: Array) -> Any:
        gates = jax.nn.softmax(x @ router)
        top, chosen = lax.top_k(gates, 2)
        combine = (jax.nn.one_hot(chosen, 3) * top[..., None]).sum(1)
        outputs = jnp.einsum("bd,edf->bef", x, experts)
        load = gates.mean(0)
        return jnp.einsum("be,bef->bf", combine, outputs).sum() + (load**2).sum(), load

    gradients, load = jax.grad(loss, argnums=(0, 1), has_aux=True)(router, experts)
    return *gradients, load


@program("TTMT", normal(3, 4), shared=weights((2, 4, 12), (2, 4, 4), (2, 4)))
def checkpointed_transformer_layers_by_scan(x: Array, qkv: Array, out: Array, scale: Array) -> Any:
    def norm(h: Array, scale: Array) -> Array:
        return h * lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)[None]

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(h: Array, params: Any) -> Any:
        qkv, out, scale = params
        q, k, v = jnp.split(norm(h, scale) @ qkv, 3, axis=-1)
        return h + jax.nn.softmax(q @ k.T / 2) @ v @ out, (scale**2).sum()

    def loss(params: Any) -> Any:
        h, sizes = lax.scan(layer, x, params)
        return (h**2).mean(), sizes

    (value, sizes), gradients = jax.value_and_grad(loss, has_aux=True)((qkv, out, scale))
    return value, gradients[0], sizes, gradients[2]


@program("TM", normal(5, 2), shared=weights((3, 2)))
def nearest_centroids_until_nothing_moves(x: Array, start: Array) -> Any:
    def distances(points: Array, centres: Array) -> Array:
        return ((points[:, None] - centres[None]) ** 2).sum(-1)

    def move(centres: Array) -> Array:
        chosen = jax.nn.one_hot(distances(x, centres).argmin(1), 3)
        return (chosen.T @ x) / jnp.maximum(chosen.sum(0), 1.0)[:, None]

    def body(carry: Any) -> Any:
        return carry[1], move(carry[1]), carry[2] + 1

    def going(carry: Any) -> Array:
        return (jnp.abs(carry[0] - carry[1]).max() > 1e-6) & (carry[2] < 10)

    return lax.while_loop(going, body, (start, move(start), 0))[1], distances(start, start)
