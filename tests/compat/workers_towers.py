"""What workers do in the tests of towers on several of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax.compat import v1 as tf


def message_of(action: Any, kind: type[Exception] = Exception) -> str:
    try:
        action()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def facts() -> list[dict[str, Any]]:
    """What a worker sees of the strategy, and what its towers compute together; on both executors."""
    with replicax.debug():
        exact = _facts()
    return [_facts(), exact]


def _facts() -> dict[str, Any]:
    d = tf.DistributionStrategy.of(replicax.MultiWorkerMirroredStrategy())

    def merge_fn(distribution: Any, x: Any) -> Any:
        return distribution.reduce("sum", x)

    def tower_fn(i: Any) -> Any:
        x = jnp.float32(1 + i)
        local.assign_add(x)
        return x, tf.get_tower_context().merge_call(merge_fn, x)

    with d.scope():
        v = tf.get_variable("v", initializer=1.0)
        with d.tower_local_var_scope("sum"):
            local = tf.get_variable("local", initializer=0.0)
        mine, total = d.call_for_each_tower(tower_fn, d.worker_device_index)
        d.update(v, lambda v, x: v.assign_add(x), d.reduce("mean", mine, v))
        [first] = d.batch_reduce(tf.VariableAggregation.ONLY_FIRST_TOWER, [(mine, v)])
        found = {
            "towers": (d.num_towers, len(d.worker_devices), len(d.parameter_devices), d.is_single_tower),
            "worker": (d.between_graph, d.should_init, d.should_checkpoint, d.should_save_summary),
            "unwrapped": [float(x) for x in d.unwrap(mine)],
            "total": float(total),
            "v": float(v),
            "first": float(first),
            "fetched": [float(d.fetch(value)) for value in (v, local, total, d.reduce("sum", mine))],
            "fetched to": [d.fetch(v, f"cpu:{i}").devices() == {jax.local_devices()[i]} for i in range(2)],
            "broadcast": float(d.broadcast(3.0)),
            "group": d.group(mine),
            "everywhere": float(d.fetch(v, d.worker_devices).addressable_data(1)),
            "map": message_of(lambda: d.map([1.0], lambda x: x)),
            "fetch": message_of(lambda: d.fetch(mine)),
            "configure": message_of(lambda: d.configure(cluster_spec={"worker": ["a:1", "b:1"]}, task_type="worker")),
        }
        d.configure(session_config=object())
        d.initialize()
        d.finalize()
    return found


def train(short: int) -> list[dict[str, Any]]:
    """Steps on a dataset of the worker's own; that of worker ``short`` ends one round earlier."""
    with replicax.debug():
        exact = _train(short)
    return [_train(short), exact]


def _train(short: int) -> dict[str, Any]:
    strategy = replicax.MultiWorkerMirroredStrategy()
    d = tf.DistributionStrategy.of(strategy)
    worker = strategy.extended.workers.index

    def dataset_fn() -> list[Any]:
        count = 6 if worker == short else 8  # two towers each: three rounds, or four
        return [(np.full(3, 10 * worker + i, np.float32), i) for i in range(count)]

    def tower_fn(x: Any, i: Any) -> Any:
        optimizer.minimize(lambda: x.mean() * w.value, global_step=step)
        return x.sum() + i

    def step_fn(ctx: tf.MultiStepContext, x: Any, i: Any) -> None:
        ctx.set_last_step_output("sum", d.call_for_each_tower(tower_fn, x, i), "sum")

    with d.scope():
        w, step = tf.get_variable("w", initializer=0.0), tf.get_or_create_global_step()
        optimizer = tf.Optimizer(optax.sgd(1.0))
        iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()
        first = [x.tolist() for x in d.unwrap(iterator.get_next()[0])]
        ctx = d.run_steps_on_dataset(step_fn, iterator, iterations=10)
        after = message_of(iterator.get_next, StopIteration)
        return {
            "first": first,
            "steps": int(d.fetch(step)),
            "w": float(d.fetch(w)),
            "sum": float(ctx.last_step_outputs["sum"]),
            "after": after,
        }
