"""Arrays of NumPy that their owner writes to again, as soon as he has given them away: what counts is what they were.

JAX takes the memory of such an array as it is: a device's array on a CPU may be that very memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.devices.host_values import own_copy


def array(size: int, offset: int) -> np.ndarray:
    """Ones, in memory that JAX takes as it is (``offset`` 0), or that it copies in the background."""
    memory = np.zeros(size * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    ones = memory[start : start + size * 4].view(np.float32)
    ones[:] = 1
    return ones


def late(x: Any) -> Any:
    """``x``, which is looked at when something else has been computed."""
    return x + jnp.tanh(jnp.ones((600, 600)) @ jnp.ones((600, 600))).sum() * 0


def variable(x: np.ndarray, **options: Any) -> replicax.Variable:
    return replicax.Variable(np.zeros_like(x), **options)


def assigned_in_step(strategy: replicax.Strategy, x: np.ndarray) -> Any:
    v = variable(x)

    def step() -> None:
        v.assign(late(jnp.asarray(x)))

    strategy.run(step)
    return v


def assigned_across(strategy: replicax.Strategy, x: np.ndarray) -> Any:
    v = variable(x)
    replicax.assign([v], [x])
    return v


def on_the_per_replica_executor(strategy: replicax.Strategy, x: np.ndarray) -> Any:
    with replicax.debug():
        return strategy.run(lambda x: x + 0, args=(x,))


WAYS: dict[str, Callable[[replicax.Strategy, np.ndarray], Any]] = {
    "a variable": lambda strategy, x: replicax.Variable(x),
    "an on-read variable": lambda strategy, x: replicax.Variable(x, synchronization="on_read", aggregation="mean"),
    "as_variables": lambda strategy, x: replicax.as_variables({"x": x})["x"],
    "assigned": lambda strategy, x: variable(x).assign(x),
    "added": lambda strategy, x: variable(x).assign_add(x),
    "assigned with others": assigned_across,
    "assigned in a step": assigned_in_step,
    "an argument": lambda strategy, x: strategy.run(late, args=(x,)),
    "an argument on the per-replica executor": on_the_per_replica_executor,
    "captured": lambda strategy, x: strategy.run(lambda: late(x)),
    "values of replicas": lambda strategy, x: strategy.distribute_values_from_function(lambda ctx: x),
    "broadcast": lambda strategy, x: strategy.extended.broadcast_to(x),
    "gathered": lambda strategy, x: strategy.gather(strategy.distribute_values_from_function(lambda ctx: x), axis=0),
    "a dataset": lambda strategy, x: next(iter(strategy.distribute_dataset([x]))),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_given_away_stays_as_it_was(way: str, replicas: int) -> None:
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    for size, offset in ((16, 0), (16, 4), (1_000_000, 0), (1_000_000, 4)):
        x = array(size, offset)
        with strategy.scope():
            given = WAYS[way](strategy, x)
            x[:] = 7
            found = [given.numpy()] if isinstance(given, replicax.Variable) else strategy.local_results(given)
        assert all((np.asarray(value) == 1).all() for value in found), (size, offset)


def test_a_captured_array_is_a_constant() -> None:
    strategy, x = replicax.MirroredStrategy(["cpu:0", "cpu:1"]), array(16, 0)

    def step() -> Any:
        return jnp.multiply(x, 1)

    for _ in range(2):
        assert np.asarray(strategy.run(step)).tolist() == [1] * 16
        x[:] = 7


def test_devices_take_large_copies_without_another() -> None:
    for size in range(100_000, 100_020):
        for dtype in (None, np.float32):
            copy = own_copy(np.arange(size, dtype=np.int32), dtype)
            assert jax.device_put(copy, jax.devices()[0]).unsafe_buffer_pointer() == copy.ctypes.data
