"""Flax Linen: a variational autoencoder of handwritten digits.

After Flax's example "vae". It shows a ``TrainState`` that goes through a pure step and comes back changed. The noise is
part of the batch, so that it does not depend on how many replicas there are. Two lines are Replicax's, marked so.

    python examples/gallery/linen/vae.py

prints the loss every 50 steps: the bits of an image, in nats; about 25 at the end. Needs scikit-learn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import replicax

BATCH, LATENTS = 64, 8


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, noise):
        h = nn.relu(nn.Dense(128, name="encoder")(x))
        mean, log_variance = nn.Dense(LATENTS, name="mean")(h), nn.Dense(LATENTS, name="log_variance")(h)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        h = nn.relu(nn.Dense(128, name="decoder")(z))
        return nn.Dense(64, name="logits")(h), mean, log_variance


def train_step(state, images, noise):
    def loss_fn(params):
        logits, mean, log_variance = state.apply_fn({"params": params}, images, noise)
        error = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1).mean()
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1).mean()
        return error + divergence

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    return state.apply_gradients(grads=grads), loss


def main(strategy, steps=400):
    """Train, and return the loss of each step."""
    images = (load_digits().data / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    data = [
        (images[rows], rng.normal(size=(BATCH, LATENTS)).astype(np.float32))
        for rows in rng.integers(0, len(images), (steps, BATCH))
    ]
    model = VAE()
    params = model.init(jax.random.key(0), *data[0])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))
    losses = []
    for x, noise in strategy.distribute_dataset(data):
        state, loss = strategy.run(train_step, args=(state, x, noise))  # Replicax
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 50):
        print(f"steps {step:4d} to {step + 49:4d}: loss {np.mean(losses[step : step + 50]):.2f}")
