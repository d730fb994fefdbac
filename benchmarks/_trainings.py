"""Three small trainings, of which the bits of all variables are compared: a perceptron, a CNN and a transformer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH = 64
"""Of all replicas."""

Losses = Callable[[Sequence[Any], Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
      shapes: of the parameters.
      losses: of the parameters' arrays, the examples, their labels and a key: the loss of each example.
      batch: the examples and labels of a step, for all replicas.
      tx: the optimizer.
    """

    shapes: Sequence[tuple[int, ...]]
    losses: Losses
    batch: Callable[[int], tuple[Any, Any]]
    tx: optax.GradientTransformation


# --- models ---------------------------------------------------------------------------------------------


def mlp() -> Model:
    """64-256-256-10 on handwritten digits, with Adam and clipping by the global norm."""
    sizes = 64, 256, 256, 10
    shapes = [shape for n, m in itertools.pairwise(sizes) for shape in ((n, m), (m,))]

    def losses(parameters: Sequence[Any], images: Any, labels: Any, key: Any) -> Any:
        x = images.reshape(len(images), -1)
        for w, b in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            x = jax.nn.relu(x @ w + b)
        return optax.softmax_cross_entropy_with_integer_labels(x @ parameters[-2] + parameters[-1], labels)

    return Model(shapes, losses, _digits, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3)))


def cnn() -> Model:
    """The network of ``examples/digits.py``, with AdamW and clipping by the global norm."""
    shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (4 * 4 * 64, 10), (10,)]

    def conv(x: Any, kernel: Any, stride: int) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)

    def losses(parameters: Sequence[Any], images: Any, labels: Any, key: Any) -> Any:
        kernel1, bias1, kernel2, bias2, kernel3, bias3 = parameters
        x = jax.nn.gelu(conv(images, kernel1, 1) + bias1)
        x = jax.nn.gelu(conv(x, kernel2, 2) + bias2)
        return optax.softmax_cross_entropy_with_integer_labels(x.reshape(len(x), -1) @ kernel3 + bias3, labels)

    return Model(shapes, losses, _digits, optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3)))


def transformer() -> Model:
    """Two layers of width 64 with four heads, dropout, AdamW and clipping by the global norm."""
    vocabulary, length, width, heads, hidden, layers = 32, 16, 64, 4, 256, 2
    head = width // heads
    of_layer = [(width,), *[(width, heads, head)] * 3, (heads, head, width), (width,), (width, hidden), (hidden, width)]
    shapes = [(vocabulary, width), (length, width), *of_layer * layers, (width,)]

    def norm(x: Any, scale: Any) -> Any:
        return (1 + scale) * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def dropped(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)

    def losses(parameters: Sequence[Any], tokens: Any, targets: Any, key: Any) -> Any:
        keys = iter(jax.random.split(key, 2 * layers))
        rest = iter(parameters)
        embedding, positions = next(rest), next(rest)
        x = embedding[tokens] + positions
        for _ in range(layers):
            scale1, *projections, out, scale2, up, down = itertools.islice(rest, len(of_layer))
            q, k, v = (jnp.einsum("btd,dhe->bthe", norm(x, scale1), w) for w in projections)
            found = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + dropped(jnp.einsum("bthe,hed->btd", found, out), next(keys))
            x = x + dropped(jax.nn.gelu(norm(x, scale2) @ up) @ down, next(keys))
        logits = norm(x, next(rest)) @ embedding.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)

    def batch(step: int) -> tuple[Any, Any]:
        start, stride = np.random.default_rng(step).integers(vocabulary, size=(2, BATCH, 1))
        tokens = (start + stride * np.arange(length + 1)) % vocabulary
        return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)

    return Model(shapes, losses, batch, optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3)))


def _digits(step: int) -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
    return (images[chosen] / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels[chosen].astype(np.int32)


MODELS: dict[str, Callable[[], Model]] = {"MLP": mlp, "CNN": cnn, "transformer": transformer}


# --- a training -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Training:
    """The training of a model under a strategy.

    Attributes:
      strategy: the strategy.
      model: the model.
      step: what each replica does.
      variables: all that a step writes.
      checkpoint: the same, to save and to restore.
    """

    strategy: replicax.Strategy
    model: Model
    step: Callable[[Any], Any]
    variables: list[Any]
    checkpoint: replicax.Checkpoint

    @classmethod
    def of(cls, name: str, strategy: replicax.Strategy) -> Self:
        model, rng = MODELS[name](), np.random.default_rng(0)
        with strategy.scope():
            weights = [
                replicax.Variable(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32), name=f"w{i}")
                for i, shape in enumerate(model.shapes)
            ]
            steps = replicax.Variable(0, name="steps")
            optimizer = replicax.Optimizer(model.tx)
            optimizer.build(weights)

        def step(batch: Any) -> Any:
            replica = replicax.get_replica_context()
            assert replica is not None
            key = jax.random.fold_in(jax.random.key(steps.value), replica.replica_id_in_sync_group)

            def loss() -> Any:
                return replicax.compute_average_loss(model.losses([w.value for w in weights], *batch, key))

            share, gradients = replicax.value_and_grad(loss, weights)()
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            steps.assign_add(1)
            return share

        variables = [*weights, steps, *optimizer.variables]
        checkpoint = replicax.Checkpoint(weights=weights, steps=steps, optimizer=optimizer)
        return cls(strategy, model, step, variables, checkpoint)

    def batches(self, start: int, end: int) -> Iterator[Any]:
        """Those of some steps, distributed."""
        return iter(self.strategy.distribute_dataset([self.model.batch(i) for i in range(start, end)]))

    def go(self, start: int, end: int) -> None:
        """Do some steps."""
        for batch in self.batches(start, end):
            self.strategy.run(self.step, args=(batch,))

    def digest(self) -> str:
        """That of the bits of all variables."""
        bits = hashlib.sha256()
        for variable in self.variables:
            bits.update(variable.numpy().tobytes())
        return bits.hexdigest()[:16]
