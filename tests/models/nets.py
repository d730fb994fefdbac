"""Small models of Flax NNX, and the training step of NNX's tutorial, for one device and for any number of replicas."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from flax import nnx

import replicax


class MLP(nnx.Module):
    """Layers whose results do not depend on how examples are divided, and few of them: most tests take this."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(jax.nn.relu(self.first(x)))


class CNN(nnx.Module):
    """Batch normalisation over ``axis``, and dropout."""

    def __init__(self, *, rngs, axis=None, rate=0.0):
        self.conv = nnx.Conv(2, 4, (2,), rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, axis_name=axis, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(12, 4, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.conv(x.reshape(len(x), 3, 2))))
        return self.last(self.dropout(x.reshape(len(x), -1)))


class Transformer(nnx.Module):
    """A table of embeddings that is the last layer, too."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(4, 8, rngs=rngs)
        self.scale = nnx.Linear(1, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.head = Tied(self.embed)

    def __call__(self, x):
        h = self.scale(x[..., None]) + self.embed((x > 0).astype(int))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mix = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, h):
        h = h + self.attention(self.norm(h))
        return h + jax.nn.gelu(self.mix(h))


class Tied(nnx.Module):
    def __init__(self, embed):
        self.embed = embed

    def __call__(self, h):
        return self.embed.attend(h)


def made(kind, tx=None):
    """A model, its optimizer and its metrics."""
    model = kind(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx or optax.adamw(0.01), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def train_step(model, optimizer, metrics, batch, average=replicax.compute_average_loss):
    """That of the tutorial, but for the loss's share."""

    def loss_fn(model):
        logits = model(batch["x"])
        return average(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])), logits

    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, gradients)
    return loss


train_step_alone = nnx.jit(functools.partial(train_step, average=lambda losses: losses.mean()))


def batches(count=4, size=8):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(size, 6)).astype(np.float32), "y": rng.integers(0, 4, size).astype(np.int32)}
        for _ in range(count)
    ]


def arrays(*objects):
    """All values of objects but keys, by path."""
    found = nnx.to_flat_state(nnx.state(objects))
    return {path: np.asarray(v[...]) for path, v in found if not isinstance(v, nnx.RngKey)}


def check_alike(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_allclose(value, expected[path], rtol=tolerance, atol=tolerance, err_msg=str(path))
