"""Graphs: replicas divide whole graphs, or the edges of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole

# --- message passing on a batch of graphs -------------------------------------------------------------------

NODES, EDGES = 5, 8
FEATURES = normal(8, NODES, 3)
SENDERS, RECEIVERS = integers(NODES, 8, EDGES), integers(NODES, 8, EDGES, seed=1)
TARGETS = normal(8, seed=2)
GNN = {"message": normal(6, 4, seed=3), "update": normal(7, 3, seed=4), "out": normal(3, seed=5)}


def energy(params, features, senders, receivers):
    """What a graph is worth after two rounds of messages."""
    for _ in range(2):
        messages = jnp.tanh(jnp.concatenate([features[senders], features[receivers]], -1) @ params["message"])
        gathered = jax.ops.segment_sum(messages, receivers, NODES)
        degree = jax.ops.segment_sum(jnp.ones(EDGES), receivers, NODES)
        gathered = gathered / jnp.maximum(degree, 1)[:, None]
        features = features + jnp.tanh(jnp.concatenate([features, gathered], -1) @ params["update"])
    return (features @ params["out"]).mean()


def graph_losses(params, graphs, targets):
    return optax.huber_loss(jax.vmap(energy, (None, 0, 0, 0))(params, *graphs), targets)


def message_passing_plain():
    tx = optax.adagrad(0.05)
    params, state = GNN, tx.init(GNN)

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return graph_losses(params, (FEATURES, SENDERS, RECEIVERS), TARGETS).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
    return params, loss


@program(message_passing_plain)
def message_passing(strategy):
    with strategy.scope():
        params = replicax.as_variables(GNN)
        optimizer = replicax.Optimizer(optax.adagrad(0.05))

    def step(graphs, targets):
        def loss_fn(params):
            return replicax.compute_average_loss(graph_losses(params, graphs, targets))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        return loss

    [(graphs, targets)] = strategy.distribute_dataset([((FEATURES, SENDERS, RECEIVERS), TARGETS)])
    for _ in range(3):
        loss = strategy.run(step, args=(graphs, targets))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)


# --- one graph, whose edges are divided: what reaches a node is a sum over replicas ---------------------------------

FROM, TO = integers(6, 16, seed=6), integers(6, 16, seed=7)
DEGREES = np.maximum(np.bincount(FROM, minlength=6), 1).astype(np.float32)


def pagerank(pull):
    def going(carry):
        old, new, count = carry
        return (jnp.abs(new - old).sum() > 1e-6) & (count < 40)

    def advance(carry):
        _, rank, count = carry
        dangling = jnp.where(jnp.bincount(jnp.asarray(FROM), length=6) == 0, rank, 0.0).sum()
        return rank, 0.15 / 6 + 0.85 * (pull(rank) + dangling / 6), count + 1

    return lax.while_loop(going, advance, (jnp.zeros(6), jnp.full(6, 1 / 6), 0))[1]


def pulled(rank, senders, receivers):
    return jax.ops.segment_sum((rank / DEGREES)[senders], receivers, 6)


def pagerank_plain():
    return jax.jit(lambda: pagerank(lambda rank: pulled(rank, FROM, TO)))()


@program(pagerank_plain, quick=("2",))
def pagerank_over_divided_edges(strategy):
    def rank(senders, receivers):
        ctx = replicax.get_replica_context()
        return pagerank(lambda rank: ctx.all_reduce("sum", pulled(rank, senders, receivers)))

    [(senders, receivers)] = whole(strategy, FROM, TO)
    return strategy.run(rank, args=(senders, receivers))


# --- principal directions by orthogonal iteration: rows are divided --------------------------------------------------


def directions(product, features=4, count=2):
    def step(_, Q):
        Q, R = jnp.linalg.qr(product(Q))
        return Q * jnp.sign(jnp.diagonal(R))

    Q = lax.fori_loop(0, 6, step, jnp.eye(features, count))
    return Q, jnp.linalg.norm(product(Q), axis=0)


ROWS = normal(16, 4) * np.array([3.0, 2.0, 1.0, 0.5], np.float32)


def directions_plain():
    return jax.jit(lambda: directions(lambda Q: ROWS.T @ (ROWS @ Q)))()


@program(directions_plain, quick=("2", "executor"))
def orthogonal_iteration(strategy):
    def find(rows):
        ctx = replicax.get_replica_context()
        return directions(lambda Q: ctx.all_reduce("sum", rows.T @ (rows @ Q)))

    [(rows,)] = whole(strategy, ROWS)
    return strategy.run(find, args=(rows,))
