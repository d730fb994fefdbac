"""Equinox: a recurrent network that tells which way a spiral turns.

After Equinox's tutorial "Train RNN". It shows a scan over time inside of a module, with a carry that starts as a
constant, and a loss of probabilities. Two lines are Replicax's, marked so.

    python examples/gallery/equinox/rnn.py

prints the loss every 20 steps, and the accuracy on spirals that it has not seen: 0.95 or more.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH, HIDDEN = 64, 16
adam = optax.adam(1e-2)


def spirals(count, seed):
    """Spirals ``[count, 16, 2]``, half of them mirrored, and which: ``[count]``."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 16, 16) + rng.uniform(0, 2 * np.pi, (count, 1))
    points = np.stack([np.sin(t), np.cos(t)], -1) / (1 + np.linspace(0, 16, 16)[:, None] / 4)
    labels = rng.integers(0, 2, count)
    points[..., 0] *= np.where(labels, 1, -1)[:, None]
    return points.astype(np.float32), labels.astype(np.float32)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, HIDDEN, key=a)
        self.last = eqx.nn.Linear(HIDDEN, 1, use_bias=False, key=b)
        self.bias = jnp.zeros(1)

    def __call__(self, points):  # of one example, [16, 2]
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(HIDDEN), points)
        return jax.nn.sigmoid(self.last(hidden) + self.bias)[0]


@eqx.filter_value_and_grad
def loss_and_grads(model, x, y):
    predicted = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(predicted) + (1 - y) * jnp.log(1 - predicted))


def make_step(model, opt_state, x, y):
    loss, grads = loss_and_grads(model, x, y)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    updates, opt_state = adam.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


def main(strategy, steps=120):
    """Train, and return the loss of each step and the accuracy."""
    model = RNN(jax.random.key(0))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for x, y in strategy.distribute_dataset([spirals(BATCH, seed) for seed in range(steps)]):
        loss, model, opt_state = strategy.run(make_step, args=(model, opt_state, x, y))  # Replicax
        losses.append(float(loss))
    x, y = spirals(500, steps)
    return losses, float(((jax.vmap(model)(x) > 0.5) == y).mean())


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, accuracy = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 20):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"accuracy {accuracy:.3f}")
