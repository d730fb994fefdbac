"""JAX and Optax: a recommender of two towers, with the other items of the batch as what was not chosen.

After the retrieval models of "TensorFlow Recommenders". It shows parameters in a pytree as variables, so that they may
be split over the replicas (give ``main`` a ``ShardedStrategy``); and a loss over the items of *all* replicas: they are
gathered, and each replica's users are compared with all of them. What is Replicax's is marked so.

    python examples/gallery/pytrees/two_tower.py

prints the loss every 50 steps, and how often the item that a user would choose is among the best 10 of 200: more than
0.6, where guessing gives 0.05.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

USERS, ITEMS, SIZE, BATCH = 300, 200, 16, 128


def choices(count, seed):
    """Users and items that they chose, each ``[count]``: those whose hidden tastes agree."""
    tastes, kinds = (np.random.default_rng(i).normal(size=(n, 4)) for i, n in enumerate([USERS, ITEMS]))
    rng = np.random.default_rng(seed)
    users = rng.integers(0, USERS, count)
    scores = 2 * tastes[users] @ kinds.T + rng.gumbel(size=(count, ITEMS))
    return users.astype(np.int32), scores.argmax(1).astype(np.int32)


def initial(key):
    """The parameters of both towers."""

    def tower(key, rows):
        a, b, c = jax.random.split(key, 3)
        return {
            "table": 0.1 * jax.random.normal(a, (rows, SIZE)),
            "hidden": jax.random.normal(b, (SIZE, 32)) / SIZE**0.5,
            "last": jax.random.normal(c, (32, SIZE)) / 32**0.5,
        }

    return {"user": tower(key, USERS), "item": tower(jax.random.fold_in(key, 1), ITEMS)}


def embedded(tower, ids):
    """``[ids, SIZE]``."""
    return jax.nn.relu(tower["table"][ids] @ tower["hidden"]) @ tower["last"] + tower["table"][ids]


def loss_fn(params, users, items):
    replica = replicax.get_replica_context()  # Replicax
    mine = embedded(params["item"], items), items
    candidates, numbers = replica.all_gather(mine, axis=0)  # Replicax: the items of all replicas
    logits = 4 * embedded(params["user"], users) @ candidates.T
    places = replica.replica_id_in_sync_group * len(users) + jnp.arange(len(users))  # Replicax
    twice = (numbers == items[:, None]) & (jnp.arange(len(numbers)) != places[:, None])  # chosen by others, too
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.where(twice, -1e9, logits), places)
    return replicax.compute_average_loss(losses)  # Replicax


def main(strategy, steps=300):
    """Train, and return the loss of each step and the share of choices among the best 10."""
    with strategy.scope():  # Replicax
        params = replicax.as_variables(initial(jax.random.key(0)))  # Replicax
        optimizer = replicax.Optimizer(optax.adam(1e-2))  # Replicax

    def train_step(users, items):
        loss, grads = replicax.value_and_grad(loss_fn, params)(params, users, items)  # Replicax
        optimizer.apply_gradients(grads, params)  # Replicax
        return loss

    losses = []
    for batch in strategy.distribute_dataset([choices(BATCH, seed) for seed in range(steps)]):
        losses.append(float(strategy.reduce("sum", strategy.run(train_step, args=batch))))  # Replicax
    trained = replicax.as_arrays(params)  # Replicax
    users, items = choices(1000, steps)
    scores = embedded(trained["user"], users) @ embedded(trained["item"], np.arange(ITEMS)).T
    best = np.argsort(-np.asarray(scores), 1)[:, :10]
    return losses, float((best == items[:, None]).any(1).mean())


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, found = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 50):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"among the best 10: {found:.3f}")
