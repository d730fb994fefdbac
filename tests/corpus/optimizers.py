"""Ways of descending: what is accumulated, averaged, preconditioned, perturbed, or done by each for a while."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

X, Y = normal(32, 4), normal(32, 2, seed=1)
PARAMS = {"w": normal(4, 6, seed=2) * 0.5, "b": jnp.zeros(6), "v": normal(6, 2, seed=3) * 0.5}


def losses(params, x, y):
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y).mean(-1)


def mean_loss(params, x, y):
    return losses(params, x, y).mean()


def mean_of_all(value):
    return replicax.get_replica_context().all_reduce("mean", value)


def itself(value):
    return value


def trained(step, carry, batches=((X, Y),) * 3):
    """Plainly: ``step(mean, carry, *batch)`` for each batch."""
    jitted = jax.jit(functools.partial(step, itself))
    for batch in batches:
        carry, loss = jitted(carry, *batch)
    return carry, loss


def trained_by(strategy, step, carry, batches=((X, Y),) * 3):
    """The same pure step, whose means are over all replicas."""
    step = functools.partial(step, mean_of_all)
    for batch in strategy.distribute_dataset(list(batches)):
        carry, loss = strategy.run(step, args=(carry, *batch))
    return carry, loss


# --- accumulation in the optimizer ----------------------------------------------------------------------------

accumulating = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
MICROBATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


def accumulate(mean, carry, x, y):
    params, state = carry
    loss, grads = mean(jax.value_and_grad(mean_loss)(params, x, y))
    updates, state = accumulating.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss


def accumulate_plain():
    (params, _), loss = trained(accumulate, (PARAMS, accumulating.init(PARAMS)), MICROBATCHES)
    return params, loss


@program(accumulate_plain)
def accumulation_by_multi_steps(strategy):
    (params, _), loss = trained_by(strategy, accumulate, (PARAMS, accumulating.init(PARAMS)), MICROBATCHES)
    return params, loss


# --- accumulation in the step, by a scan over microbatches -------------------------------------------------------


def accumulate_in_scan_plain():
    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(mean_loss)(params, X, Y)
        return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), loss

    params = PARAMS
    for _ in range(2):
        params, loss = step(params)
    return params, loss


@program(accumulate_in_scan_plain, quick=("2",))
def accumulation_by_scan(strategy):
    with strategy.scope():
        params = replicax.as_variables(PARAMS)
        optimizer = replicax.Optimizer(optax.sgd(0.2))

    def step(x, y):
        micro = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (x, y))

        def loss_fn(params, x, y):
            return replicax.compute_average_loss(losses(params, x, y), global_batch_size=32)

        def body(carry, batch):
            return jax.tree.map(jnp.add, carry, replicax.value_and_grad(loss_fn, params)(params, *batch)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, replicax.as_arrays(params))
        (loss, grads), _ = lax.scan(body, zeros, micro)
        optimizer.apply_gradients(grads, params)
        return loss

    [(x, y)] = whole(strategy, X, Y)
    for _ in range(2):
        loss = strategy.run(step, args=(x, y))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)


# --- sharpness-aware minimization: two gradients a step ----------------------------------------------------------


def sharpness_aware(mean, params, x, y):
    loss, grads = mean(jax.value_and_grad(mean_loss)(params, x, y))
    scale = 0.05 / (optax.tree.norm(grads) + 1e-6)
    above = jax.tree.map(lambda p, g: p + scale * g, params, grads)
    grads = mean(jax.grad(mean_loss)(above, x, y))
    return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), loss


def sharpness_aware_plain():
    return trained(sharpness_aware, PARAMS)


@program(sharpness_aware_plain, quick=("2",))
def sharpness_aware_minimization(strategy):
    return trained_by(strategy, sharpness_aware, PARAMS)


@program(sharpness_aware_plain)
def sharpness_aware_minimization_of_variables(strategy):
    with strategy.scope():
        params = replicax.as_variables(PARAMS)
        optimizer = replicax.Optimizer(optax.sgd(0.2))

    def loss_fn(arrays, x, y):
        return replicax.compute_average_loss(losses(arrays, x, y))

    def step(x, y):
        ctx = replicax.get_replica_context()
        arrays = replicax.as_arrays(params)
        loss, grads = jax.value_and_grad(loss_fn)(arrays, x, y)
        grads = ctx.all_reduce("sum", grads)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-6)
        above = jax.tree.map(lambda p, g: p + scale * g, arrays, grads)
        optimizer.apply_gradients(jax.grad(loss_fn)(above, x, y), params)
        return loss

    [(x, y)] = whole(strategy, X, Y)
    for _ in range(3):
        loss = strategy.run(step, args=(x, y))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)


# --- averages of weights: exponential, and of the last steps ---------------------------------------------------


def averaging(mean, carry, x, y):
    params, state, ema, swa, count = carry
    loss, grads = mean(jax.value_and_grad(mean_loss)(params, x, y))
    updates, state = optax.sgd(0.3, momentum=0.5).update(grads, state)
    params = optax.apply_updates(params, updates)
    ema = optax.incremental_update(params, ema, 0.1)
    count = count + 1
    late = count > 2
    swa = jax.tree.map(lambda s, p: jnp.where(late, s + (p - s) / jnp.maximum(count - 2, 1), s), swa, params)
    return (params, state, ema, swa, count), loss


AVERAGING = PARAMS, optax.sgd(0.3, momentum=0.5).init(PARAMS), PARAMS, PARAMS, jnp.int32(0)


def averaging_plain():
    return trained(averaging, AVERAGING, [(X, Y)] * 4)


@program(averaging_plain)
def averages_of_weights(strategy):
    return trained_by(strategy, averaging, AVERAGING, [(X, Y)] * 4)


# --- a preconditioner of each side, whose roots are taken by eigenvectors --------------------------------------


def root(matrix):
    values, vectors = jnp.linalg.eigh(matrix + 1e-2 * jnp.eye(len(matrix)))
    return (vectors * values**-0.25) @ vectors.T


def shampoo(mean, carry, x, y):
    params, sides = carry
    loss, grads = mean(jax.value_and_grad(mean_loss)(params, x, y))

    def update(p, g, side):
        if p.ndim < 2:
            side = side + g**2
            return p - 0.1 * g / (jnp.sqrt(side) + 1e-2), side
        left, right = side[0] + g @ g.T, side[1] + g.T @ g
        return p - 0.1 * root(left) @ g @ root(right), (left, right)

    updated = {name: update(params[name], grads[name], sides[name]) for name in params}
    return tuple({name: pair[i] for name, pair in updated.items()} for i in range(2)), loss


def shampoo_start():
    sides = {
        name: tuple(jnp.zeros((size, size)) for size in p.shape) if p.ndim == 2 else jnp.zeros_like(p)
        for name, p in PARAMS.items()
    }
    return PARAMS, sides


def shampoo_plain():
    (params, _), loss = trained(shampoo, shampoo_start())
    return params, loss


# The roots of a nearly singular matrix multiply what rounding leaves in the gradients.
@program(shampoo_plain, rtol=1e-4)
def preconditioning_of_both_sides(strategy):
    (params, _), loss = trained_by(strategy, shampoo, shampoo_start())
    return params, loss


# --- federated averaging: clients are divided, each takes steps of its own --------------------------------------

CLIENTS_X, CLIENTS_Y = normal(8, 6, 4, seed=4), normal(8, 6, 2, seed=5)
SIZES = jnp.asarray([6.0, 3.0, 5.0, 6.0, 2.0, 4.0, 6.0, 1.0])


def local_training(params, x, y, size):
    """What a client changes in three steps on the ``size`` examples that it has."""

    def loss_fn(params):
        return (losses(params, x, y) * (jnp.arange(6) < size)).sum() / size

    def step(params, _):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params)), None

    after, _ = lax.scan(step, params, length=3)
    return jax.tree.map(lambda a, b: (a - b) * size, after, params)


server = optax.yogi(0.1)


def federated_round(total, carry, x, y, sizes):
    params, state = carry
    changes = jax.vmap(local_training, (None, 0, 0, 0))(params, x, y, sizes)
    summed, count = total((jax.tree.map(lambda c: c.sum(0), changes), sizes.sum()))
    updates, state = server.update(jax.tree.map(lambda s: -s / count, summed), state)
    return optax.apply_updates(params, updates), state


def federated_plain():
    carry = PARAMS, server.init(PARAMS)
    round_ = jax.jit(functools.partial(federated_round, itself))
    for _ in range(2):
        carry = round_(carry, CLIENTS_X, CLIENTS_Y, SIZES)
    return carry[0]


@program(federated_plain)
def federated_averaging(strategy):
    def total(value):
        return replicax.get_replica_context().all_reduce("sum", value)

    carry = PARAMS, server.init(PARAMS)
    [clients] = whole(strategy, CLIENTS_X, CLIENTS_Y, SIZES)
    for _ in range(2):
        carry = strategy.run(functools.partial(federated_round, total), args=(carry, *clients))
    return carry[0]


# --- model-agnostic meta-learning: tasks are divided ------------------------------------------------------------


def meta_loss(params, x, y):
    def adapted_loss(x, y):
        grads = jax.grad(mean_loss)(params, x[:3], y[:3])
        return mean_loss(jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), x[3:], y[3:])

    return jax.vmap(adapted_loss)(x, y)


def maml_plain():
    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(lambda p: meta_loss(p, CLIENTS_X, CLIENTS_Y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = PARAMS
    for _ in range(2):
        params, loss = step(params)
    return params, loss


@program(maml_plain, quick=("2",))
def model_agnostic_meta_learning(strategy):
    with strategy.scope():
        params = replicax.as_variables(PARAMS)
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x, y):
        def loss_fn(params):
            return replicax.compute_average_loss(meta_loss(params, x, y))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        return loss

    [(x, y)] = whole(strategy, CLIENTS_X, CLIENTS_Y)
    for _ in range(2):
        loss = strategy.run(step, args=(x, y))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)
