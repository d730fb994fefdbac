"""Flax NNX: a diffusion model (DDPM) of points on a spiral.

After Ho et al., "Denoising Diffusion Probabilistic Models", for points in the plane. It shows a moving average of the
parameters: a second model that the step changes, too. The noise is part of the batch, so that it does not depend on how
many replicas there are. Two lines are Replicax's, marked so.

    python examples/gallery/nnx/diffusion.py

prints the loss every 200 steps, and how far new points are from the spiral: less than 0.1, where noise is at 0.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax

STEPS_OF_NOISE, SIZE, BATCH = 40, 64, 128
BETAS = np.linspace(1e-4, 0.25, STEPS_OF_NOISE, dtype=np.float32)
KEPT = np.cumprod(1 - BETAS)  # how much of the variance is still the point's own


def spiral(count, rng):
    t = np.sqrt(rng.uniform(0.05, 1, count)) * 3 * np.pi
    return np.stack([t * np.cos(t), t * np.sin(t)], -1).astype(np.float32) / (2 * np.pi)


def batches(steps):
    """Points, noise and how often it has been added."""
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        noise = rng.normal(size=(BATCH, 2)).astype(np.float32)
        yield {"point": spiral(BATCH, rng), "noise": noise, "time": rng.integers(0, STEPS_OF_NOISE, BATCH, np.int32)}


class Denoiser(nnx.Module):
    """The noise in a point ``[…, 2]`` to which it was added so often: ``[…]``."""

    def __init__(self, *, rngs):
        self.frequencies = nnx.Variable(2.0 ** jnp.arange(4))
        self.time = nnx.Embed(STEPS_OF_NOISE, SIZE, rngs=rngs)
        self.first = nnx.Linear(18, SIZE, rngs=rngs)
        self.middle = nnx.List([nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(SIZE, 2, rngs=rngs)

    def __call__(self, points, time):
        waves = (points[..., None] * self.frequencies[...]).reshape(*points.shape[:-1], -1)
        h = self.first(jnp.concatenate([points, jnp.sin(waves), jnp.cos(waves)], -1)) + self.time(time)
        for layer in self.middle:
            h = h + layer(nnx.gelu(h))
        return self.last(nnx.gelu(h))


def train_step(model, average, optimizer, batch):
    kept = jnp.asarray(KEPT)[batch["time"], None]
    noisy = jnp.sqrt(kept) * batch["point"] + jnp.sqrt(1 - kept) * batch["noise"]

    def loss_fn(model):
        errors = (model(noisy, batch["time"]) - batch["noise"]) ** 2
        return replicax.compute_average_loss(errors.mean(-1))  # Replicax

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    moved = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, nnx.state(average, nnx.Param), nnx.state(model, nnx.Param))
    nnx.update(average, moved)
    return loss


@jax.jit
def sampled(parts, key):
    """Points that the model makes of noise, step by step."""
    model = nnx.merge(*parts)
    first, *keys = jax.random.split(key, STEPS_OF_NOISE + 1)

    def turn(points, x):
        t, key = x
        beta, kept = jnp.asarray(BETAS)[t], jnp.asarray(KEPT)[t]
        noise = model(points, jnp.full(points.shape[:1], t))
        mean = (points - beta / jnp.sqrt(1 - kept) * noise) / jnp.sqrt(1 - beta)
        return mean + jnp.where(t > 0, jnp.sqrt(beta), 0.0) * jax.random.normal(key, points.shape), None

    times = jnp.arange(STEPS_OF_NOISE)[::-1]
    return jax.lax.scan(turn, jax.random.normal(first, (200, 2)), (times, jnp.stack(keys)))[0]


def distance(points):
    """How far points are from the spiral, on average."""
    curve = spiral(2000, np.random.default_rng(0))
    return float(np.linalg.norm(np.asarray(points)[:, None] - curve, axis=-1).min(1).mean())


def main(strategy, steps=1200):
    """Train, and return the loss of each step and the averaged model."""
    model, average = (Denoiser(rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    losses = []
    for batch in strategy.distribute_dataset(list(batches(steps))):
        loss = strategy.reduce("sum", strategy.run(train_step, args=(model, average, optimizer, batch)))  # Replicax
        losses.append(float(loss))
    return losses, average


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, average = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 200):
        print(f"steps {step:4d} to {step + 199:4d}: loss {np.mean(losses[step : step + 200]):.4f}")
    print(f"noise to spiral: {distance(np.random.default_rng(1).normal(size=(200, 2))):.3f}")
    print(f"new points to spiral: {distance(sampled(nnx.split(average), jax.random.key(1))):.3f}")
