"""A step that computes with 64-bit numbers in a place of its own, while JAX's are off, keeps them everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import logical_strategy, shared_strategy, strategy_of

LARGE = 3_000_000_000


def total(x: Any) -> Any:
    with jax.enable_x64(True):
        return replicax.get_replica_context().all_reduce("sum", x.astype(jnp.int64).sum() * np.int64(LARGE))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(4),
        shared_strategy(4, 2),
        replicax.MirroredStrategy(["cpu:0", "cpu:1"], reproducible=True),
        logical_strategy(2, 2),
    ],
    ids=["each on a device", "sharing devices", "reproducible", "logical devices"],
)
def test_sums_over_replicas_have_64_bits(strategy: replicax.Strategy, rows: int) -> None:
    x = np.arange(rows, dtype=np.int32)
    data = iter(strategy.distribute_dataset([x] * 3))
    assert strategy.run(total, args=(next(data),)).item() == x.sum() * LARGE

    def step(ctx: Any, batch: Any) -> None:
        with jax.enable_x64(True):
            ctx.set_last_step_output("total", total(batch), "only_first_replica")

    assert strategy.run_steps(step, data, 2).last_step_outputs["total"].item() == x.sum() * LARGE


def test_numbers_of_numpy_have_64_bits(pair: replicax.MirroredStrategy) -> None:
    numbers = np.array([LARGE, 1])

    def step() -> Any:
        with jax.enable_x64(True):
            return jnp.ones(2, jnp.int64) + numbers

    assert pair.run(step).tolist() == [LARGE + 1, 2]


def test_values_that_logical_devices_send_have_64_bits() -> None:
    strategy = logical_strategy(2, 2)

    def step(x: Any) -> Any:
        with jax.enable_x64(True):
            sent = strategy.assign_to_logical_device(x.astype(jnp.int64) * LARGE, 0)
            return strategy.assign_to_logical_device(sent + 1, 1).sum()

    assert strategy.run(step, args=(np.array([1, 2], np.int32),)).item() == 3 * LARGE + 2


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_64_bit_numbers_leave_the_place_that_switches_them_on(pair: replicax.MirroredStrategy, executor: str) -> None:
    def half_of_square(x: Any) -> Any:
        with jax.enable_x64(True):
            y = 0.5 * jnp.square(x.astype(jnp.float64))
        return y.astype(jnp.float32)

    value, slope = pair.run(
        jax.value_and_grad(half_of_square), args=(jnp.float32(3),), options=replicax.RunOptions(executor)
    )
    assert (float(value), float(slope)) == (4.5, 3.0)


def test_results_are_reduced_and_gathered_where_64_bit_numbers_are_on(pair: replicax.MirroredStrategy) -> None:
    def large(x: Any) -> Any:
        with jax.enable_x64(True):
            return x.astype(jnp.int64) * LARGE

    [batch] = pair.distribute_dataset([np.arange(5, dtype=np.int32)])
    result = pair.run(large, args=(batch,))
    with pytest.raises(RuntimeError, match=r"int64, but JAX's 64-bit numbers are off.*inside `with jax.enable_x64"):
        pair.gather(result, axis=0)
    with jax.enable_x64(True):
        assert pair.gather(result, axis=0).tolist() == [i * LARGE for i in range(5)]
        assert pair.reduce("sum", result, axis=0).item() == 10 * LARGE
