"""Aggregation in integer and low-precision dtypes, in both executors and in pieces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of

KINDS = {
    "on_write": lambda value, **options: replicax.Variable(value, **options),
    "on_read": lambda value, **options: replicax.Variable(value, synchronization="on_read", **options),
    "split": lambda value, **options: replicax.variables.ShardedVariable(value, **options),
}
# Three replicas assign [0, 1], [1, 1] and [0, 1].
EXPECTED = {"sum": [1, 3], "mean": [1 / 3, 1], "only_first_replica": [0, 1]}


@pytest.mark.filterwarnings("ignore::replicax.errors.RetraceWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", EXPECTED)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]
)
def test_values_of_a_dtype_become_one_of_that_dtype(dtype: str, aggregation: str, kind: str, executor: str) -> None:
    strategy, dtype_ = strategy_of(3), jnp.dtype(dtype)
    with strategy.scope():
        if aggregation == "mean" and not jnp.issubdtype(dtype_, jnp.inexact):
            with pytest.raises(ValueError, match=f"variable 'v': the mean of {dtype} values is not of that dtype"):
                KINDS[kind](jnp.ones(2, dtype_), name="v", aggregation=aggregation)
            return
        v = KINDS[kind](jnp.ones(2, dtype_), name="v", aggregation=aggregation)

    def own(ctx: Any) -> Any:
        return jnp.array([ctx.replica_id_in_sync_group % 2, 1]).astype(dtype_)

    x = strategy.distribute_values_from_function(own)
    strategy.run(lambda x: v.assign(x), args=(x,), options=replicax.RunOptions(executor))
    assert v.dtype == dtype_
    found = v.value
    expected = np.array(EXPECTED[aggregation])
    if dtype == "bool" and kind == "on_read" and aggregation == "sum":
        assert found.dtype == jnp.int32  # how many are true
    else:
        assert found.dtype == dtype_
        expected = expected.astype(dtype_)
    np.testing.assert_allclose(
        np.asarray(found.astype(jnp.complex64)), expected.astype(np.complex64), rtol=1e-2, err_msg=repr(v)
    )


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_64_bit_numbers_that_are_switched_off_midway(pair, executor) -> None:
    options = replicax.RunOptions(executor)
    with jax.enable_x64(True):
        with pair.scope():
            v = replicax.Variable(np.ones(3), name="v")
        x = pair.distribute_values_from_function(lambda ctx: np.ones(3))

        def step(x):
            return v.assign_add(replicax.get_replica_context().all_reduce("sum", x)).value

        pair.run(step, args=(x,), options=options)
    for call in (lambda: pair.run(lambda: v + 1, options=options), lambda: v.assign(np.zeros(3))):
        with pytest.raises(RuntimeError, match=r"variable 'v' \(float64\[3\]\) has the dtype float64.*numbers are off"):
            call()
    if executor == "compiled":
        with pytest.raises(RuntimeError, match=r"args\[0\]\['x'\] has the dtype float64.*don't change jax_enable_x64"):
            pair.run(lambda e: e["x"].sum(), args=({"x": x},))
    with jax.enable_x64(True):
        assert pair.run(step, args=(x,), options=options).tolist() == [5.0, 5.0, 5.0]
