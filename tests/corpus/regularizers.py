"""Tricks of training: noise, mixtures of examples, small adapters, fewer bits, order, and when to stop."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole

X, LABELS = normal(16, 4), integers(3, 16)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# --- label smoothing and mixup: partners come from the whole batch, as the host has shuffled it ------------------

ORDER = np.random.default_rng(4).permutation(16)
SHARES = np.random.default_rng(5).beta(2.0, 2.0, 16).astype(np.float32)[:, None]


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.gelu(self.norm(self.first(x))))


def classifier_of():
    model = Classifier(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-2, 2, 6)
    return model, nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.1), wrt=nnx.Param)


def mixup_step(average, model, optimizer, x, labels, other_x, other_labels, share):
    def loss_fn(model):
        soft = [optax.smooth_labels(jax.nn.one_hot(each, 3), 0.1) for each in (labels, other_labels)]
        logits = model(share * x + (1 - share) * other_x)
        return average(optax.softmax_cross_entropy(logits, share * soft[0] + (1 - share) * soft[1]))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


MIXED = X, LABELS, X[ORDER], LABELS[ORDER], SHARES


def mixup_plain():
    model, optimizer = classifier_of()
    step = nnx.jit(functools.partial(mixup_step, jnp.mean))
    losses = [step(model, optimizer, *MIXED) for _ in range(3)]
    return jax.tree.leaves(nnx.state(model, nnx.Param)), losses


@program(mixup_plain)
def mixup_with_smoothed_labels(strategy):
    with strategy.scope():
        model, optimizer = classifier_of()
    step = functools.partial(mixup_step, replicax.compute_average_loss)
    [batch] = whole(strategy, *MIXED)
    losses = [strategy.reduce("sum", strategy.run(step, args=(model, optimizer, *batch))) for _ in range(3)]
    return jax.tree.leaves(nnx.state(model, nnx.Param)), losses


# --- dropout whose mask belongs to the example, not to the replica ------------------------------------------------


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.3, deterministic=False)(nn.relu(nn.Dense(8)(x)))
        return nn.Dense(3)(h)


def initial_dropped():
    return jax.jit(Dropped().init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)


def dropped_losses(params, key, x, labels, places):
    def logits(row, place):
        return Dropped().apply(params, row, rngs={"dropout": jax.random.fold_in(key, place)})

    return cross_entropy(jax.vmap(logits)(x, places), labels)


def dropout_plain():
    params, key = initial_dropped(), jax.random.key(2)

    @jax.jit
    def step(params, key):
        key, used = jax.random.split(key)
        loss, grads = jax.value_and_grad(lambda p: dropped_losses(p, used, X, LABELS, jnp.arange(16)).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key, loss

    for _ in range(2):
        params, key, loss = step(params, key)
    return params, loss


@program(dropout_plain, quick=("2",))
def dropout_by_example(strategy):
    params, key = initial_dropped(), jax.random.key(2)

    def step(params, key, x, labels):
        ctx = replicax.get_replica_context()
        key, used = jax.random.split(key)
        places = ctx.replica_id_in_sync_group * len(x) + jnp.arange(len(x))
        loss, grads = jax.value_and_grad(lambda p: dropped_losses(p, used, x, labels, places).mean())(params)
        loss, grads = ctx.all_reduce("mean", (loss, grads))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key, loss

    [(x, labels)] = whole(strategy, X, LABELS)
    for _ in range(2):
        params, key, loss = strategy.run(step, args=(params, key, x, labels))
    return params, loss


# --- low-rank adapters: what is frozen is no variable that is trained ----------------------------------------------


class Adapted(eqx.Module):
    weight: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True, default=2.0)

    def __call__(self, x):
        return lax.stop_gradient(self.weight) @ x + self.scale * self.b @ (self.a @ x)


class AdaptedNet(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            Adapted(jax.random.normal(key, (o, i)) / 2, jax.random.normal(low, (2, i)) / 2, jnp.zeros((o, 2)))
            for (o, i), key, low in zip([(6, 4), (3, 6)], keys[:2], keys[2:], strict=True)
        ]

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def is_adapter(net):
    mask = jax.tree.map(lambda _: True, net)
    return eqx.tree_at(lambda m: [layer.weight for layer in m.layers], mask, [False, False])


def adapter_plain():
    trained, frozen = eqx.partition(AdaptedNet(jax.random.key(0)), is_adapter(AdaptedNet(jax.random.key(0))))
    tx = optax.adam(5e-2)
    state = tx.init(trained)

    @eqx.filter_jit
    def step(trained, state):
        def loss_fn(trained):
            return cross_entropy(jax.vmap(eqx.combine(trained, frozen))(X), LABELS).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(trained)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(trained, updates), state, loss

    for _ in range(3):
        trained, state, loss = step(trained, state)
    return jax.tree.leaves(trained), loss


@program(adapter_plain)
def low_rank_adapters(strategy):
    net = AdaptedNet(jax.random.key(0))
    trained, frozen = eqx.partition(net, is_adapter(net))
    with strategy.scope():
        trained = replicax.as_variables(trained)
        optimizer = replicax.Optimizer(optax.adam(5e-2))

    def step(x, labels):
        def loss_fn(trained):
            return replicax.compute_average_loss(cross_entropy(jax.vmap(eqx.combine(trained, frozen))(x), labels))

        loss, grads = replicax.value_and_grad(loss_fn, trained)(trained)
        optimizer.apply_gradients(grads, trained)
        return loss

    [(x, labels)] = whole(strategy, X, LABELS)
    for _ in range(3):
        loss = strategy.run(step, args=(x, labels))
    return jax.tree.leaves(replicax.as_arrays(trained)), strategy.reduce("sum", loss)


# --- quantization-aware training: straight through the rounding, with a range over all examples ---------------------


@jax.custom_vjp
def fake_quantized(w, top):
    return jnp.round(jnp.clip(w / top, -1, 1) * 7) / 7 * top


def fake_quantized_forward(w, top):
    return fake_quantized(w, top), (w, top)


def fake_quantized_backward(residuals, g):
    w, top = residuals
    return jnp.where(jnp.abs(w) <= top, g, 0.0), jnp.zeros_like(top)


fake_quantized.defvjp(fake_quantized_forward, fake_quantized_backward)

LAYERS = {"w": normal(4, 6, seed=6) * 0.5, "v": normal(6, 3, seed=7) * 0.5}


def quantized_step(mean, largest, params, top, x, labels):
    """``top`` is a moving average of the largest activation."""

    def loss_fn(params):
        h = jax.nn.relu(x @ fake_quantized(params["w"], jnp.abs(params["w"]).max()))
        quantized = h + lax.stop_gradient(jnp.round(h / top * 7).clip(0, 7) / 7 * top - h)
        return cross_entropy(
            quantized @ fake_quantized(params["v"], jnp.abs(params["v"]).max()), labels
        ).mean(), h.max()

    (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    loss, grads = mean((loss, grads))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), 0.9 * top + 0.1 * largest(seen), loss


def quantized_plain():
    step = jax.jit(functools.partial(quantized_step, lambda v: v, lambda v: v))
    params, top = LAYERS, jnp.float32(2.0)
    for _ in range(3):
        params, top, loss = step(params, top, X, LABELS)
    return params, top, loss


@program(quantized_plain)
def quantization_aware_training(strategy):
    def mean(value):
        return replicax.get_replica_context().all_reduce("mean", value)

    def largest(value):
        return replicax.get_replica_context().all_gather(value[None], axis=0).max()

    step = functools.partial(quantized_step, mean, largest)
    [(x, labels)] = whole(strategy, X, LABELS)
    params, top = LAYERS, jnp.float32(2.0)
    for _ in range(3):
        params, top, loss = strategy.run(step, args=(params, top, x, labels))
    return params, top, loss


# --- a curriculum: the easier part of the whole batch, by the losses of all ------------------------------------------


def curriculum_step(everyone, total, params, fraction, x, labels):
    def loss_fn(params):
        losses = cross_entropy(jnp.tanh(x @ params["w"]) @ params["v"], labels)
        threshold = jnp.quantile(everyone(lax.stop_gradient(losses)), fraction)
        easy = lax.stop_gradient(losses <= threshold)
        return (losses * easy).sum() / total(easy.sum()), easy

    (loss, easy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    loss, grads = total((loss, grads))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, easy


def curriculum_plain():
    step = jax.jit(functools.partial(curriculum_step, lambda v: v, lambda v: v))
    params = LAYERS
    for fraction in (0.3, 0.6, 1.0):
        params, loss, easy = step(params, fraction, X, LABELS)
    return params, loss, easy


@program(curriculum_plain)
def curriculum_of_the_easier_examples(strategy):
    def everyone(value):
        return replicax.get_replica_context().all_gather(value, axis=0)

    def total(value):
        return replicax.get_replica_context().all_reduce("sum", value)

    step = functools.partial(curriculum_step, everyone, total)
    [(x, labels)] = whole(strategy, X, LABELS)
    params = LAYERS
    for fraction in (0.3, 0.6, 1.0):
        params, loss, easy = strategy.run(step, args=(params, fraction, x, labels))
    return params, loss, strategy.gather(easy, axis=0)


# --- early stopping inside the step: epochs in a while_loop, until validation gets no better --------------------------


def train_until(mean, params, x, labels, valid_x, valid_labels):
    def loss_fn(params, x, labels):
        return cross_entropy(jnp.tanh(x @ params["w"]) @ params["v"], labels).mean()

    def going(carry):
        _, _, _, patience, epoch = carry
        return (patience < 2) & (epoch < 12)

    def epoch(carry):
        params, best_params, best, patience, count = carry
        grads = mean(jax.grad(loss_fn)(params, x, labels))
        params = jax.tree.map(lambda p, g: p - 1.5 * g, params, grads)
        loss = mean(loss_fn(params, valid_x, valid_labels))
        better = loss < best
        best_params = jax.tree.map(lambda new, old: jnp.where(better, new, old), params, best_params)
        return params, best_params, jnp.where(better, loss, best), jnp.where(better, 0, patience + 1), count + 1

    _, best_params, best, _, epochs = lax.while_loop(going, epoch, (params, params, jnp.inf, 0, 0))
    return best_params, best, epochs


VALIDATION = normal(8, 4, seed=8), integers(3, 8, seed=9)


def early_stopping_plain():
    return jax.jit(functools.partial(train_until, lambda v: v))(LAYERS, X, LABELS, *VALIDATION)


@program(early_stopping_plain)
def early_stopping_in_a_loop(strategy):
    def mean(value):
        return replicax.get_replica_context().all_reduce("mean", value)

    [batch], [validation] = whole(strategy, X, LABELS), whole(strategy, *VALIDATION)
    return strategy.run(functools.partial(train_until, mean), args=(LAYERS, *batch, *validation))
