"""Replicas of a device that run at the same time: each gets what it gets alone, and what can't be is done in turn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax
from replicax import REPLICA_AXIS
from replicax.variables.partitioners import over_all
from tests.compiled.test_local_replicas import assert_same, context, everyones, loops_and_branches, rows
from tests.conftest import strategy_of


def together(at_once: int, replicas: int = 8, devices: int = 2) -> replicax.MirroredStrategy:
    names = [f"cpu:{i}" for i in range(devices)]
    return replicax.MirroredStrategy(names, num_replicas=replicas, replicas_at_once=at_once)


def compare(step: Any, *shape: int, at_once: int = 4, exactly: bool = False) -> None:
    results = []
    for strategy in (together(1), together(at_once)):
        results.append(everyones(strategy, strategy.run(step, args=(rows(strategy, *shape),))))
    if exactly:
        jax.tree.map(np.testing.assert_array_equal, results[1], results[0])
    else:
        assert_same(results[1], results[0])


@pytest.mark.parametrize("at_once", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_each_replica_gets_what_it_gets_alone(at_once: int) -> None:
    def step(x: jax.Array) -> Any:
        mine = context().replica_id_in_sync_group
        key = jax.random.fold_in(jax.random.key(0), mine)
        own, last = lax.scan(lambda c, y: (c + y, c * y), x[0], x)
        ends = lax.while_loop(lambda s: s[0] < mine, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]
        total = context().all_reduce("sum", {"own": own, "half": x.astype(jnp.bfloat16), "n": mine})
        return mine, own, last, ends, jax.random.normal(key, (3,)), total, total["own"].sum() * x

    compare(step, 4, 3, at_once=at_once)


def test_collectives_inside_of_loops_and_branches() -> None:
    def step(x: jax.Array) -> Any:
        found = loops_and_branches(x)
        return {name: found[name] for name in ("scan", "while", "branch", "call")}

    compare(step, 3)


def network(strategy: replicax.Strategy, dtype: Any) -> Any:
    """Gradients of a convolution, of matrices used once and twice, and of a bias; and the program that makes them."""
    rng = np.random.default_rng(1)
    with strategy.scope():
        filters, first, twice, bias = (
            replicax.Variable(rng.normal(size=shape).astype(np.float32) * 0.3)
            for shape in ((3, 3, 2, 4), (64, 40), (40, 40), (40,))
        )
    variables = [filters, first, twice, bias]

    def step(x: Any) -> Any:
        def loss() -> Any:
            kernel, a, b, c = (v.value.astype(dtype) for v in variables)
            dims = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(x.astype(dtype), kernel, (1, 1), "SAME", dimension_numbers=dims)
            y = jnp.tanh(jnp.tanh(y.reshape(y.shape[0], 64) @ a + c[None]) @ b) @ b
            return replicax.compute_average_loss(jnp.square(y.astype(jnp.float32)).sum(-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        return context().all_reduce("sum", gradients), share

    x = strategy.distribute_values_from_function(
        lambda ctx: np.random.default_rng(ctx.replica_id_in_sync_group).normal(size=(3, 4, 4, 2)).astype(np.float32)
    )
    gradients, share = strategy.run(step, args=(x,))
    return [*gradients, strategy.reduce("sum", share)], strategy.extended.trace(step, args=(x,))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_contracted_over_replicas(dtype: Any) -> None:
    expected, _ = network(strategy_of(8), dtype)
    found, program = network(together(4), dtype)
    tolerance = 1e-5 if dtype is jnp.float32 else 3e-2
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * float(jnp.abs(theirs).max()))
    # No replica has gradients of its own.
    assert all(f"[4,{shape}]" not in program.compiled_text() for shape in ("64,40", "3,3,2,4", "40,64", "4,64,40"))


def test_gradients_of_convolutions_in_groups_are_each_replicas_own() -> None:
    """The sum of several such convolutions is none of them, as channels of one replica would meet another's."""

    def step(x: jax.Array) -> Any:
        def loss(kernel: Any) -> Any:
            dims = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims, batch_group_count=2)
            return replicax.compute_average_loss(jnp.tanh(y).sum((1, 2, 3)), global_batch_size=8)

        return context().all_reduce("sum", jax.grad(loss)(jnp.full((3, 3, 4, 4), 0.1)))

    compare(step, 2, 5, 5, 4)


