"""A world to do wrong in, and what of it has to stay as it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import replicax
from replicax import context
from replicax.variables import initial_layout, store
from tests.conftest import logical_strategy, strategy_of

here = replicax.get_replica_context
LocalityError, ContextError = replicax.errors.LocalityError, replicax.errors.ContextError


def world() -> Any:
    """A world to do wrong in: strategies, variables of each kind, and values."""
    s, other, grid = strategy_of(2), strategy_of(4), logical_strategy(2, 2)
    with s.scope():
        v = replicax.Variable(np.ones(3, np.float32), name="v")
        n = replicax.Variable(1, name="n")
        total = replicax.Variable(1.0, name="total", synchronization="on_read", aggregation="sum")
        own = replicax.Variable(1.0, name="own", synchronization="on_read")
        summed = replicax.Variable(np.ones((3, 2), np.float32), name="summed", aggregation="sum")
        optimizer = replicax.Optimizer(optax.sgd(0.1))
        mean, accuracy = replicax.Mean("mean"), replicax.Accuracy("accuracy")
    with other.scope():
        theirs = replicax.Variable(1.0, name="theirs")
    x = s.distribute_values_from_function(lambda ctx: np.arange(3.0, dtype=np.float32) + ctx.replica_id_in_sync_group)
    number = s.distribute_values_from_function(lambda ctx: np.float32(1 + ctx.replica_id_in_sync_group))
    uneven = s.distribute_values_from_function(lambda ctx: np.zeros(1 + ctx.replica_id_in_sync_group, np.float32))
    four = other.distribute_values_from_function(lambda ctx: 1.0)
    assert here() is not None  # which makes the default context
    texts = s.distribute_values_from_function(lambda ctx: str(ctx.replica_id_in_sync_group))
    kept: list[Any] = []
    s.run(lambda: kept.append(here()))
    return types.SimpleNamespace(**locals())


def right_step(v: Any, x: Any) -> Any:
    return here().all_reduce("sum", (v * x).sum())


def state_of(w: Any) -> Any:
    values = [np.asarray(v.slot.array).tolist() for v in (w.v, w.n, w.total, w.own, w.summed, w.theirs)]
    stacks = (
        len(context._frames.get()),
        context._base.frame,
        len(store._stores.stack),
        len(initial_layout._colocation.get()),
    )
    return values, stacks, replicax.get_strategy(), w.optimizer.variables


def inside(w: Any, fn: Callable[..., Any], *args: Any) -> Any:
    return w.s.run(fn, args)


def merged(w: Any, fn: Callable[..., Any], *args: Any) -> Any:
    return w.s.run(lambda *a: here().merge_call(fn, a), args)


def scoped(w: Any, fn: Callable[[], Any]) -> Any:
    with w.s.scope():
        return fn()


def many(w: Any, fn: Callable[..., Any], **options: Any) -> Any:
    return w.s.run_steps(fn, iter(w.s.distribute_dataset([np.ones(2, np.float32)])), **{"steps": 1, **options})


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def grads(w: Any, fn: Callable[[], Any], variables: Any, **options: Any) -> Any:
    return inside(w, lambda x: replicax.value_and_grad(lambda: fn(x), variables, **options)(), w.x)
