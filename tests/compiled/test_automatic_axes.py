"""Ordinary programs, with calls of the host and all dtypes, where a replica has several logical devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import replicax
from tests.conftest import logical_strategy
from tests.programs.programs import PROGRAMS, Program, bundles
from tests.programs.test_programs import arguments, check
from tests.soaking import soak_except

_THEMES = ("programs_collectives", "programs_variables")
_OTHERS = {
    "pure_callback",
    "pure_callback_with_a_derivative_in_scan",
    "io_callback_answers_each_replica_by_itself",
    "prints_in_loops_and_branches",
}
BUNDLES = bundles([p for p in PROGRAMS if p.step.__module__.rpartition(".")[2] in _THEMES or p.name in _OTHERS], 8)
OF_THEMES = {which.name.partition(":")[0]: which for which in BUNDLES}.values()
"""One of each theme."""


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # some draw from a key that all replicas have
@pytest.mark.parametrize(
    "which",
    soak_except(BUNDLES, *OF_THEMES),
    ids=lambda p: p.name,
)
def test_a_program_is_what_plain_jax_computes(which: Program) -> None:
    strategy = logical_strategy(2, 2)
    args = arguments(which, strategy)
    executable = strategy.extended.trace(which.step, args)
    expected = which.reference(2)
    for _ in range(2):
        by_replica(which, executable.localities, strategy.run(which.step, args), expected)
    assert executable.call._cache_size() == 1


def by_replica(which: Program, localities: Any, result: Any, expected: list[Any]) -> None:
    """As :func:`check`, with what the first logical device of each replica has of a mirrored result."""

    def mine(leaf: Any) -> Any:
        return leaf if isinstance(leaf, replicax.PerReplica) else jax.device_put(leaf, firsts)

    firsts = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:4:2]), jax.P())
    check(
        which,
        localities,
        jax.tree.map(mine, result, is_leaf=lambda x: isinstance(x, replicax.PerReplica)),
        expected,
    )


def test_a_jitted_helper_may_close_over_arrays_in_a_loop() -> None:
    strategy = logical_strategy(2, 2)
    table = jnp.arange(3.0)

    @jax.jit
    def doubled(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x)
        return x * 2 + table

    def step() -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, x: jax.lax.cond(x[0] < 9, doubled, lambda x: x, x), jnp.ones(3))

    np.testing.assert_array_equal(strategy.run(step), [4, 7, 10])


# --- the host -------------------------------------------------------------------------------------------


def test_the_host_is_called_once_by_each_replica() -> None:
    strategy = logical_strategy(2, 4)
    seen: list[tuple[str, float]] = []

    def note(what: str) -> Callable[[Any], None]:
        return lambda v: seen.append((what, float(v)))

    def ask(x: Any) -> Any:
        seen.append(("asked", float(x)))
        return np.asarray(x) + 1

    def step(x: Any) -> Any:
        jax.debug.callback(note("own"), x)
        jax.debug.callback(lambda: seen.append(("nothing", 0.0)))
        answer = io_callback(ask, jax.ShapeDtypeStruct((), jnp.float32), x)
        jax.lax.cond(x > 0, lambda: jax.debug.callback(note("large"), x), lambda: None)

        def body(i: Any, c: Any) -> Any:
            jax.debug.callback(note("loop"), c)
            return c + 1

        return jax.jit(lambda c: jax.lax.fori_loop(0, 2, body, c))(answer)

    x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
    result = strategy.run(step, (x,))
    jax.effects_barrier()
    expected = [("own", 0.0), ("own", 1.0), ("nothing", 0.0), ("nothing", 0.0), ("asked", 0.0), ("asked", 1.0)]
    expected += [("large", 1.0), ("loop", 1.0), ("loop", 2.0), ("loop", 2.0), ("loop", 3.0)]
    assert sorted(seen) == sorted(expected)
    assert [float(v) for v in result.values] == [3.0, 4.0]


@pytest.mark.parametrize("implementation", ["auto", pytest.param("ring", marks=pytest.mark.soak)])
def test_who_is_late_is_named(implementation: str) -> None:
    strategy = logical_strategy(2, 2)
    options = replicax.CommunicationOptions(timeout_seconds=0.3, implementation=implementation)
    patient = replicax.CommunicationOptions(timeout_seconds=60, implementation=implementation)

    def step(x: Any, seconds: Any, options: Any) -> Any:
        late = seconds * replicax.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)
        x = jax.pure_callback(lambda s, x: (time.sleep(float(s)), x)[1], jax.typeof(x), late, x)
        ctx = replicax.get_replica_context()
        return ctx.all_reduce("sum", x, options), ctx.all_gather(x, 0, options)

    x = strategy.distribute_values_from_function(lambda ctx: jnp.full(2, 1.0 + ctx.replica_id_in_sync_group))
    total, everyone = strategy.run(step, args=(x, 0.0, patient))
    assert (total.tolist(), everyone.tolist()) == ([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])
    with pytest.raises(
        replicax.errors.DeadlockError, match=r"replica\(s\) \[0\] have waited .* for replica\(s\) \[1\]"
    ):
        strategy.run(step, args=(x, 1.5, options))
    time.sleep(1.5)  # the devices are busy until then


# --- dtypes and branches --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "complex64"])
def test_sums_of_any_dtype(dtype: str) -> None:
    strategy = logical_strategy(2, 2)
    x = strategy.distribute_values_from_function(lambda ctx: jnp.array([ctx.replica_id_in_sync_group, 1]).astype(dtype))

    def step(x: Any) -> Any:
        ctx = replicax.get_replica_context()
        sums = ctx.all_reduce("sum", [x, x]), ctx.all_gather(x, 0)
        scattered = None if dtype == "bool" else jax.lax.psum_scatter(x, "replica", tiled=True)
        return sums, scattered, jax.lax.scan(lambda c, _: (c, ctx.all_reduce("sum", c)), x, None, length=2)[1]

    ([total, same], everyone), scattered, scanned = strategy.run(step, args=(x,))
    assert total.dtype == (jnp.int32 if dtype == "bool" else dtype)
    for found in (total, same, *scanned):
        np.testing.assert_array_equal(np.asarray(found).astype(np.complex64), [1, 2])
    np.testing.assert_array_equal(np.asarray(everyone).astype(np.complex64), [0, 1, 1, 1])
    if scattered is not None:
        assert [complex(v[0]) for v in scattered.values] == [1, 2]


def test_gradients_in_bfloat16() -> None:
    strategy = logical_strategy(2, 4)
    x, w = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)

    def step(x: Any, w: Any) -> Any:
        @jax.checkpoint
        def loss(w: Any) -> Any:
            y = strategy.split_to_logical_devices(x, [1, 4]) @ w
            everyone = replicax.get_replica_context().all_gather(y, 0)
            return everyone.astype(jnp.float32).sum()

        return replicax.get_replica_context().all_reduce("mean", jax.grad(loss)(w))

    np.testing.assert_array_equal(strategy.run(step, args=(x, w)).astype(jnp.float32), np.full((8, 8), 16.0))


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # both replicas differentiate the same
def test_branches_may_split_in_different_ways() -> None:
    strategy = logical_strategy(2, 4)
    split = strategy.split_to_logical_devices

    def step(x: Any, which: Any) -> Any:
        def choose(x: Any) -> Any:
            branches = [lambda: split(x, [4, 1]), lambda: split(x * 2, [1, 4]), lambda: jnp.zeros_like(x)]
            return jax.lax.switch(which, branches).sum()

        return jax.value_and_grad(choose)(x)

    x = jnp.ones((4, 4))
    for which, factor in enumerate((1.0, 2.0, 0.0)):
        value, gradient = strategy.run(step, args=(x, which))
        assert float(value) == 16 * factor
        np.testing.assert_array_equal(gradient, np.full((4, 4), factor))
    assert strategy.extended.trace_count(step) == 1
