"""Generative models: diffusion, adversaries, and codes that follow what they stand for."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

X = normal(16, 4) * 0.5 + 1.0
KEYS = jax.random.key_data(jax.random.split(jax.random.key(0), 16))

# --- denoising diffusion: each example has a key, the weights an average over time -----------------------------

ALPHAS = jnp.cumprod(1 - jnp.linspace(1e-2, 0.3, 8))


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        angles = t[:, None] * 0.5 ** jnp.arange(3)
        h = jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)
        return nn.Dense(4)(nn.silu(nn.Dense(16)(h)))


def noised(x, keys):
    def of(row, key):
        a, b = jax.random.split(key)
        t, noise = jax.random.randint(a, (), 0, 8), jax.random.normal(b, row.shape)
        return jnp.sqrt(ALPHAS[t]) * row + jnp.sqrt(1 - ALPHAS[t]) * noise, t, noise

    return jax.vmap(of)(x, jax.random.wrap_key_data(keys))


def diffusion_losses(params, x, keys):
    inputs, t, noise = noised(x, keys)
    return jnp.square(Denoiser().apply(params, inputs, t) - noise).mean(-1)


def diffusion_of():
    params = jax.jit(Denoiser().init)(jax.random.key(0), X, jnp.zeros(16, jnp.int32))
    return params, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def diffusion_plain():
    params, tx = diffusion_of()
    state, average = tx.init(params), params

    @jax.jit
    def step(params, average, state):
        loss, grads = jax.value_and_grad(lambda p: diffusion_losses(p, X, KEYS).mean())(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.2), state, loss

    for _ in range(3):
        params, average, state, loss = step(params, average, state)
    return params, average, loss


@program(diffusion_plain)
def denoising_diffusion(strategy):
    params, tx = diffusion_of()
    state, average = tx.init(params), params

    def step(params, average, state, x, keys):
        loss, grads = jax.value_and_grad(lambda p: diffusion_losses(p, x, keys).mean())(params)
        loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.2), state, loss

    [batch] = whole(strategy, X, KEYS)
    for _ in range(3):
        params, average, state, loss = strategy.run(step, args=(params, average, state, *batch))
    return params, average, loss


# --- two adversaries with an optimizer each, in one step ---------------------------------------------------------


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.net = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs))

    def __call__(self, z):
        return self.net(z)


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.net = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), jax.nn.leaky_relu, nnx.Linear(8, 1, rngs=rngs))

    def __call__(self, x):
        return self.net(x)[:, 0]


def adversaries():
    generator, critic = Generator(nnx.Rngs(0)), Critic(nnx.Rngs(1))
    return (
        generator,
        critic,
        nnx.Optimizer(generator, optax.adam(1e-2, b1=0.5), wrt=nnx.Param),
        nnx.Optimizer(critic, optax.adam(1e-2, b1=0.5), wrt=nnx.Param),
    )


def adversarial_step(average, generator, critic, generator_optimizer, critic_optimizer, real, z):
    def critic_loss(critic):
        fake = lax.stop_gradient(generator(z))
        slopes = jax.vmap(jax.grad(lambda x: critic(x[None])[0]))(real)
        losses = optax.sigmoid_binary_cross_entropy(critic(real), jnp.full(len(real), 0.9))
        losses += optax.sigmoid_binary_cross_entropy(critic(fake), jnp.zeros(len(z)))
        return average(losses + 0.5 * jnp.square(slopes).sum(-1))

    def generator_loss(generator):
        return average(optax.sigmoid_binary_cross_entropy(critic(generator(z)), jnp.ones(len(z))))

    first, grads = nnx.value_and_grad(critic_loss)(critic)
    critic_optimizer.update(critic, grads)
    second, grads = nnx.value_and_grad(generator_loss)(generator)
    generator_optimizer.update(generator, grads)
    return first, second


def adversarial_plain():
    objects = adversaries()
    step = nnx.jit(functools.partial(adversarial_step, jnp.mean))
    for _ in range(2):
        losses = step(*objects, X, normal(16, 3))
    return [jax.tree.leaves(nnx.state(o, nnx.Param)) for o in objects[:2]], losses


@program(adversarial_plain)
def adversarial_networks(strategy):
    with strategy.scope():
        objects = adversaries()
    step = functools.partial(adversarial_step, replicax.compute_average_loss)
    [(real, z)] = whole(strategy, X, normal(16, 3))
    for _ in range(2):
        losses = strategy.run(step, args=(*objects, real, z))
    return [jax.tree.leaves(nnx.state(o, nnx.Param)) for o in objects[:2]], strategy.reduce("sum", losses)


# --- a VQ-VAE, whose codebook is the average of what it stood for ---------------------------------------------------

WEIGHTS = {"encode": normal(4, 3, seed=1), "decode": normal(3, 4, seed=2)}
CODES = {"codes": normal(5, 3, seed=3), "counts": jnp.ones(5), "sums": normal(5, 3, seed=3)}


def vq_losses(weights, codes, x):
    z = jnp.tanh(x @ weights["encode"])
    chosen = jnp.square(z[:, None] - codes).sum(-1).argmin(-1)
    quantized = z + lax.stop_gradient(codes[chosen] - z)
    losses = jnp.square(quantized @ weights["decode"] - x).mean(-1)
    commitment = jnp.square(z - codes[chosen]).mean(-1)
    return losses + 0.25 * commitment, (z, jax.nn.one_hot(chosen, 5))


def moved(book, z, hot, add):
    """The codebook after a batch; ``add`` sums over replicas."""
    counts = 0.9 * book["counts"] + 0.1 * add(hot.sum(0))
    sums = 0.9 * book["sums"] + 0.1 * add(hot.T @ z)
    return {"codes": sums / (counts[:, None] + 1e-3), "counts": counts, "sums": sums}


def vq_plain():
    weights, book = WEIGHTS, CODES

    @jax.jit
    def step(weights, book):
        def loss_fn(weights):
            losses, codes = vq_losses(weights, book["codes"], X)
            return losses.mean(), codes

        (loss, (z, hot)), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return weights, moved(book, z, hot, lambda value: value), loss

    for _ in range(3):
        weights, book, loss = step(weights, book)
    return weights, book, loss


@program(vq_plain, quick=("2",))
def vector_quantization(strategy):
    with strategy.scope():
        weights, book = replicax.as_variables((WEIGHTS, CODES))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        ctx = replicax.get_replica_context()

        def loss_fn(weights):
            losses, codes = vq_losses(weights, book["codes"].value, x)
            return replicax.compute_average_loss(losses), codes

        (loss, (z, hot)), grads = replicax.value_and_grad(loss_fn, weights, has_aux=True)(weights)
        optimizer.apply_gradients(grads, weights)
        replicax.assign(book, moved(replicax.as_arrays(book), z, hot, lambda value: ctx.all_reduce("sum", value)))
        return loss

    [(x,)] = whole(strategy, X)
    for _ in range(3):
        loss = strategy.run(step, args=(x,))
    return *replicax.as_arrays((weights, book)), strategy.reduce("sum", loss)
