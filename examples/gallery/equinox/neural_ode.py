"""Equinox: a neural ODE, solved by Diffrax, that learns how points move from seeing them move.

After Diffrax's example "Neural ODE". It shows a solver with steps of adaptive size inside of a module: a loop of which
each replica takes as many turns as its examples need, differentiated. Two lines are Replicax's, marked so.

    python examples/gallery/equinox/neural_ode.py

prints the loss every 40 steps, and the mean error on starts that it has not seen: 0.1 or less.
"""

from __future__ import annotations

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH, HIDDEN = 32, 32
TIMES = np.linspace(0, 5, 21, dtype=np.float32)
adam = optax.adam(1e-2)


def trajectories(count, seed):
    """Ways ``[count, time, 2]`` of points that turn around the origin, the quicker the nearer they are."""
    start = np.random.default_rng(seed).uniform(-1, 1, (count, 2))
    radius, angle = np.hypot(*start.T)[:, None], np.arctan2(*start.T)[:, None]
    angle = angle + TIMES / (1 + radius)
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], -1).astype(np.float32)


class NeuralODE(eqx.Module):
    field: eqx.nn.MLP

    def __init__(self, key):
        self.field = eqx.nn.MLP(2, 2, HIDDEN, 2, activation=jax.nn.softplus, key=key)

    def __call__(self, start):  # of one example, [2]
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Tsit5(),
            t0=TIMES[0],
            t1=TIMES[-1],
            dt0=TIMES[1] - TIMES[0],
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=jnp.asarray(TIMES)),
        )
        return solution.ys


@eqx.filter_value_and_grad
def loss_and_grads(model, ways):
    return jnp.mean((jax.vmap(model)(ways[:, 0]) - ways) ** 2)


def make_step(model, opt_state, ways):
    loss, grads = loss_and_grads(model, ways)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    updates, opt_state = adam.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


def main(strategy, steps=200):
    """Train, and return the loss of each step and the error."""
    model = NeuralODE(jax.random.key(0))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for ways in strategy.distribute_dataset([trajectories(BATCH, seed) for seed in range(steps)]):
        loss, model, opt_state = strategy.run(make_step, args=(model, opt_state, ways))  # Replicax
        losses.append(float(loss))
    ways = trajectories(200, steps)
    return losses, float(jnp.abs(jax.vmap(model)(ways[:, 0]) - ways).mean())


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, error = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 40):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"error {error:.3f}")
