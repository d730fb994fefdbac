"""A pure step whose gradients were not reduced is told when its state comes back per replica."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


def descended(state: Any, x: Any, *, op: str | None) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    if op is not None:
        gradient = replicax.get_replica_context().all_reduce(op, gradient)
    return {"w": state["w"] - 0.1 * gradient, "steps": state["steps"] + 1}, loss


def separate(state: Any, x: Any) -> tuple[Any, Any]:
    return descended(state, x, op=None)


def together(state: Any, x: Any) -> tuple[Any, Any]:
    return descended(state, x, op="mean")


def calls(pair: replicax.MirroredStrategy, step: Any, state: Any, count: int = 3) -> list[warnings.WarningMessage]:
    [batch] = pair.distribute_dataset([X])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(count):
            state, _ = pair.run(step, args=(state, batch))
    return found


def start() -> Any:
    return {"w": jnp.ones(3), "steps": jnp.int32(0)}


def test_state_that_comes_back_per_replica_is_told_once(pair: replicax.MirroredStrategy) -> None:
    [warning] = calls(pair, separate, start())
    assert warning.category is replicax.errors.LocalityWarning
    assert warning.filename == __file__
    for part in ("'separate'", "the argument state['w'] was the same", "all 2 replicas", "all_reduce('mean', grads)"):
        assert part in str(warning.message)


def test_all_parts_of_the_state_are_named(pair: replicax.MirroredStrategy) -> None:
    def step(w: Any, *, rest: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean((x @ params[0] + params[1]["b"]) ** 2))((w, rest))
        return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, (w, rest), gradients)

    [batch] = pair.distribute_dataset([X])
    w, rest = pair.run(step, args=(jnp.ones(3),), kwargs={"rest": {"b": jnp.float32(0)}, "x": batch})
    with pytest.warns(
        replicax.errors.LocalityWarning, match=r"the arguments w, rest\['b'\] were the same on all 2 replicas"
    ):
        pair.run(step, args=(w,), kwargs={"rest": rest, "x": batch})


def test_it_is_told_before_the_second_step_runs(pair: replicax.MirroredStrategy) -> None:
    [batch] = pair.distribute_dataset([X])
    state, _ = pair.run(separate, args=(start(), batch))
    with pytest.raises(replicax.errors.LocalityWarning, match="trains a model of its own"):
        pair.run(separate, args=(state, batch))


def test_state_that_stays_the_same_or_is_meant_to_differ(pair: replicax.MirroredStrategy) -> None:
    assert calls(pair, together, start()) == []
    own = pair.distribute_values_from_function(lambda ctx: start()["w"])
    assert calls(pair, separate, {"w": own, "steps": jnp.int32(0)}) == []


def test_a_batch_that_is_distributed_later(pair: replicax.MirroredStrategy) -> None:
    with pair.scope():
        w = replicax.Variable(np.ones(3, np.float32))

    def step(x: Any, scale: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2 * scale[0]))(w.value)
        w.assign_sub(0.1 * replicax.get_replica_context().all_reduce("mean", gradient))

    [scale], [batch] = pair.distribute_dataset([np.ones(2, np.float32)]), pair.distribute_dataset([X])
    pair.run(step, args=(X[:2], scale))
    pair.run(step, args=(batch, scale))


def test_a_batch_of_another_size_that_is_distributed_later(pair: replicax.MirroredStrategy) -> None:
    def step(w: Any, x: Any) -> Any:
        replica = replicax.get_replica_context()
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * replica.all_reduce("mean", gradient), x * jnp.float32(replica.replica_id_in_sync_group)

    [batch] = pair.distribute_dataset([X])
    pair.run(step, args=(jnp.ones(3), X))
    pair.run(step, args=(jnp.ones(3), batch))


def test_a_step_that_does_not_train(pair: replicax.MirroredStrategy) -> None:
    def running_mean(mean: Any, x: Any) -> Any:
        return 0.9 * mean + 0.1 * x.mean(0), None

    assert calls(pair, running_mean, jnp.zeros(3)) == []