def of_one_after_the_other(x: jax.Array) -> dict[str, Any]:
    mine = context().replica_id_in_sync_group

    def until(s: Any) -> Any:
        return s + 1

    chosen = lax.cond(
        x[0] < 3, lambda: x, lambda: lax.while_loop(lambda s: (s[0] > 3) & (s[0] < 99), until, x)
    )  # for ever, if it were run by those that don't choose it
    ref = jax.new_ref(x)
    ref[0] = x[1]
    keys = jax.random.fold_in(jax.random.key(0, impl="rbg"), mine)
    host = jax.pure_callback(lambda v: np.float32(v * 2), jax.ShapeDtypeStruct((), jnp.float32), x[0])
    return {"branch": chosen, "reference": ref[...], "bits": jax.random.normal(keys, (4,)), "host": host}


@pytest.mark.parametrize("name", ["branch", "reference", "bits", "host"])
def test_what_is_done_in_turn_gives_the_same_bits(name: str) -> None:
    def step(x: jax.Array) -> Any:
        return lax.scan(lambda c, _: (c, of_one_after_the_other(x)[name]), 0, jnp.arange(2))[1]

    compare(step, 3, exactly=True)


def test_products_with_experts_are_done_in_turn() -> None:
    compare(lambda x: lax.ragged_dot(x, jnp.ones((2, 3, 4)), jnp.array([1, 3], jnp.int32)), 4, 3, exactly=True)


def test_replicas_may_have_no_examples() -> None:
    compare(lambda x: x * 2, 0, 3)


def test_prints_come_once_for_each_replica(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: jax.Array) -> Any:
        jax.debug.print("replica {i}", i=context().replica_id_in_sync_group)
        return context().all_reduce("sum", x)

    strategy = together(4, devices=1, replicas=4)
    strategy.run(step, args=(rows(strategy, 2),))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:4] == [f"replica {i}" for i in range(4)]


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (2, 2), (5, 4), (6, 6), (7, 6), (100, 12)])
def test_as_many_as_divide_evenly_run_at_once(wanted: int, found: int) -> None:
    strategy = together(wanted, replicas=24)
    assert strategy.extended.replicas.replicas_at_once == found
    assert strategy_of(2).extended.replicas.replicas_at_once == 1
    numbers = strategy.run(lambda: context().replica_id_in_sync_group * 2 + lax.axis_index(REPLICA_AXIS))
    assert [int(i) for i in strategy.local_results(numbers)] == [3 * i for i in range(24)]


def test_training_with_input_that_does_not_divide_and_many_steps() -> None:
    def train(strategy: replicax.Strategy) -> Any:
        with strategy.scope():
            w = replicax.Variable(np.ones((5, 3), np.float32), name="w")
            optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)))

        def step(x: Any) -> Any:
            share, gradients = replicax.value_and_grad(
                lambda: replicax.compute_average_loss(jnp.tanh(x @ w).sum(-1)), [w]
            )()
            optimizer.apply_gradients(zip(gradients, [w], strict=True))
            return share

        data = np.random.default_rng(0).normal(size=(10, 5)).astype(np.float32)
        for batch in strategy.distribute_dataset([data, data[:7]]):
            strategy.run(step, args=(batch,))
        iterator = iter(strategy.distribute_dataset([data[:8]] * 3))
        strategy.run_steps(lambda ctx, x: ctx.set_last_step_output("loss", step(x), "sum"), iterator, 3)
        return w.numpy()

    with jax.numpy_dtype_promotion("standard"):
        assert_same(train(together(4)), train(strategy_of(1)))


def test_every_strategy_takes_it() -> None:
    tpu = replicax.TPUClusterResolver(emulate="2x1x1x1")
    options = {"num_replicas": 8, "replicas_at_once": 2}
    strategies = [
        replicax.OneDeviceStrategy("cpu:0", **options),
        replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2", **options),
        replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"], **options),
        replicax.ShardedStrategy(["cpu:0", "cpu:1"], over_all(2, min_bytes=0), **options),
        replicax.TPUStrategy(tpu, **options),
    ]
    for strategy in strategies:
        with strategy.scope():
            w = replicax.Variable(np.arange(8.0, dtype=np.float32), name="w", aggregation="sum")
        assert strategy.extended.replicas.replicas_at_once == 2
        strategy.run(lambda: w.assign_add(w.value * jnp.asarray(context().replica_id_in_sync_group, "float32")))  # noqa: B023
        np.testing.assert_array_equal(w, 29.0 * np.arange(8.0))


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [(0, ValueError, "at least 1, got 0.*1 runs them one after the other"), (2.0, TypeError, "an int, got 2.0")],
)
def test_wrong_numbers(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=f"replicas_at_once must be {message}"):
        together(value)
