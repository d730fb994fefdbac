"""Programs of the corpus with a mistake that people make: an error or a warning, at the line, before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import replicax
from tests.conftest import strategy_of
from tests.corpus import (
    generative,
    graphs,
    implicit,
    inference,
    optimizers,
    populations,
    regularizers,
    reinforcement,
    sequences,
    vision,
)
from tests.corpus.corpus import whole
from tests.programs.programs import third_party

partial = functools.partial
MEAN = replicax.errors.ShareWarning, "step '(?!partial).*': this is a mean over one replica's own examples"
TWICE = replicax.errors.ShareWarning, "adds up over the replicas what they have added up already"
DIFFERS = replicax.errors.LocalityError, "it differs between replicas"
DEADLOCK = replicax.errors.DeadlockError, "what decides differs between replicas"
MISTAKES: list[Any] = []


def mistake(told: tuple[type[Exception], str]) -> Callable[[Any], Any]:
    """Register a function of a strategy, which traces a step, and by what the mistake is told."""

    def register(fn: Callable[[replicax.Strategy], None]) -> Any:
        MISTAKES.append(pytest.param(fn, *told, id=fn.__name__))
        return fn

    return register


@pytest.mark.parametrize(("trace", "error", "text"), MISTAKES)
@third_party
def test_mistake_is_told(trace: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        trace(strategy_of(4))


def summed(value):
    return replicax.get_replica_context().all_reduce("sum", value)


def of_this_replica(value):
    return value


# --- the loss of one device, left as it was -----------------------------------------------------------------


@mistake(MEAN)
def a_flow_by_its_mean_loss(strategy):
    [(x,)] = whole(strategy, inference.POINTS)
    strategy.extended.trace(partial(inference.flow_step, jnp.mean), args=(*inference.flow_of(), x))


@mistake(MEAN)
def a_language_model_by_its_mean_loss(strategy):
    [(tokens,)] = whole(strategy, sequences.TOKENS)
    strategy.extended.trace(partial(sequences.lstm_step, jnp.mean), args=(*sequences.lstm_of(), tokens))


@mistake(MEAN)
def a_detector_by_the_matches_of_one_replica(strategy):
    [batch] = whole(strategy, vision.IMAGES, vision.BOXES, vision.KINDS)
    strategy.extended.trace(partial(vision.detection_step, of_this_replica), args=(*vision.detector_of(), *batch))


# --- means that are summed ----------------------------------------------------------------------------------


@mistake(MEAN)
def the_sum_of_the_gradients_of_means(strategy):
    params, state = reinforcement.actor_critic()
    [batch] = whole(strategy, reinforcement.STARTS, reinforcement.KEYS)
    strategy.extended.trace(partial(reinforcement.ppo_step, summed), args=(params, state, *batch))


@mistake(MEAN)
def the_sum_of_the_gradients_at_an_equilibrium(strategy):
    params, state = implicit.deep_equilibrium_start()
    [batch] = whole(strategy, implicit.X, implicit.TARGETS)
    strategy.extended.trace(partial(implicit.deep_equilibrium_step, summed), args=(params, state, *batch))


@mistake(MEAN)
def the_sum_of_the_gradients_of_quantized_layers(strategy):
    [batch] = whole(strategy, regularizers.X, regularizers.LABELS)
    step = partial(regularizers.quantized_step, summed, summed)
    strategy.extended.trace(step, args=(regularizers.LAYERS, jnp.float32(2), *batch))


# --- reductions that are missing ------------------------------------------------------------------------------


@mistake(DIFFERS)
def a_codebook_of_each_replica(strategy):
    with strategy.scope():
        book = replicax.as_variables(generative.CODES)

    def step(x):
        _, (z, hot) = generative.vq_losses(generative.WEIGHTS, book["codes"].value, x)
        replicax.assign(book, generative.moved(replicax.as_arrays(book), z, hot, of_this_replica))

    [(x,)] = whole(strategy, generative.X)
    strategy.extended.trace(step, args=(x,))


@mistake(DIFFERS)
def what_each_replica_learns_of_the_arms(strategy):
    with strategy.scope():
        A = replicax.Variable(jnp.tile(jnp.eye(2), (3, 1, 1)))

    def step(contexts):
        arms, rewards = jax.vmap(populations.choose, (None, None, 0))(A.value, jnp.zeros((3, 2)), contexts)
        A.assign_add(jax.vmap(populations.evidence)(contexts, arms, rewards)[0].sum(0))

    [(contexts,)] = whole(strategy, populations.CONTEXTS[0])
    strategy.extended.trace(step, args=(contexts,))


@mistake((AttributeError, "asks an array for 'assign', which variables have.*replicax.assign"))
def a_target_that_is_assigned_leaf_by_leaf(strategy):
    with strategy.scope():
        target = replicax.as_variables(reinforcement.Q)

    def step():
        for leaf in jax.tree.leaves(target):
            leaf.assign(0.9 * leaf)

    strategy.extended.trace(step)


@mistake(DEADLOCK)
def ranks_until_each_replica_has_enough(strategy):
    def rank(senders, receivers):
        def going(carry):
            return jnp.abs(carry[1] - carry[0]).sum() > 1e-6

        def advance(carry):
            summed(carry[1])
            return carry[1], graphs.pulled(carry[1], senders, receivers)

        return lax.while_loop(going, advance, (jnp.zeros(6), jnp.full(6, 1 / 6)))

    [(senders, receivers)] = whole(strategy, graphs.FROM, graphs.TO)
    strategy.extended.trace(rank, args=(senders, receivers))


@mistake(DEADLOCK)
def validation_on_the_examples_of_one_replica(strategy):
    def mean(value):  # of gradients alone
        ctx = replicax.get_replica_context()
        return ctx.all_reduce("mean", value) if isinstance(value, dict) else value

    batch = regularizers.X, regularizers.LABELS
    [divided] = whole(strategy, *batch, *batch)
    strategy.extended.trace(partial(regularizers.train_until, mean), args=(regularizers.LAYERS, *divided))


# --- counted more than once -----------------------------------------------------------------------------------


@mistake(TWICE)
def gradients_that_are_summed_twice(strategy):
    def step(params, x, y):
        def loss_fn(params):
            return replicax.compute_average_loss(optimizers.losses(params, x, y))

        grads = summed(summed(jax.grad(loss_fn)(params)))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    [batch] = whole(strategy, optimizers.X, optimizers.Y)
    strategy.extended.trace(step, args=(optimizers.PARAMS, *batch))
