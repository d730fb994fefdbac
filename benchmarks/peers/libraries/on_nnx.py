"""Flax NNX: objects replicated over a mesh, a batch that is split over it, and a step of all of it in ``nnx.jit``.

The compiler finds out which gradients are to be summed.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import problems
from benchmarks.peers.libraries import jax_models
from benchmarks.peers.libraries.on_jax import use_devices
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem


def train(problem: Problem, replicas: int) -> Training:
    """``nnx.jit``, with the batch on the devices already."""
    use_devices(replicas)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, along = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = MODELS[problem.name](rngs=nnx.Rngs(0))
    _set(model, problem)
    optimizer = nnx.Optimizer(model, jax_models.adam(), wrt=nnx.Param)
    objects = (model, optimizer)
    nnx.update(objects, jax.device_put(nnx.state(objects), everywhere))
    batch = jax.device_put((problem.inputs, problem.labels), along)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    # What Flax' guide to performance has for steps that are called again and again.
    cached = nnx.cached_partial(step, model, optimizer)

    def steps(n: int) -> float:
        for _ in range(n):
            loss = cached(*batch)
        return float(loss)

    return Training(sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))), steps)


class MLP(nnx.Module):
    """See :func:`benchmarks.peers.problems.mlp`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = problems.MLP_SIZES
        self.dense = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x: Any) -> Any:
        for i, layer in enumerate(self.dense):
            x = layer(nnx.relu(x) if i else x)
        return x


class CNN(nnx.Module):
    """See :func:`benchmarks.peers.problems.cnn`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        channels = problems.CNN_CHANNELS
        flat = (problems.IMAGE // 4) ** 2 * channels[-1]
        convolutions = itertools.pairwise(channels)
        self.conv = nnx.List([nnx.Conv(a, b, (3, 3), padding="SAME", rngs=rngs) for a, b in convolutions])
        sizes = (flat, problems.CNN_HIDDEN), (problems.CNN_HIDDEN, problems.CLASSES)
        self.dense = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in sizes])

    def __call__(self, x: Any) -> Any:
        for layer in self.conv:
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
        return self.dense[1](nnx.relu(self.dense[0](x.reshape(len(x), -1))))


class Block(nnx.Module):
    """A layer of the transformer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        width, hidden = problems.WIDTH, problems.HIDDEN
        self.norm0, self.norm1 = (nnx.LayerNorm(width, epsilon=problems.NORM_EPSILON, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(problems.HEADS, width, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, hidden, rngs=rngs), nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.norm0(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm1(x))))


class Transformer(nnx.Module):
    """See :func:`benchmarks.peers.problems.transformer`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        width = problems.WIDTH
        self.tokens = nnx.Embed(problems.VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((problems.LENGTH, width)))
        self.blocks = nnx.List([Block(rngs) for _ in range(problems.LAYERS)])
        self.norm = nnx.LayerNorm(width, epsilon=problems.NORM_EPSILON, rngs=rngs)
        self.head = nnx.Linear(width, problems.VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, mask = self.tokens(tokens) + self.positions[...], nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}


def _set(model: Any, problem: Problem) -> None:
    """Give the model's parameters the values that all peers begin with."""
    for name, value in problem.initial.items():
        target = model
        for part in _path(name):
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        assert target.shape == value.shape, name
        target[...] = jnp.array(value)


def _path(name: str) -> list[str]:
    """Where a parameter is: ``0.query`` is ``blocks.0.attention.query.kernel``, ``dense1.bias`` is ``dense.1.bias``."""
    first, *rest = name.split(".")
    if first.isdigit():
        if rest[0] in ("query", "key", "value", "out"):
            return ["blocks", first, "attention", rest[0], "kernel"]
        return ["blocks", first, *rest]
    if first[:-1] in ("dense", "conv"):
        return [first[:-1], first[-1], *rest]
    return {"tokens": ["tokens", "embedding"], "head": ["head", "kernel"]}.get(first, [first, *rest])
