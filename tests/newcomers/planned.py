"""Someone who wants to know whether a model fits: ``replicax plan planned.py``."""

import jax
import jax.numpy as jnp
import optax

import replicax


def plan(strategy, layers=4, width=1024, batch=64):
    with strategy.scope():
        weights = [replicax.Variable(lambda: jnp.zeros((width, width))) for _ in range(layers)]
        optimizer = replicax.Optimizer(optax.adam(1e-3))

    def step(x):
        def loss():
            h = x
            for w in weights:
                h = jax.nn.relu(h @ w)
            return replicax.compute_average_loss(jnp.square(h).mean(axis=1))

        share, gradients = replicax.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return share

    return step, jax.ShapeDtypeStruct((batch, width), jnp.float32)
