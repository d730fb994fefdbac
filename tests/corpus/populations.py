"""Evolution and bandits: replicas divide a population, or the arms and their rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

# --- evolution strategies: seeds are divided, noise is made where it is used ------------------------------------


def fitness(theta):
    return -jnp.square(theta - jnp.arange(4.0)).sum() + jnp.cos(3 * theta).sum()


def perturbation(seed):
    return jax.random.normal(jax.random.key(seed), (4,))


def centred_ranks(scores):
    return scores.argsort().argsort() / (len(scores) - 1) - 0.5


def evolution_plain():
    @jax.jit
    def generation(theta, seeds):
        noise = jax.vmap(perturbation)(seeds)
        both = jnp.concatenate([theta + 0.1 * noise, theta - 0.1 * noise])
        scores = jax.vmap(fitness)(both)
        plus, minus = jnp.split(centred_ranks(scores), 2)
        return theta + 0.5 * (plus - minus) @ noise / len(seeds), scores.max()

    theta = jnp.zeros(4)
    for i in range(4):
        theta, best = generation(theta, 8 * i + jnp.arange(8))
    return theta, best


@program(evolution_plain, quick=("2",))
def evolution_strategies(strategy):
    def generation(theta, seeds):
        ctx = replicax.get_replica_context()
        noise = jax.vmap(perturbation)(seeds)
        scores = jnp.stack([jax.vmap(fitness)(theta + 0.1 * noise), jax.vmap(fitness)(theta - 0.1 * noise)])
        everyones, everyones_noise = ctx.all_gather((scores.T, noise), axis=0)
        plus, minus = jnp.split(centred_ranks(everyones.T.ravel()), 2)
        return theta + 0.5 * (plus - minus) @ everyones_noise / len(everyones), everyones.max()

    theta = jnp.zeros(4)
    for i in range(4):
        [(seeds,)] = whole(strategy, 8 * i + jnp.arange(8))
        theta, best = strategy.run(generation, args=(theta, seeds))
    return theta, best


# --- a linear bandit: the replicas' users share what has been learnt of the arms -----------------------------------

CONTEXTS = normal(3, 8, 2)
ARMS = jnp.asarray(normal(3, 2, seed=1))


def choose(A, b, context):
    theta = jnp.linalg.solve(A, b[..., None])[..., 0]
    widths = jnp.sqrt(jnp.einsum("d,ade,e->a", context, jnp.linalg.inv(A), context))
    arm = (theta @ context + 0.5 * widths).argmax()
    return arm, ARMS[arm] @ context


def evidence(context, arm, reward):
    hot = jax.nn.one_hot(arm, 3)
    return hot[:, None, None] * jnp.outer(context, context), hot[:, None] * context * reward


def bandit_plain():
    @jax.jit
    def round_(A, b, contexts):
        arms, rewards = jax.vmap(choose, (None, None, 0))(A, b, contexts)
        dA, db = jax.vmap(evidence)(contexts, arms, rewards)
        return A + dA.sum(0), b + db.sum(0), (ARMS @ contexts.T).max(0).sum() - rewards.sum()

    A, b, regret = jnp.tile(jnp.eye(2), (3, 1, 1)), jnp.zeros((3, 2)), 0.0
    for contexts in CONTEXTS:
        A, b, lost = round_(A, b, contexts)
        regret += lost
    return A, b, regret


@program(bandit_plain)
def linear_bandit(strategy):
    with strategy.scope():
        A = replicax.Variable(jnp.tile(jnp.eye(2), (3, 1, 1)), aggregation="sum")
        b = replicax.Variable(jnp.zeros((3, 2)), aggregation="sum")
        regret = replicax.Variable(0.0, synchronization="on_read", aggregation="sum")

    def round_(contexts):
        arms, rewards = jax.vmap(choose, (None, None, 0))(A.value, b.value, contexts)
        dA, db = jax.vmap(evidence)(contexts, arms, rewards)
        A.assign_add(dA.sum(0))
        b.assign_add(db.sum(0))
        regret.assign_add((ARMS @ contexts.T).max(0).sum() - rewards.sum())

    for contexts in strategy.distribute_dataset(list(CONTEXTS)):
        strategy.run(round_, args=(contexts,))
    return A.value, b.value, regret.value


# --- Thompson sampling: arms that are divided ---------------------------------------------------------------------


def thompson_plain():
    chances = jax.nn.sigmoid(normal(8))

    @jax.jit
    def play(key):
        def round_(counts, key):
            draws = jax.vmap(lambda i, ab: jax.random.beta(jax.random.fold_in(key, i), *ab))(jnp.arange(8), counts)
            arm = draws.argmax()
            won = jax.random.bernoulli(jax.random.fold_in(key, 99), chances[arm])
            return counts + jax.nn.one_hot(arm, 8)[:, None] * jnp.stack([won, ~won]), arm

        return lax.scan(round_, jnp.ones((8, 2)), jax.random.split(key, 5))

    return play(jax.random.key(3))


@program(thompson_plain)
def thompson_sampling_with_divided_arms(strategy):
    def play(key, arms, chances):
        ctx = replicax.get_replica_context()

        def round_(counts, key):
            draws = jax.vmap(lambda i, ab: jax.random.beta(jax.random.fold_in(key, i), *ab))(arms, counts)
            everyones, everyones_chances = ctx.all_gather((draws, chances), axis=0)
            arm = everyones.argmax()
            won = jax.random.bernoulli(jax.random.fold_in(key, 99), everyones_chances[arm])
            return counts + (arms == arm)[:, None] * jnp.stack([won, ~won]), arm

        return lax.scan(round_, jnp.ones((len(arms), 2)), jax.random.split(key, 5))

    [(arms, chances)] = whole(strategy, jnp.arange(8), jax.nn.sigmoid(normal(8)))
    counts, chosen = strategy.run(play, args=(jax.random.key(3), arms, chances))
    return strategy.gather(counts, axis=0), chosen
