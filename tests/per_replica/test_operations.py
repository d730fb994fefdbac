"""Single operations, compiled once for all devices of a kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax import _jax
from replicax.per_replica.eager.derivatives import tracing_rules_once
from replicax.per_replica.eager.eager_trace import EagerTrace, WatchingTrace
from tests import processes
from tests.per_replica import workers_cached
from tests.per_replica.test_programs import compilations
from tests.soaking import soak_except


def on(device: jax.Device) -> contextlib.ExitStack:
    """Compute operation by operation, on ``device``."""
    stack = contextlib.ExitStack()
    trace = _jax.set_current_trace(EagerTrace(device))
    for manager in (tracing_rules_once(), trace, jax.default_device(device), jax.disable_jit()):
        stack.enter_context(manager)
    return stack


X = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: jnp.tanh(x) * 2.5 + x,
    "many elements": lambda x: jnp.exp(jnp.broadcast_to(x, (1500, 3, 4))),
    "several results": lambda x: jax.lax.sort_key_val(x, -x),
    "a scatter": lambda x: x.at[jnp.array([0, 2])].add(x[:2]),
    "a matrix product": lambda x: x @ x.T,
    "integers and booleans": lambda x: (x > 0, jnp.argmax(x, 1), jnp.arange(5) // 2),
    "weak types": lambda x: jnp.asarray(2.0) * x.astype(jnp.bfloat16),
    "no elements": lambda x: x[:0] * 2,
    "random keys": lambda x: jax.random.uniform(jax.random.key(3), x.shape),
    "a solver": lambda x: jax.scipy.linalg.solve(x @ x.T + jnp.eye(3), x, assume_a="pos"),
}


@pytest.mark.parametrize("name", soak_except(OPERATIONS, "several results", "weak types", "no elements", "random keys"))
def test_results_are_those_of_jax(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        expected = OPERATIONS[name](jnp.asarray(X))
        for device in jax.devices()[:2]:
            x = jax.device_put(X, device)
            with on(device):
                found = OPERATIONS[name](x)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert (a.dtype, a.weak_type, a.devices()) == (b.dtype, b.weak_type, {device})
                np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2e-6, atol=1e-6)


def test_other_devices_load_what_one_has_compiled() -> None:
    found = []
    for device in jax.devices()[:4]:
        x = jax.device_put(np.ones((3, 7), np.float32), device)
        trace = WatchingTrace(lambda *_: None, device, each=False)
        with compilations() as compiled, on(device), _jax.set_current_trace(trace):
            assert jnp.cosh(x).devices() == {device}
            assert jax.grad(lambda x: (x * jnp.arccosh(2 + x)).sum())(x).devices() == {device}
        found.append(bool(compiled))
    assert found == [True, False, False, False]


def test_a_power_is_one_program_for_all_exponents() -> None:
    device = jax.devices()[1]
    x = jax.device_put(np.float32(0.9), device)
    with on(device):
        jnp.power(x, 1)
        with compilations() as compiled:
            found = [float(jax.lax.integer_pow(x, n)) for n in (-7, 0, 1, 2, 3, 31, 200)]
    assert not compiled
    assert found == [float(jax.lax.integer_pow(np.float32(0.9), n)) for n in (-7, 0, 1, 2, 3, 31, 200)]


def test_an_array_that_lies_elsewhere_is_brought() -> None:
    here, there = jax.devices()[:2]
    with on(here):
        x = jax.device_put(X, there)
        for y in (x + x, x + jax.device_put(X, here), jnp.ones((3, 4)) + x):
            assert y.devices() == {here}
        assert x.devices() == {there}


def test_nans_are_looked_for() -> None:
    device = jax.devices()[0]
    with on(device), jax.debug_nans(True), pytest.raises(FloatingPointError):
        jnp.log(jax.device_put(-np.ones(3, np.float32), device))


def test_with_a_cache_of_compiled_programs_on_disk(tmp_path) -> None:
    for _ in range(2):  # the second time from the disk
        [found] = processes.run(workers_cached.run, str(tmp_path), workers=1, devices=2, fresh=True)
        np.testing.assert_allclose(found, [0.0, 3.8415], rtol=1e-4)
    assert list(tmp_path.iterdir())
