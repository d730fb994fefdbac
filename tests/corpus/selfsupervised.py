"""Representation learning: losses over the examples of all replicas, and teachers that follow or stay."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole

X = normal(16, 6)
LABELS = integers(4, 16)


def all_gather(value):
    return replicax.get_replica_context().all_gather(value, axis=0)


def unit(v):
    return v * lax.rsqrt(jnp.square(v).sum(-1, keepdims=True) + 1e-6)


# --- SimCLR: both views of all replicas are the negatives ------------------------------------------------------


class Projector(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return unit(self.last(nnx.relu(self.first(x))))


def augmented(x, keys):
    def view(row, key):
        return row + 0.2 * jax.random.normal(key, row.shape)

    keys = jax.random.wrap_key_data(keys)
    return jax.vmap(view)(x, keys[:, 0]), jax.vmap(view)(x, keys[:, 1])


def nt_xent(first, second, everyones, ids, own):
    """The loss of each example; ``everyones`` holds both views of all examples, of the numbers ``ids``."""
    losses = []
    for mine, other, view in ((first, second, 0), (second, first, 1)):
        logits = mine @ everyones.T / 0.5
        itself = (ids == own[:, None]) & (jnp.arange(len(ids)) // (len(ids) // 2) == view)
        positive = (mine * other).sum(-1) / 0.5
        losses.append(jax.nn.logsumexp(jnp.where(itself, -1e9, logits), axis=-1) - positive)
    return (losses[0] + losses[1]) / 2


def simclr_of():
    model = Projector(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.lars(0.1), wrt=nnx.Param)


VIEW_KEYS = jax.random.key_data(jax.random.split(jax.random.key(0), (16, 2)))


def simclr_plain():
    model, optimizer = simclr_of()

    @nnx.jit
    def step(model, optimizer, x, keys, ids):
        def loss_fn(model):
            first, second = (model(view) for view in augmented(x, keys))
            return nt_xent(first, second, jnp.concatenate([first, second]), jnp.tile(ids, 2), ids).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for _ in range(2):
        loss = step(model, optimizer, X, VIEW_KEYS, jnp.arange(16))
    return jax.tree.leaves(nnx.state(model, nnx.Param)), loss


@program(simclr_plain)
def contrastive_learning(strategy):
    with strategy.scope():
        model, optimizer = simclr_of()

    def step(model, optimizer, x, keys, ids):
        def loss_fn(model):
            first, second = (model(view) for view in augmented(x, keys))
            firsts, seconds, numbers = all_gather((first, second, ids))
            losses = nt_xent(first, second, jnp.concatenate([firsts, seconds]), jnp.tile(numbers, 2), ids)
            return replicax.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    [batch] = whole(strategy, X, VIEW_KEYS, jnp.arange(16))
    for _ in range(2):
        loss = strategy.run(step, args=(model, optimizer, *batch))
    return jax.tree.leaves(nnx.state(model, nnx.Param)), strategy.reduce("sum", loss)


# --- triplets: the hardest positive and negative of all replicas --------------------------------------------------


def triplet_losses(vectors, labels, others, other_labels):
    distances = jnp.sqrt(jnp.square(vectors[:, None] - others[None]).sum(-1) + 1e-4)
    same = labels[:, None] == other_labels
    positive = jnp.where(same, distances, -jnp.inf).max(-1)
    negative = jnp.where(same, jnp.inf, distances).min(-1)
    return jax.nn.softplus(positive - negative)


def embedding(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


EMBEDDING = {"w": normal(6, 8, seed=1), "v": normal(8, 3, seed=2)}


def triplet_plain():
    adam = optax.adam(1e-2)
    params, state = EMBEDDING, adam.init(EMBEDDING)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            vectors = embedding(params, X)
            return triplet_losses(vectors, LABELS, vectors, LABELS).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
    return params, loss


@program(triplet_plain, quick=("2",))
def metric_learning_with_triplets(strategy):
    adam = optax.adam(1e-2)
    params, state = EMBEDDING, adam.init(EMBEDDING)

    def step(params, state, x, labels):
        def loss_fn(params):
            vectors = embedding(params, x)
            return triplet_losses(vectors, labels, *all_gather((vectors, labels))).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    [(x, labels)] = whole(strategy, X, LABELS)
    for _ in range(3):
        params, state, loss = strategy.run(step, args=(params, state, x, labels))
    return params, loss


# --- distillation: a student of Equinox, whose teacher is a constant of the step -------------------------------------


def teacher_and_student():
    teacher = eqx.nn.MLP(6, 4, 8, 1, key=jax.random.key(0))
    student = eqx.nn.MLP(6, 4, 4, 1, key=jax.random.key(1))
    return teacher, student


def distillation_losses(student, teacher, x, labels, temperature=2.0):
    logits, target = jax.vmap(student)(x), lax.stop_gradient(jax.vmap(teacher)(x))
    soft = optax.kl_divergence(jax.nn.log_softmax(logits / temperature), jax.nn.softmax(target / temperature))
    hard = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return temperature**2 * 0.7 * soft + 0.3 * hard


def distillation_plain():
    teacher, student = teacher_and_student()
    tx = optax.adamw(1e-2)
    state = tx.init(eqx.filter(student, eqx.is_array))

    @eqx.filter_jit
    def step(student, state, x, labels):
        loss, grads = eqx.filter_value_and_grad(lambda s: distillation_losses(s, teacher, x, labels).mean())(student)
        updates, state = tx.update(grads, state, eqx.filter(student, eqx.is_array))
        return eqx.apply_updates(student, updates), state, loss

    for _ in range(3):
        student, state, loss = step(student, state, X, LABELS)
    return jax.tree.leaves(eqx.filter(student, eqx.is_array)), loss


@program(distillation_plain)
def distillation(strategy):
    teacher, student = teacher_and_student()
    tx = optax.adamw(1e-2)
    state = tx.init(eqx.filter(student, eqx.is_array))

    def step(student, state, x, labels):
        loss, grads = eqx.filter_value_and_grad(lambda s: distillation_losses(s, teacher, x, labels).mean())(student)
        loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))
        updates, state = tx.update(grads, state, eqx.filter(student, eqx.is_array))
        return eqx.apply_updates(student, updates), state, loss

    [(x, labels)] = whole(strategy, X, LABELS)
    for _ in range(3):
        student, state, loss = strategy.run(step, args=(student, state, x, labels))
    return jax.tree.leaves(eqx.filter(student, eqx.is_array)), loss


# --- BYOL: a target that is the average of what is trained, over time ------------------------------------------------


class Online(nn.Module):
    predict: bool = True

    @nn.compact
    def __call__(self, x):
        z = nn.Dense(4, name="project")(nn.relu(nn.Dense(8, name="encode")(x)))
        return unit(nn.Dense(4, name="predict")(z) if self.predict else z)


def byol_losses(params, target, x, keys):
    first, second = augmented(x, keys)
    wanted = lax.stop_gradient(Online(predict=False).apply({"params": target}, second))
    return 2 - 2 * (Online().apply({"params": params}, first) * wanted).sum(-1)


def without_prediction(params):
    return {name: params[name] for name in ("encode", "project")}


def byol_plain():
    params = Online().init(jax.random.key(0), X)["params"]
    target, tx = without_prediction(params), optax.sgd(0.1, momentum=0.9, nesterov=True)
    state = tx.init(params)

    @jax.jit
    def step(params, target, state):
        loss, grads = jax.value_and_grad(lambda p: byol_losses(p, target, X, VIEW_KEYS).mean())(params)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(without_prediction(params), target, 0.1), state, loss

    for _ in range(2):
        params, target, state, loss = step(params, target, state)
    return params, target, loss


@program(byol_plain)
def bootstrapped_targets(strategy):
    with strategy.scope():
        params = replicax.as_variables(Online().init(jax.random.key(0), X)["params"])
        target = replicax.as_variables(replicax.as_arrays(without_prediction(params)))
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9, nesterov=True))

    def step(x, keys):
        def loss_fn(params):
            return replicax.compute_average_loss(byol_losses(params, replicax.as_arrays(target), x, keys))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        trained = replicax.as_arrays(without_prediction(params))
        replicax.assign(
            target, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, replicax.as_arrays(target), trained)
        )
        return replicax.get_replica_context().all_reduce("sum", loss)

    [batch] = whole(strategy, X, VIEW_KEYS)
    for _ in range(2):
        loss = strategy.run(step, args=batch)
    return replicax.as_arrays(params), replicax.as_arrays(target), loss
