"""Keras 3 on JAX: ``fit`` under ``keras.distribution.DataParallel``, with batches that are on the devices already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers

from benchmarks.peers import problems
from benchmarks.peers.libraries.on_jax import use_devices
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem


def fit(problem: Problem, replicas: int) -> Training:
    """``fit`` for as many steps of one epoch; the loss is its mean over the epoch."""
    use_devices(replicas)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = MODELS[problem.name]()
    _set(model, problem)
    model.compile(
        optimizer=keras.optimizers.Adam(
            problems.LEARNING_RATE, beta_1=problems.BETA_1, beta_2=problems.BETA_2, epsilon=problems.EPSILON
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    along = NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch"))
    batch = jax.device_put((problem.inputs, problem.labels), along)

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    def steps(n: int) -> float:
        return float(model.fit(batches(), steps_per_epoch=n, verbose=0).history["loss"][-1])

    return Training(sum(int(np.prod(v.shape)) for v in model.trainable_variables), steps)


def mlp() -> keras.Model:
    """See :func:`benchmarks.peers.problems.mlp`."""
    n_in, *hidden, n_out = problems.MLP_SIZES
    names = [f"dense{i}" for i in range(len(hidden) + 1)]
    dense = [layers.Dense(n, "relu", name=name) for n, name in zip(hidden, names, strict=False)]
    return keras.Sequential([keras.Input((n_in,)), *dense, layers.Dense(n_out, name=names[-1])])


def cnn() -> keras.Model:
    """See :func:`benchmarks.peers.problems.cnn`."""
    parts: list[Any] = [keras.Input((problems.IMAGE, problems.IMAGE, 1))]
    for i, channels in enumerate(problems.CNN_CHANNELS[1:]):
        parts.append(layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"conv{i}"))
        parts.append(layers.MaxPooling2D())
    hidden, last = problems.CNN_HIDDEN, problems.CLASSES
    parts += [layers.Flatten(), layers.Dense(hidden, "relu", name="dense0"), layers.Dense(last, name="dense1")]
    return keras.Sequential(parts)


class Positions(layers.Layer):
    """Adds what each place of a text has."""

    def build(self, shape: Any) -> None:
        """Make the weight."""
        self.positions = self.add_weight(shape=shape[1:], name="positions")

    def call(self, x: Any) -> Any:
        """Add."""
        return x + self.positions


def transformer() -> keras.Model:
    """See :func:`benchmarks.peers.problems.transformer`."""

    def norm(name: str) -> Any:
        return layers.LayerNormalization(epsilon=problems.NORM_EPSILON, name=name)

    def gelu(x: Any) -> Any:
        return keras.activations.gelu(x, approximate=True)

    tokens = keras.Input((problems.LENGTH,), dtype="int32")
    x = layers.Embedding(problems.VOCABULARY, problems.WIDTH, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    for i in range(problems.LAYERS):
        attention = layers.MultiHeadAttention(problems.HEADS, problems.HEAD, use_bias=False, name=f"{i}.attention")
        y = norm(f"{i}.norm0")(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(problems.HIDDEN, gelu, name=f"{i}.up")(norm(f"{i}.norm1")(x))
        x = x + layers.Dense(problems.WIDTH, name=f"{i}.down")(y)
    return keras.Model(tokens, layers.Dense(problems.VOCABULARY, use_bias=False, name="head")(norm("norm")(x)))


MODELS: dict[str, Any] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def _set(model: keras.Model, problem: Problem) -> None:
    """Give the model's weights the values that all peers begin with."""
    for layer in model.layers:
        for weight in layer.trainable_weights:
            names = _names(layer.name, weight.path.rsplit("/", 2))
            [value] = [problem.initial[name] for name in names if name in problem.initial]
            weight.assign(value)


def _names(layer: str, path: list[str]) -> set[str]:
    """What a weight may be called among the initial values."""
    own = {"gamma": "scale", "beta": "bias"}.get(path[-1], path[-1])
    if layer.endswith(".attention"):
        part = {"attention_output": "out"}.get(path[-2], path[-2])
        return {f"{layer.removesuffix('.attention')}.{part}"}
    return {layer, f"{layer}.{own}"}
