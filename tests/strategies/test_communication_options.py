"""Options of a strategy's communication, on one process, as every collective gets them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax


def strategy_with(options: Any) -> replicax.Strategy:
    return replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"], communication_options=options)


def per_replica(strategy: replicax.Strategy) -> Any:
    return strategy.distribute_values_from_function(lambda ctx: np.arange(3.0, dtype=np.float32))


def applies_gradients(strategy: replicax.Strategy) -> Callable[[Any], Any]:
    with strategy.scope():
        w = replicax.Variable(np.zeros(3, np.float32))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: Any) -> Any:
        _, gradients = replicax.value_and_grad(lambda: (x * w).sum(), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    return step


def gathers(strategy: replicax.Strategy) -> Callable[[Any], Any]:
    return lambda x: replicax.get_replica_context().all_gather(x, 0)


def reduces_across(strategy: replicax.Strategy) -> Callable[[Any], Any]:
    return lambda x: replicax.get_replica_context().merge_call(lambda s, y: s.reduce("sum", y), args=(x,))


def looks_across(strategy: replicax.Strategy) -> Callable[[Any], Any]:
    return lambda x: replicax.get_replica_context().merge_call(lambda s, y: s.local_results(y)[1], args=(x,))


def takes_the_first(strategy: replicax.Strategy) -> Callable[[Any], Any]:
    with strategy.scope():
        v = replicax.Variable(np.zeros(3, np.float32), aggregation="only_first_replica")
    return lambda x: v.assign(x).value


STEPS = [applies_gradients, gathers, reduces_across, looks_across, takes_the_first]


@pytest.mark.parametrize("make", STEPS)
def test_a_timeout_of_the_strategy_covers_every_collective(make: Any) -> None:
    strategy, plain = strategy_with(replicax.CommunicationOptions(timeout_seconds=30)), strategy_with(None)
    step, x = make(strategy), per_replica(strategy)
    assert strategy.extended.trace(step, args=(x,)).program.timeout == 30
    expected = plain.run(make(plain), args=(per_replica(plain),))
    for executor in ("compiled", "per_replica"):
        found = strategy.run(step, args=(x,), options=replicax.RunOptions(executor=executor))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_with_a_timeout_has_the_settings_of_its_caller() -> None:
    strategy = strategy_with(replicax.CommunicationOptions(timeout_seconds=30))

    def step(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", jnp.log(x - 100))

    x = per_replica(strategy)
    assert np.isnan(strategy.run(step, args=(x,))).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        strategy.run(step, args=(x,))


def test_options_of_a_call_come_before_those_of_the_strategy() -> None:
    strategy = strategy_with(replicax.CommunicationOptions(timeout_seconds=30))
    own = replicax.CommunicationOptions(timeout_seconds=7)

    def step(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", x, own)

    assert strategy.extended.trace(step, args=(per_replica(strategy),)).program.timeout == 7


def test_a_replica_that_does_not_come_is_named_whoever_issues_the_collective() -> None:
    strategy = strategy_with(replicax.CommunicationOptions(timeout_seconds=0.2))
    step, go_on = applies_gradients(strategy), threading.Event()

    def waits(i: Any) -> Any:
        if i == 1:
            go_on.wait(20)
        return np.float32(0)

    def late(x: Any) -> None:
        i = replicax.get_replica_context().replica_id_in_sync_group
        step(x + jax.pure_callback(waits, jax.ShapeDtypeStruct((), jnp.float32), i))

    x = per_replica(strategy)
    try:
        with pytest.raises(
            replicax.errors.DeadlockError, match=re.escape("replica(s) [0] have waited for more than 0.2 s")
        ):
            strategy.run(late, args=(x,))
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (5, TypeError, "MultiWorkerMirroredStrategy: options must be CommunicationOptions or None, got 5"),
        (replicax.CommunicationOptions(implementation="nccl"), ValueError, "MultiWorkerMirroredStrategy: .*nccl"),
    ],
)
def test_options_that_are_off(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        strategy_with(options)
