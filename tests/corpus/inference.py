"""Bayesian inference and clustering: sampling, Gaussian processes, flows, and expectation maximization."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

X = normal(16, 3)
LABELS = (X[:, 0] + 0.5 * normal(16, seed=1) > 0).astype("float32")

# --- Hamiltonian Monte Carlo over data that the replicas divide ----------------------------------------------


def log_likelihoods(q, x, y):
    return -optax.sigmoid_binary_cross_entropy(x @ q, y)


def log_prior(q):
    return -0.5 * (q**2).sum()


def hmc(log_density, gradient, key, steps=4, leaps=3, size=0.2):
    """A chain of ``steps`` states. All replicas draw alike, so that they stay together."""

    def leap(carry, _):
        q, p = carry
        p = p + 0.5 * size * gradient(q)
        q = q + size * p
        return (q, p + 0.5 * size * gradient(q)), None

    def step(q, key):
        momentum_key, accept_key = jax.random.split(key)
        p = jax.random.normal(momentum_key, q.shape)
        (new, end), _ = lax.scan(leap, (q, p), length=leaps)
        energy = log_density(q) - 0.5 * (p**2).sum()
        accepted = jnp.log(jax.random.uniform(accept_key)) < log_density(new) - 0.5 * (end**2).sum() - energy
        q = jnp.where(accepted, new, q)
        return q, (q, accepted)

    return lax.scan(step, jnp.zeros(3), jax.random.split(key, steps))[1]


def hmc_plain():
    def log_density(q):
        return log_likelihoods(q, X, LABELS).sum() + log_prior(q)

    return jax.jit(lambda key: hmc(log_density, jax.grad(log_density), key))(jax.random.key(1))


@program(hmc_plain, quick=("2",))
def hamiltonian_monte_carlo(strategy):
    def sample(key, x, y):
        ctx = replicax.get_replica_context()

        def local(q):
            return log_likelihoods(q, x, y).sum()

        def log_density(q):
            return ctx.all_reduce("sum", local(q)) + log_prior(q)

        def gradient(q):
            return ctx.all_reduce("sum", jax.grad(local)(q)) + jax.grad(log_prior)(q)

        return hmc(log_density, gradient, key)

    [(x, y)] = whole(strategy, X, LABELS)
    return strategy.run(sample, args=(jax.random.key(1), x, y))


# --- many chains, which the replicas divide -------------------------------------------------------------------


def metropolis(start, key):
    def step(q, key):
        a, b = jax.random.split(key)
        new = q + 0.5 * jax.random.normal(a, q.shape)
        ratio = jnp.cos(new).sum() - 0.1 * (new**2).sum() - jnp.cos(q).sum() + 0.1 * (q**2).sum()
        q = jnp.where(jnp.log(jax.random.uniform(b)) < ratio, new, q)
        return q, q

    return lax.scan(step, start, jax.random.split(key, 6))[1]


def potential_scale(chains):
    """R-hat of ``[chains, steps, dims]``, from moments that add up over chains."""
    return chains.mean(1), chains.var(1)


def r_hat(means, variances):
    within, between = variances.mean(0), means.var(0)
    return jnp.sqrt(1 + between / within)


def chains_plain():
    @jax.jit
    def sample(starts, keys):
        chains = jax.vmap(metropolis)(starts, keys)
        return chains, r_hat(*potential_scale(chains))

    return sample(normal(8, 2), jax.random.split(jax.random.key(2), 8))


@program(chains_plain)
def chains_of_metropolis(strategy):
    def sample(starts, keys):
        chains = jax.vmap(metropolis)(starts, jax.random.wrap_key_data(keys))
        everyone = replicax.get_replica_context().all_gather(potential_scale(chains), axis=0)
        return chains, r_hat(*everyone)

    [batch] = whole(strategy, normal(8, 2), jax.random.key_data(jax.random.split(jax.random.key(2), 8)))
    chains, diagnostic = strategy.run(sample, args=batch)
    return strategy.gather(chains, axis=0), diagnostic


# --- Gaussian processes with one kernel for several tasks -------------------------------------------------------


def negative_log_marginal(params, x, y):
    squares = jnp.square(x[:, None] - x[None]).sum(-1)
    K = jnp.exp(params["amplitude"]) * jnp.exp(-0.5 * squares * jnp.exp(-2 * params["length"]))
    L = jnp.linalg.cholesky(K + (jnp.exp(params["noise"]) + 1e-5) * jnp.eye(len(x)))
    alpha = jax.scipy.linalg.cho_solve((L, True), y)
    return 0.5 * y @ alpha + jnp.log(jnp.diagonal(L)).sum()


KERNEL = {"amplitude": jnp.float32(0.0), "length": jnp.float32(0.0), "noise": jnp.float32(-1.0)}
INPUTS, OUTPUTS = normal(8, 6, 2), normal(8, 6, seed=1)


def gaussian_process_plain():
    adam = optax.adam(0.1)
    params, state = KERNEL, adam.init(KERNEL)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return jax.vmap(negative_log_marginal, (None, 0, 0))(params, INPUTS, OUTPUTS).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
    return params, loss


@program(gaussian_process_plain)
def gaussian_process_of_many_tasks(strategy):
    with strategy.scope():
        params = replicax.as_variables(KERNEL)
        optimizer = replicax.Optimizer(optax.adam(0.1))

    def step(x, y):
        def loss_fn(params):
            return replicax.compute_average_loss(jax.vmap(negative_log_marginal, (None, 0, 0))(params, x, y))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        return loss

    [(x, y)] = whole(strategy, INPUTS, OUTPUTS)
    for _ in range(3):
        loss = strategy.run(step, args=(x, y))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)


# --- a sparse Gaussian process: its sufficient statistics are sums over the data ----------------------------------


def rbf(a, b):
    return jnp.exp(-0.5 * jnp.square(a[:, None] - b[None]).sum(-1))


def sparse_posterior(inducing, KK, Ky, noise=0.2):
    A = rbf(inducing, inducing) + KK / noise + 1e-3 * jnp.eye(len(inducing))
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(A), True), Ky / noise)


def statistics(inducing, x, y):
    K = rbf(x, inducing)
    return K.T @ K, K.T @ y


def sparse_gaussian_process_plain():
    @jax.jit
    def fit(x, y):
        weights = sparse_posterior(x[:4], *statistics(x[:4], x, y))
        return weights, rbf(x, x[:4]) @ weights

    return fit(X, LABELS)


@program(sparse_gaussian_process_plain, quick=("2",))
def sparse_gaussian_process(strategy):
    def fit(inducing, x, y):
        sums = replicax.get_replica_context().all_reduce("sum", statistics(inducing, x, y))
        weights = sparse_posterior(inducing, *sums)
        return weights, rbf(x, inducing) @ weights

    [(x, y)] = whole(strategy, X, LABELS)
    weights, means = strategy.run(fit, args=(X[:4], x, y))
    return weights, strategy.gather(means, axis=0)


# --- k-means and expectation maximization ---------------------------------------------------------------------


def kmeans_plain():
    @jax.jit
    def lloyd(centres):
        def move(centres):
            nearest = jax.nn.one_hot(jnp.square(X[:, None] - centres).sum(-1).argmin(1), 3)
            return nearest.T @ X / jnp.maximum(nearest.sum(0), 1)[:, None]

        return lax.while_loop(
            lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-4) & (c[2] < 20),
            lambda c: (c[1], move(c[1]), c[2] + 1),
            (centres, move(centres), 1),
        )[1:]

    return lloyd(X[:3])


@program(kmeans_plain, quick=("2", "executor"))
def kmeans(strategy):
    def lloyd(centres, x):
        ctx = replicax.get_replica_context()

        def move(centres):
            nearest = jax.nn.one_hot(jnp.square(x[:, None] - centres).sum(-1).argmin(1), 3)
            sums, counts = ctx.all_reduce("sum", (nearest.T @ x, nearest.sum(0)))
            return sums / jnp.maximum(counts, 1)[:, None]

        return lax.while_loop(
            lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-4) & (c[2] < 20),
            lambda c: (c[1], move(c[1]), c[2] + 1),
            (centres, move(centres), 1),
        )[1:]

    [(x,)] = whole(strategy, X)
    return strategy.run(lloyd, args=(X[:3], x))


def responsibilities(mixture, x):
    densities = -0.5 * jnp.square((x[:, None] - mixture["mean"]) / mixture["std"]).sum(-1)
    logits = densities - jnp.log(mixture["std"]).sum(-1) + jnp.log(mixture["weight"])
    return jax.nn.softmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)


def sufficient(mixture, x):
    r, evidence = responsibilities(mixture, x)
    return r.sum(0), r.T @ x, r.T @ x**2, evidence.sum()


def maximized(count, first, second, evidence):
    mean = first / count[:, None]
    std = jnp.sqrt(second / count[:, None] - mean**2 + 1e-2)
    return {"weight": count / count.sum(), "mean": mean, "std": std}, evidence


MIXTURE = {"weight": jnp.full(2, 0.5), "mean": X[:2], "std": jnp.ones((2, 3))}


def mixture_plain():
    step = jax.jit(lambda mixture: maximized(*sufficient(mixture, X)))
    mixture = MIXTURE
    for _ in range(4):
        mixture, evidence = step(mixture)
    return mixture, evidence


@program(mixture_plain, quick=("2",))
def expectation_maximization(strategy):
    with strategy.scope():
        mixture = replicax.as_variables(MIXTURE)

    def step(x):
        sums = replicax.get_replica_context().all_reduce("sum", sufficient(replicax.as_arrays(mixture), x))
        new, evidence = maximized(*sums)
        replicax.assign(mixture, new)
        return evidence

    [(x,)] = whole(strategy, X)
    evidences = [strategy.run(step, args=(x,)) for _ in range(4)]
    return replicax.as_arrays(mixture), evidences[-1]


# --- a normalizing flow -----------------------------------------------------------------------------------------


class Coupling(nnx.Module):
    def __init__(self, flip, rngs):
        self.flip = flip
        self.net = nnx.Sequential(nnx.Linear(2, 8, rngs=rngs), jax.nn.tanh, nnx.Linear(8, 4, rngs=rngs))

    def __call__(self, x):
        kept, moved = jnp.split(x[:, ::-1] if self.flip else x, 2, axis=-1)
        scale, shift = jnp.split(self.net(kept), 2, axis=-1)
        scale = jnp.tanh(scale)
        return jnp.concatenate([kept, moved * jnp.exp(scale) + shift], -1), scale.sum(-1)


class RealNVP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Coupling(flip, rngs) for flip in (False, True)])

    def __call__(self, x):
        log_det = 0.0
        for layer in self.layers:
            x, change = layer(x)
            log_det += change
        return -0.5 * (x**2).sum(-1) + log_det


POINTS = normal(16, 4) * 0.5 + 1.0


def flow_of():
    model = RealNVP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), wrt=nnx.Param)


def flow_step(average, model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: average(-model(x)))(model)
    optimizer.update(model, grads)
    return loss


def flow_plain():
    model, optimizer = flow_of()
    step = nnx.jit(functools.partial(flow_step, jnp.mean))
    losses = [step(model, optimizer, POINTS) for _ in range(3)]
    return jax.tree.leaves(nnx.state(model, nnx.Param)), losses


@program(flow_plain)
def normalizing_flow(strategy):
    with strategy.scope():
        model, optimizer = flow_of()
    step = functools.partial(flow_step, replicax.compute_average_loss)
    [(x,)] = whole(strategy, POINTS)
    losses = [strategy.reduce("sum", strategy.run(step, args=(model, optimizer, x))) for _ in range(3)]
    return jax.tree.leaves(nnx.state(model, nnx.Param)), losses
