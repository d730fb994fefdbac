"""Equinox under strategies: modules as arguments, modules of variables, and their states."""

from __future__ import annotations

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.programs.programs import third_party

X = np.random.default_rng(0).normal(size=(8, 2, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, 8).astype(np.int32)
EXECUTORS = pytest.mark.parametrize("executor", ["compiled", "per_replica"])


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout
    scale: float
    activation: Callable
    table: np.ndarray

    def __init__(self, seed, scale=2.0):
        self.linear = eqx.nn.Linear(6, 4, key=jax.random.key(seed))
        self.drop = eqx.nn.Dropout(0.0)
        self.scale = scale
        self.activation = jnp.tanh
        self.table = np.ones(4, np.float32)

    def __call__(self, x):
        h = self.drop(jax.vmap(self.linear)(x))
        return self.activation(h) * self.scale if self.scale > 1 else h + self.table


@EXECUTORS
@third_party
def test_a_module_is_taken_as_filter_jit_takes_it(pair, executor) -> None:
    options = replicax.RunOptions(executor)
    for module in (Scaled(0), Scaled(1), Scaled(0, 0.5)):
        found = pair.run(lambda module, x: module(x), args=(module, X[:, 0]), options=options)
        np.testing.assert_allclose(found, module(X[:, 0]), rtol=1e-5, atol=1e-6)


@third_party
def test_static_leaves_are_compared_by_value(pair) -> None:
    traced = []

    def step(module, x, factor):
        traced.append(module.scale)
        return module(x) * factor

    for module in (Scaled(0), Scaled(1), Scaled(0, 3.0), Scaled(2), eqx.nn.inference_mode(Scaled(0))):
        for factor in (1.0, 2.0):  # a number that is no module's is traced
            pair.run(step, args=({"module": module}["module"], X[:, 0], factor))
    assert traced == [2.0, 3.0, 2.0]


class Net(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, axis, key):
        a, b = jax.random.split(key)
        self.conv = eqx.nn.Conv1d(2, 3, 2, key=a)
        self.norm = eqx.nn.BatchNorm(3, axis_name=axis, mode="batch", momentum=0.9)
        self.last = eqx.nn.Linear(15, 4, key=b)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.last(jax.nn.relu(x).ravel()), state


def loss_of(model, state, x, y, average):
    forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = forward(x, state)
    return average(optax.softmax_cross_entropy_with_integer_labels(logits, y)), state


@functools.cache
@third_party
def trained_alone():
    model, state = eqx.nn.make_with_state(Net)("batch", jax.random.key(0))
    tx = optax.sgd(0.1, momentum=0.9)
    opt_state, losses = tx.init(eqx.filter(model, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(model, state, opt_state):
        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state, X, Y, jnp.mean)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    for _ in range(4):
        model, state, opt_state, loss = step(model, state, opt_state)
        losses.append(float(loss))
    return losses, jax.tree.leaves(state), jax.tree.leaves(eqx.filter(model, eqx.is_array))


@pytest.mark.parametrize("replicas", [*(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4)), 2])
@third_party
def test_batch_statistics_of_all_replicas(replicas) -> None:
    losses, statistics, parameters = trained_alone()
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    model, state = eqx.nn.make_with_state(Net)(("batch", replicax.REPLICA_AXIS), jax.random.key(0))
    with strategy.scope():
        model, state = replicax.as_variables(model), replicax.as_variables(state)
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(x, y):
        gradient = replicax.value_and_grad(loss_of, model, has_aux=True)
        (loss, new), grads = gradient(model, replicax.as_arrays(state), x, y, replicax.compute_average_loss)
        optimizer.apply_gradients(grads, model)
        replicax.assign(state, new)
        return replicax.get_replica_context().all_reduce("sum", loss)

    found = [float(strategy.run(step, args=b)) for b in strategy.distribute_dataset([(X, Y)] * 4)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(replicax.as_arrays(state)), statistics, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(eqx.filter(replicax.as_arrays(model), eqx.is_array)), parameters, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert strategy.extended.trace_count(step) == 1


@third_party
def test_batch_statistics_of_each_replica_are_averaged(pair) -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch", momentum=0.5)
    forward = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    with pair.scope():
        live = replicax.as_variables(state, aggregation="mean")

    def step(x):
        _, new = forward(x, replicax.as_arrays(live))
        replicax.assign(live, new)

    [batch] = pair.distribute_dataset([X[:, :, 0]])
    pair.run(step, args=(batch,))
    alone = eqx.filter_jit(forward)
    halves = [jax.tree.leaves(alone(part, state)[1]) for part in (X[:4, :, 0], X[4:, :, 0])]
    for found, *parts in zip(jax.tree.leaves(replicax.as_arrays(live)), *halves, strict=True):
        np.testing.assert_allclose(found, np.mean(parts, 0), rtol=1e-5)

    without = replicax.as_variables  # no aggregation: replicas must agree
    with pair.scope():
        strict = without(state, name="strict")
    with pytest.raises(replicax.errors.LocalityError, match="'strict/.*differs between replicas"):
        pair.run(lambda x: replicax.assign(strict, forward(x, replicax.as_arrays(strict))[1]), args=(batch,))


@third_party
def test_spectral_norm(pair) -> None:
    layer, state = eqx.nn.make_with_state(
        lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(6, 4, key=key), "weight", key=key)
    )(jax.random.key(0))
    with pair.scope():
        live = replicax.as_variables(state)

    def step(layer, x):
        y, new = layer(x, replicax.as_arrays(live))
        replicax.assign(live, new)
        return y

    alone = eqx.filter_jit(lambda layer, x, state: layer(x, state))
    for _ in range(2):
        found = pair.run(step, args=(layer, X[0, 0]))
        expected, state = alone(layer, X[0, 0], state)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(replicax.as_arrays(live)), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@third_party
def test_a_module_with_functions_is_saved(pair, tmp_path) -> None:
    with pair.scope():
        model = replicax.as_variables(eqx.nn.MLP(6, 4, 16, 2, key=jax.random.key(0)))
        optimizer = replicax.Optimizer(optax.adam(0.01))

    def step(batch):
        def loss_fn(model):
            return replicax.compute_average_loss(jax.vmap(model)(batch).sum(-1))

        share, grads = replicax.value_and_grad(loss_fn, model)(model)
        optimizer.apply_gradients(grads, model)
        return share

    batches = pair.distribute_dataset([X[:, 0]])
    replicax.train(step, batches, steps=2, checkpoints=tmp_path, progress=False)
    weight = model.layers[0].weight.numpy()
    model.layers[0].weight.assign(0 * weight)
    assert replicax.train(step, batches, steps=2, checkpoints=tmp_path, progress=False).resumed_at == 2
    np.testing.assert_array_equal(model.layers[0].weight, weight)


@third_party
def test_a_mean_that_equinox_differentiates(pair) -> None:
    with pair.scope():
        model = replicax.as_variables(eqx.nn.MLP(6, 4, 16, 2, key=jax.random.key(0)))
        optimizer = replicax.Optimizer(optax.adam(0.01))

    def step(x, y, average):
        def loss_fn(arrays):
            return average(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(arrays)(x), y))

        optimizer.apply_gradients(eqx.filter_grad(loss_fn)(replicax.as_arrays(model)), model)

    [batch] = pair.distribute_dataset([(X[:, 0], Y)])
    with pytest.warns(replicax.errors.ShareWarning, match="a mean over one replica's own examples"):
        pair.run(step, args=(*batch, jnp.mean))
    pair.run(step, args=(*batch, replicax.compute_average_loss))
