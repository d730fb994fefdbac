"""Equinox: a small convolutional network on handwritten digits.

After Equinox's tutorial "Deep neural networks, CNNs and MNIST". It shows a module that goes through a pure step and
comes back changed. Two lines are Replicax's, marked so: the replicas' means are averaged, and the step is run.

    python examples/gallery/equinox/cnn.py

prints the loss every 20 steps, and the accuracy on images that it has not seen: 0.9 or more. Needs scikit-learn.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax

BATCH = 64
adam = optax.adam(3e-3)


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(144, 64, key=keys[1]),
            jax.nn.relu,
            eqx.nn.Linear(64, 10, key=keys[2]),
        ]

    def __call__(self, image):  # of one example, [1, 8, 8]
        for layer in self.layers:
            image = layer(image)
        return image


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(model, opt_state, images, labels):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    updates, opt_state = adam.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


def main(strategy, steps=300):
    """Train, and return the loss of each step."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int32)
    model = CNN(jax.random.key(0))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))

    rng = np.random.default_rng(0)
    batches = ((images[rows], labels[rows]) for rows in rng.integers(0, 1500, (steps, BATCH)))
    losses = []
    for x, y in strategy.distribute_dataset(list(batches)):
        model, opt_state, loss = strategy.run(train_step, args=(model, opt_state, x, y))  # Replicax
        losses.append(float(loss))
    accuracy = (jax.vmap(model)(images[1500:]).argmax(-1) == labels[1500:]).mean()
    return losses, float(accuracy)


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, accuracy = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 20):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"accuracy {accuracy:.3f}")
