"""What the workers of ``test_run_steps.py`` do; on one process the same."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import replicax


def train(strategy: replicax.Strategy | None = None) -> dict[str, Any]:
    """Seven full batches and a last one that is not even over four replicas, in groups of three."""
    strategy = strategy or replicax.MultiWorkerMirroredStrategy(timeout_seconds=60)
    with strategy.scope():
        w = replicax.Variable(np.ones((3, 2), np.float32), name="w")
        count = replicax.Variable(0, name="count")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(ctx: replicax.MultiStepContext, x: Any) -> None:
        losses = jnp.tanh(x @ w).sum(1)
        loss, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.tanh(x @ w.value).sum(1)), [w]
        )()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        count.assign_add(1)
        seen.assign_add(jnp.int32(x.shape[0]))
        ctx.set_last_step_output("loss", loss, "sum")
        replicax.get_replica_context().merge_call(
            lambda _, v: ctx.set_last_step_output("rows", v), args=(losses.sum(),)
        )

    data = list(np.random.default_rng(0).normal(size=(7, 8, 3)).astype(np.float32))
    dataset = strategy.distribute_dataset([*data, data[0][:6]])
    iterator = iter(dataset)
    steps, losses, states = [], [], []
    for _ in range(3):
        ctx = strategy.run_steps(step, iterator, 3)
        steps.append(ctx.steps)
        losses.append(float(ctx.last_step_outputs["loss"]))
        states.append(iterator.get_state()["position"])
    try:
        strategy.run_steps(step, iterator, 3)
    except StopIteration:
        steps.append(0)
    rows = ctx.last_step_outputs["rows"]
    return {
        "steps": steps,
        "losses": losses,
        "positions": states,
        "w": w.numpy(),
        "counters": (int(count), int(seen.read_value())),
        "rows": dict(zip(rows.replicas, map(float, strategy.local_results(rows)), strict=True)),
        "traces": strategy.extended.trace_count(step),
    }


def run_ahead() -> str:
    """Worker 1 asks for another number of steps."""
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=20)
    iterator = iter(strategy.distribute_dataset([np.ones((4, 2), np.float32)] * 8))
    try:
        strategy.run_steps(lambda ctx, x: None, iterator, 2 + strategy.extended.workers.index)
    except (replicax.errors.DeadlockError, ValueError) as error:
        return str(error)
    return ""
