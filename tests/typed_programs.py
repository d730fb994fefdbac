"""Programs as users with a type checker write them: mypy checks this file with ``src``, and nothing runs it.

``assert_type`` has the type that a reader sees. A comment that ignores an error is one that a checker must report.
"""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope() as entered:
    assert_type(entered, replicax.Strategy)
    w = replicax.Variable(jnp.zeros((4, 3)), name="w")
    b = replicax.Variable(lambda: jnp.zeros(3), name="b")
    optimizer = replicax.Optimizer(optax.adam(0.05))
assert_type(w, replicax.Variable)


def train_step(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    features, labels = batch

    def loss() -> jax.Array:
        logits = assert_type(features @ w + b, jax.Array)
        return replicax.compute_average_loss(jnp.square(logits - labels))

    share, grads = replicax.value_and_grad(loss, [w, b])()
    assert_type(share, jax.Array)
    optimizer.apply_gradients(zip(grads, [w, b], strict=True))
    replicax.get_replica_context().all_reduce("mean", (share, grads))
    return share


def metric(context: replicax.MultiStepContext, x: jax.Array) -> None:
    context.set_last_step_output("x", x, replicax.ReduceOp.SUM)


dataset = strategy.distribute_dataset((np.ones((8, 4)), np.ones(8)), replicax.InputOptions(partial_batch="pad"))
for batch in dataset:
    share = strategy.run(train_step, args=(batch,))
    print(f"{float(strategy.reduce('sum', share)):.2f}")
assert_type(strategy.run_steps(metric, iter(dataset), 2).steps, int)
run = replicax.train(train_step, dataset, 8, callbacks=replicax.EarlyStopping("loss", "min"), precision="bf16")
assert_type(run, replicax.TrainingRun)
replicax.models.safetensors.save, replicax.loop.Precision, replicax.cluster.ClusterSpec  # noqa: B018


def like_arrays(x: jax.Array) -> jax.Array:
    """Variables in operators, methods and functions of arrays."""
    for result in (x @ w, 1 / w, 2 * w - 1, w * w, -w, abs(w), w**2, w > 0, w == 0, w[0], w.T, w.reshape(-1), w.sum()):
        assert_type(result, jax.Array)
    for result in (jnp.sum(w), jnp.where(w > 0, w, 0.0), jax.nn.relu(w), w.at[0].set(1), w.value, w.read_value()):
        assert_type(result, jax.Array)
    assert_type(w.shape, tuple[int, ...])
    assert_type(w.assign(x).assign_add(1.0), replicax.Variable)
    assert_type(np.asarray(w), np.ndarray[tuple[Any, ...], np.dtype[Any]])
    assert_type({w: float(b)}, dict[replicax.Variable, float])
    h = w.T
    h = h @ x  # is an array, as before
    return like_arrays(w) + h


def mistakes() -> None:
    """What a checker must find."""
    w.assgin(1.0)  # type: ignore[attr-defined]
    replicax.Variable()  # type: ignore[call-arg]
    replicax.Variable(1.0, trainabel=True)  # type: ignore[call-arg]
    replicax.Variabel(1.0)  # type: ignore[attr-defined]
    replicax.errors.NoSuchError  # type: ignore[attr-defined]  # noqa: B018
    strategy.runn(train_step)  # type: ignore[attr-defined]
    strategy.run(train_step, (1,), batch=2)  # type: ignore[arg-type]
    replicax.get_replica_context().all_sum(1.0)  # type: ignore[union-attr]
