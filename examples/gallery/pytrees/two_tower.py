"""JAX and Optax: a recommender of two towers, with the other items of the batch as what was not chosen.

After the retrieval models of "TensorFlow Recommenders". It shows parameters in a pytree of no library through a pure
step, and a loss over the items of *all* replicas: they are gathered, and each replica's users are compared with all of
them. Three lines are Replicax's, marked so: beside the two of every pure step, the one that gathers.

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
adam = optax.adam(1e-2)


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
    candidates = embedded(params["item"], items), items
    vectors, ids = replicax.get_replica_context().all_gather(candidates, axis=0)  # Replicax: those of all replicas
    same = ids == items[:, None]
    chosen = same.argmax(1)  # the first of them, as another row may have chosen the item, too
    logits = 4 * embedded(params["user"], users) @ vectors.T
    logits = jnp.where(same & (jnp.arange(len(ids)) != chosen[:, None]), -1e9, logits)
    return optax.softmax_cross_entropy_with_integer_labels(logits, chosen).mean()


def train_step(params, opt_state, users, items):
    loss, grads = jax.value_and_grad(loss_fn)(params, users, items)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def main(strategy, steps=300):
    """Train, and return the loss of each step and the share of choices among the best 10."""
    params = initial(jax.random.key(0))
    opt_state = adam.init(params)
    losses = []
    for batch in strategy.distribute_dataset([choices(BATCH, seed) for seed in range(steps)]):
        params, opt_state, loss = strategy.run(train_step, args=(params, opt_state, *batch))  # Replicax
        losses.append(float(loss))
    users, items = choices(1000, steps)
    scores = embedded(params["user"], users) @ embedded(params["item"], np.arange(ITEMS)).T
    best = np.argsort(-np.asarray(scores), 1)[:, :10]
    return losses, float((best == items[:, None]).any(1).mean())


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, found = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 50):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"among the best 10: {found:.3f}")
