"""The three models as functions of JAX, which Replicax and the hand-written programs share.

Each takes the parameters by name and one replica's examples, and gives the loss of each example: ``float32[examples]``.
The CNN pools in one of two ways. ``lax.reduce_window`` is what libraries have; on CPUs its gradient is slow in plain
JAX, so somebody who writes by hand takes the other one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax import lax

from benchmarks.peers import problems

Params = Mapping[str, Any]


def mlp(params: Params, x: Any, labels: Any) -> Any:
    """See :func:`benchmarks.peers.problems.mlp`."""
    for i in range(len(problems.MLP_SIZES) - 1):
        x = _dense(params, f"dense{i}", jax.nn.relu(x) if i else x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels)


def windowed(x: Any) -> Any:
    """The largest of 2×2, as libraries pool."""
    return lax.reduce_window(x, -math.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def reshaped(x: Any) -> Any:
    """The same without windows. Its gradient divides among equal elements."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def cnn(params: Params, x: Any, labels: Any, pooled: Callable[[Any], Any] = windowed) -> Any:
    """See :func:`benchmarks.peers.problems.cnn`."""
    for i in range(2):
        kernel, bias = params[f"conv{i}.kernel"], params[f"conv{i}.bias"]
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = pooled(jax.nn.relu(x + bias))
    x = jax.nn.relu(_dense(params, "dense0", x.reshape(len(x), -1)))
    return optax.softmax_cross_entropy_with_integer_labels(_dense(params, "dense1", x), labels)


def transformer(params: Params, tokens: Any, labels: Any) -> Any:
    """See :func:`benchmarks.peers.problems.transformer`."""
    x = params["tokens"][tokens] + params["positions"]
    for i in range(problems.LAYERS):
        y = _norm(params, f"{i}.norm0", x)
        q, k, v = (jax.numpy.einsum("btd,dhe->bthe", y, params[f"{i}.{name}"]) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jax.numpy.einsum("bthe,hed->btd", attended, params[f"{i}.out"])
        y = jax.nn.gelu(_dense(params, f"{i}.up", _norm(params, f"{i}.norm1", x)))
        x = x + _dense(params, f"{i}.down", y)
    logits = _norm(params, "norm", x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(-1)


LOSSES: dict[str, Callable[..., Any]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
BY_HAND = {**LOSSES, "cnn": functools.partial(cnn, pooled=reshaped)}


def adam() -> optax.GradientTransformation:
    """The optimizer of all three."""
    return optax.adam(problems.LEARNING_RATE, problems.BETA_1, problems.BETA_2, problems.EPSILON)


def _dense(params: Params, name: str, x: Any) -> Any:
    return x @ params[f"{name}.kernel"] + params[f"{name}.bias"]


def _norm(params: Params, name: str, x: Any) -> Any:
    normalized = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + problems.NORM_EPSILON)
    return normalized * params[f"{name}.scale"] + params[f"{name}.bias"]
