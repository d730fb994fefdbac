"""Flax Linen: a residual network with batch normalisation, on handwritten digits.

After Flax's example "imagenet", in small. It shows mutable collections: batch statistics that the step returns, taken
over all replicas (``axis_name=``), and weight decay inside of the loss. Two lines are Replicax's, marked
so.

    python examples/gallery/linen/resnet.py

prints the loss every 20 steps, and the accuracy on images that it has not seen: 0.9 or more. Needs scikit-learn.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

import replicax

BATCH = 64


class TrainState(train_state.TrainState):
    batch_stats: Any


class ResNet(nn.Module):
    axis_name: str | None = replicax.REPLICA_AXIS

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False)
        axis_name = self.axis_name if train else None
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=axis_name)
        x = nn.relu(norm()(conv(16)(x)))
        for filters, stride in [(16, 1), (32, 2)]:
            y = nn.relu(norm()(conv(filters, strides=stride)(x)))
            y = norm(scale_init=nn.initializers.zeros)(conv(filters)(y))
            if x.shape != y.shape:
                x = norm()(conv(filters, kernel_size=(1, 1), strides=stride)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        decay = 0.5 * 1e-4 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + decay, new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def main(strategy, steps=120):
    """Train, and return the loss of each step and the accuracy."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    model = ResNet()
    variables = model.init(jax.random.key(0), images[:1], train=False)
    tx = optax.sgd(optax.cosine_decay_schedule(0.2, max(steps, 1)), momentum=0.9, nesterov=True)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)

    rng = np.random.default_rng(0)
    data = [(images[rows], labels[rows]) for rows in rng.integers(0, 1500, (steps, BATCH))]
    losses = []
    for x, y in strategy.distribute_dataset(data):
        state, loss = strategy.run(train_step, args=(state, x, y))  # Replicax
        losses.append(float(loss))
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    predicted = jax.jit(functools.partial(model.apply, train=False))(variables, images[1500:]).argmax(-1)
    return losses, float((predicted == labels[1500:]).mean())


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, accuracy = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 20):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"accuracy {accuracy:.3f}")
