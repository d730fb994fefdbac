"""Reinforcement learning: replicas divide environments, episodes or what is replayed."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole
from tests.corpus.implicit import conjugate_gradients

STATES, ACTIONS, T = 3, 4, 5


def mean_of_all(value):
    return replicax.get_replica_context().all_reduce("mean", value)


def environment(state, action):
    """A point that is pushed along one of its axes, or not at all."""
    push = jnp.concatenate([jnp.eye(STATES), jnp.zeros((1, STATES))])[action]
    following = 0.9 * state + 0.3 * push
    return following, -jnp.square(following - 0.5).sum()


def unroll(policy, start, key):
    """One episode: states, actions and rewards of ``T`` steps."""

    def step(state, key):
        action = jax.random.categorical(key, policy(state))
        following, reward = environment(state, action)
        return following, (state, action, reward)

    last, episode = lax.scan(step, start, jax.random.split(key, T))
    return *episode, last


STARTS = normal(8, STATES)
KEYS = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 8)))


# --- proximal policy optimization, with generalized advantages that are normalized over all replicas -----------


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, state):
        h = nn.tanh(nn.Dense(8)(state))
        return nn.Dense(ACTIONS)(h), nn.Dense(1)(h)[..., 0]


def advantages(values, rewards, last_value, gamma=0.95, decay=0.9):
    def step(carry, inputs):
        advantage, following = carry
        value, reward = inputs
        advantage = reward + gamma * following - value + gamma * decay * advantage
        return (advantage, value), advantage

    return lax.scan(step, (jnp.zeros_like(last_value), last_value), (values, rewards), reverse=True)[1]


def collected(params, starts, keys):
    def episode(start, key):
        states, actions, rewards, last = unroll(lambda s: ActorCritic().apply(params, s)[0], start, key)
        logits, values = ActorCritic().apply(params, states)
        found = advantages(values, rewards, ActorCritic().apply(params, last)[1])
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], -1)[:, 0]
        return states, actions, log_probs, found, found + values

    return jax.vmap(episode)(starts, jax.random.wrap_key_data(keys))


def ppo_loss(params, states, actions, old, advantage, returns):
    logits, values = ActorCritic().apply(params, states)
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0] - old)
    clipped = jnp.clip(ratio, 0.9, 1.1)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    loss = -jnp.minimum(ratio * advantage, clipped * advantage) + 0.5 * jnp.square(values - returns) - 0.01 * entropy
    return loss.mean()


def ppo_step(mean, params, state, starts, keys):
    states, actions, old, advantage, returns = collected(params, starts, keys)
    first, second = mean((advantage.mean(), jnp.square(advantage).mean()))
    advantage = (advantage - first) / jnp.sqrt(second - first**2 + 1e-4)
    for _ in range(2):
        loss, grads = mean(jax.value_and_grad(ppo_loss)(params, states, actions, old, advantage, returns))
        updates, state = ppo_optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
    return params, state, loss


ppo_optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


def actor_critic():
    params = jax.jit(ActorCritic().init)(jax.random.key(0), STARTS[0])
    return params, ppo_optimizer.init(params)


def ppo_plain():
    params, state = actor_critic()
    step = jax.jit(functools.partial(ppo_step, lambda value: value))
    for _ in range(2):
        params, state, loss = step(params, state, STARTS, KEYS)
    return params, loss


@program(ppo_plain)
def proximal_policy_optimization(strategy):
    params, state = actor_critic()
    step = functools.partial(ppo_step, mean_of_all)
    [(starts, keys)] = whole(strategy, STARTS, KEYS)
    for _ in range(2):
        params, state, loss = strategy.run(step, args=(params, state, starts, keys))
    return params, loss


# --- advantage actor-critic in the style of NNX -------------------------------------------------------------------


class Policy(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(STATES, 8, rngs=rngs)
        self.actor = nnx.Linear(8, ACTIONS, rngs=rngs)
        self.critic = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, state):
        h = nnx.relu(self.hidden(state))
        return self.actor(h), self.critic(h)[..., 0]


def a2c_of():
    policy = Policy(nnx.Rngs(0))
    return policy, nnx.Optimizer(policy, optax.rmsprop(1e-2, eps=1e-2), wrt=nnx.Param)


def a2c_step(average, policy, optimizer, starts, keys):
    def loss_fn(policy):
        def episode(start, key):
            states, actions, rewards, _ = lax.stop_gradient(unroll(lambda s: policy(s)[0], start, key))
            logits, values = policy(states)
            _, returns = lax.scan(lambda later, r: (r + 0.9 * later,) * 2, jnp.float32(0), rewards, reverse=True)
            advantage = lax.stop_gradient(returns - values)
            log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], -1)[:, 0]
            return (-log_probs * advantage + 0.5 * jnp.square(returns - values)).sum(), rewards.sum()

        losses, rewards = jax.vmap(episode)(starts, jax.random.wrap_key_data(keys))
        return average(losses), rewards

    (loss, rewards), grads = nnx.value_and_grad(loss_fn, has_aux=True)(policy)
    optimizer.update(policy, grads)
    return loss, rewards


def a2c_plain():
    policy, optimizer = a2c_of()
    step = nnx.jit(functools.partial(a2c_step, jnp.mean))
    for _ in range(2):
        loss, rewards = step(policy, optimizer, STARTS, KEYS)
    return jax.tree.leaves(nnx.state(policy, nnx.Param)), loss, rewards


@program(a2c_plain)
def advantage_actor_critic(strategy):
    with strategy.scope():
        policy, optimizer = a2c_of()
    step = functools.partial(a2c_step, replicax.compute_average_loss)
    [(starts, keys)] = whole(strategy, STARTS, KEYS)
    for _ in range(2):
        loss, rewards = strategy.run(step, args=(policy, optimizer, starts, keys))
    return jax.tree.leaves(nnx.state(policy, nnx.Param)), strategy.reduce("sum", loss), strategy.gather(rewards, axis=0)


# --- deep Q-learning: a buffer on the host, and a target that follows ----------------------------------------------


class ReplayBuffer:
    def __init__(self, size=32):
        rng = np.random.default_rng(0)
        self.state, self.following = (rng.normal(size=(size, STATES)).astype(np.float32) for _ in range(2))
        self.action = rng.integers(0, ACTIONS, size).astype(np.int32)
        self.reward = rng.normal(size=size).astype(np.float32)
        self.weight = (0.1 + rng.random(size)).astype(np.float32)
        self.rng = rng

    def sample(self, count):
        rows = self.rng.choice(len(self.weight), count, p=self.weight / self.weight.sum())
        return rows, {k: getattr(self, k)[rows] for k in ("state", "action", "reward", "following", "weight")}


def q_values(params, state):
    return jax.nn.relu(state @ params["w"] + params["b"]) @ params["out"]


def td_losses(params, target, batch):
    best = q_values(params, batch["following"]).argmax(-1)
    following = jnp.take_along_axis(q_values(target, batch["following"]), best[:, None], -1)[:, 0]
    chosen = jnp.take_along_axis(q_values(params, batch["state"]), batch["action"][:, None], -1)[:, 0]
    error = batch["reward"] + 0.9 * lax.stop_gradient(following) - chosen
    return optax.huber_loss(error) / batch["weight"], jnp.abs(error)


Q = {"w": normal(STATES, 8), "b": jnp.zeros(8), "out": normal(8, ACTIONS, seed=1)}


def dqn_plain():
    buffer, adam = ReplayBuffer(), optax.adam(1e-2)
    params = target = Q
    state = adam.init(params)

    @jax.jit
    def step(params, target, state, batch):
        def loss_fn(params):
            losses, errors = td_losses(params, target, batch)
            return losses.mean(), errors

        grads, errors = jax.grad(loss_fn, has_aux=True)(params)
        updates, state = adam.update(grads, state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target, 0.1), state, errors

    for _ in range(3):
        rows, batch = buffer.sample(8)
        params, target, state, errors = step(params, target, state, batch)
        buffer.weight[rows] = errors
    return params, target, buffer.weight


@program(dqn_plain, quick=("2",))
def deep_q_learning_with_priorities(strategy):
    buffer = ReplayBuffer()
    with strategy.scope():
        params, target = replicax.as_variables(Q), replicax.as_variables(Q)
        optimizer = replicax.Optimizer(optax.adam(1e-2))

    def step(batch):
        def loss_fn(params):
            losses, errors = td_losses(params, replicax.as_arrays(target), batch)
            return replicax.compute_average_loss(losses), errors

        (_, errors), grads = replicax.value_and_grad(loss_fn, params, has_aux=True)(params)
        optimizer.apply_gradients(grads, params)
        replicax.assign(target, optax.incremental_update(*map(replicax.as_arrays, (params, target)), 0.1))
        return errors

    for _ in range(3):
        rows, batch = buffer.sample(8)
        [distributed] = strategy.distribute_dataset([batch])
        errors = strategy.run(step, args=(distributed,))
        buffer.weight[rows] = strategy.gather(errors, axis=0)
    return replicax.as_arrays(params), replicax.as_arrays(target), buffer.weight


# --- trust region policy optimization: Fisher products are added up in conjugate gradients -------------------------

POLICY = {"w": 0.5 * normal(STATES, ACTIONS), "b": jnp.zeros(ACTIONS)}
VISITED, TAKEN, GAIN = normal(16, STATES, seed=2), integers(ACTIONS, 16), normal(16, seed=3)


def trpo_step(mean, params, states, actions, gains):
    flat, unravel = jax.flatten_util.ravel_pytree(params)

    def log_probs(flat):
        params = unravel(flat)
        return jax.nn.log_softmax(states @ params["w"] + params["b"])

    old = log_probs(flat)

    def surrogate(flat):
        ratio = jnp.exp(log_probs(flat) - old)
        return (jnp.take_along_axis(ratio, actions[:, None], -1)[:, 0] * gains).mean()

    def kl(flat):
        return (jnp.exp(old) * (old - log_probs(flat))).sum(-1).mean()

    def fisher(v):
        return mean(jax.jvp(jax.grad(kl), (flat,), (v,))[1]) + 0.1 * v

    value, g = mean(jax.value_and_grad(surrogate)(flat))
    direction = conjugate_gradients(fisher, g, 6)
    step = jnp.sqrt(2 * 0.05 / (direction @ fisher(direction))) * direction

    def too_far(size):
        distance, better = mean((kl(flat + size * step), surrogate(flat + size * step)))
        return ((distance > 0.04) | (better < value)) & (size > 1e-3)

    size = lax.while_loop(too_far, lambda size: size * 0.5, jnp.float32(1.0))
    return unravel(flat + size * step), size


def trpo_plain():
    params = POLICY
    step = jax.jit(functools.partial(trpo_step, lambda value: value))
    for _ in range(2):
        params, size = step(params, VISITED, TAKEN, GAIN)
    return params, size


@program(trpo_plain)
def trust_region_policy_optimization(strategy):
    params = POLICY
    [batch] = whole(strategy, VISITED, TAKEN, GAIN)
    for _ in range(2):
        params, size = strategy.run(functools.partial(trpo_step, mean_of_all), args=(params, *batch))
    return params, size
