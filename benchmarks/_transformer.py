"""The language model of the benchmarks of memory: a transformer with a tied embedding, in 32-bit numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTH, HEADS, WORDS, LENGTH = 256, 4, 1024, 32
TABLE = WORDS, WIDTH
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "scales": (2, WIDTH),
}
"""Of the parameters of a layer."""
LAYER_BYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())


def model_bytes(layers: int) -> int:
    return layers * LAYER_BYTES + 4 * math.prod(TABLE)


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(layer: Mapping[str, Any], x: Any) -> Any:
    """A layer, whose heads and hidden units may be shared out: ``x`` is ``[sequences, length, width]``."""
    length, width = x.shape[-2:]
    scales = layer["scales"]
    q, k, v = jnp.split((norm(x, scales[0]) @ layer["qkv"]).reshape(-1, length, HEADS, 3 * width // HEADS), 3, axis=3)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), where=jnp.tril(jnp.ones((length, length), bool)))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(norm(x, scales[1]) @ layer["up"]) @ layer["down"]


def losses(table: Any, x: Any, words: Any) -> Any:
    """Of each sequence, from what the layers have made of its words."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, words[:, 1:]).mean(-1)
