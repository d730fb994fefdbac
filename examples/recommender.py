"""Recommend items to users, with tables of embeddings that lie on parameter servers.

    python examples/recommender.py                  # under MirroredStrategy, in step, and asynchronously
    python examples/recommender.py --only async --workers 3

The data are clicks by a rule that is known: each user and each item has a hidden taste, a vector of 8 numbers, and a
user clicks on an item with a probability that grows exponentially with the product of the two. The model is two
towers: a row of a table for each user and for each item, and a dense layer for each. It learns from clicks which item
belongs to which user, among the items of the batch. What is measured is how often the item of a click that it has not
seen is among the 10 that it ranks highest, of all items.

The tables are split over the servers. A worker never has one: it looks up the rows of its batch before the step, and
sends the gradients of these rows. At the end a table shows how all three ways rank.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

USERS, ITEMS, TASTES, WIDTH = 10_000, 1000, 8, 32
BATCH = 512  # of all replicas that train in step, and of each function otherwise
CLICKS, EPOCHS = 120_000, 4


@functools.cache
def rule(users: int, items: int) -> np.ndarray:
    """``[users * items]``: for each user, one after the other, how likely a click is on an item up to this one.

    The user's number is added, so that the whole rises, and one search finds the items of many clicks.
    """
    tastes = np.random.default_rng(0)
    of_users, of_items = (tastes.normal(size=(n, TASTES)).astype(np.float32) for n in (users, items))
    likely = np.exp(of_users @ of_items.T).cumsum(axis=1, dtype=np.float64)
    return (likely / likely[:, -1:] + np.arange(users)[:, None]).ravel()


def clicks(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Users and the items that they have clicked on; the tastes are always the same."""
    rng = np.random.default_rng(seed)
    who = rng.integers(USERS, size=count)
    what = np.searchsorted(rule(USERS, ITEMS), who + rng.random(count), side="right") - who * ITEMS
    return who.astype(np.int32), what.clip(0, ITEMS - 1).astype(np.int32)


class TwoTowers:
    """The model, and its training step, under any strategy."""

    def __init__(self, strategy: replicax.Strategy) -> None:
        rng = np.random.default_rng(1)

        def normal(*shape: int, scale: float) -> np.ndarray:
            return rng.normal(scale=scale, size=shape).astype(np.float32)

        with strategy.scope():
            self.users = replicax.Variable(normal(USERS, WIDTH, scale=0.1), name="users")
            self.items = replicax.Variable(normal(ITEMS, WIDTH, scale=0.1), name="items")
            self.towers = {
                side: replicax.Variable(np.eye(WIDTH, dtype=np.float32) + normal(WIDTH, WIDTH, scale=0.1), name=side)
                for side in ("user tower", "item tower")
            }
            self.of_towers = replicax.Optimizer(optax.adam(2e-3), name="of towers")
            self.of_tables = replicax.Optimizer(optax.adagrad(2.0), name="of tables")

    def step(self, users: jax.Array, items: jax.Array, user_rows: jax.Array, item_rows: jax.Array) -> jax.Array:
        """One replica's part of a step: of ``[batch]`` clicks, and the rows of the tables that belong to them."""

        def loss(towers: Any, user_rows: jax.Array, item_rows: jax.Array) -> jax.Array:
            scores = (user_rows @ towers["user tower"]) @ (item_rows @ towers["item tower"]).T
            same = items[None, :] == items[:, None]  # an item that is there twice is no wrong answer
            others = jnp.where(same & ~jnp.eye(len(items), dtype=bool), -jnp.inf, scores)
            losses = jax.nn.logsumexp(others, axis=1) - jnp.diagonal(scores)
            return replicax.compute_average_loss(losses)

        differentiated = jax.value_and_grad(loss, argnums=(0, 1, 2))
        share, (of_towers, of_users, of_items) = differentiated(replicax.as_arrays(self.towers), user_rows, item_rows)
        self.of_towers.apply_gradients(of_towers, self.towers)
        self.of_tables.apply_gradients(
            [
                (replicax.IndexedSlices(of_users, users, self.users.shape), self.users),
                (replicax.IndexedSlices(of_items, items, self.items.shape), self.items),
            ]
        )
        return share

    def recall(self, users: np.ndarray, items: np.ndarray) -> float:
        """How often the item of a click is among the 10 that are ranked highest."""
        scores = (self.users.numpy()[users] @ self.towers["user tower"].numpy()) @ (
            self.items.numpy() @ self.towers["item tower"].numpy()
        ).T
        best = np.argpartition(-scores, 10, axis=1)[:, :10]
        return float((best == items[:, None]).any(axis=1).mean())


def batches(size: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``EPOCHS`` passes over the clicks."""
    users, items = clicks(seed=2, count=CLICKS)
    rng = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        order = rng.permutation(len(users))
        for start in range(0, len(users) - size + 1, size):
            yield users[order[start : start + size]], items[order[start : start + size]]


def train_mirrored(workers: int) -> tuple[TwoTowers, str]:
    """The reference: a replica for each worker, on emulated devices."""
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(workers)])
    model = TwoTowers(strategy)

    def step(users: jax.Array, items: jax.Array) -> jax.Array:
        return model.step(users, items, model.users[users], model.items[items])

    for batch in strategy.distribute_dataset(list(batches(BATCH))):
        strategy.run(step, args=batch)
    return model, "0"


def train_on_servers(mode: Any, workers: int) -> tuple[TwoTowers, str]:
    """The same on parameter servers."""
    strategy = replicax.ParameterServerStrategy(
        num_workers=workers,
        num_servers=2,
        variable_partitioner=replicax.variables.MinSizePartitioner(min_shard_bytes=16 << 10, max_shards=2),
        mode=mode,
    )
    model = TwoTowers(strategy)

    def train(users: np.ndarray, items: np.ndarray) -> Any:  # on a worker
        return strategy.run(model.step, args=(users, items, model.users[users], model.items[items]))

    with replicax.ClusterCoordinator(strategy) as coordinator:
        for users, items in batches(BATCH):
            if mode == "sync":  # a step is a function for each worker
                for part in zip(np.split(users, workers), np.split(items, workers), strict=True):
                    coordinator.schedule(train, args=part)
            else:
                coordinator.schedule(train, args=(users, items))
        report = coordinator.join()
    return model, f"{report.staleness_p50:g} (p99 {report.staleness_p99:g})"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["mirrored", "sync", "async"], help="train in one way only")
    parser.add_argument("--workers", type=int, default=2, help="how many workers, or replicas")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    if args.only != "async" and BATCH % args.workers:
        parser.error(f"--workers: {args.workers} replicas can't share a batch of {BATCH} evenly; --only async can")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = arguments(argv)
    ways: dict[str, Callable[[], tuple[TwoTowers, str]]] = {
        "mirrored": lambda: train_mirrored(args.workers),
        "sync": lambda: train_on_servers("sync", args.workers),
        "async": lambda: train_on_servers("async", args.workers),
    }
    unseen = clicks(seed=3, count=5000)
    found = {}
    print(f"{USERS} users, {ITEMS} items, {CLICKS} clicks, {EPOCHS} times; a batch has {BATCH}")
    print(f"{'':10}first 10 of {ITEMS}   seconds   staleness")
    for name, way in ways.items():
        if args.only in (None, name):
            began = time.perf_counter()
            model, staleness = way()
            found[name] = model.recall(*unseen)
            print(f"{name:10}{found[name]:16.1%}{time.perf_counter() - began:10.1f}   {staleness}", flush=True)
    return found


if __name__ == "__main__":
    replicax.use_cpu_devices(arguments().workers)
    main()
