"""Variables that are split over the logical devices of a replica."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables import variable as module
from replicax.variables.partitioners import over_all
from tests.conftest import logical_strategy, strategy_of
from tests.programs.programs import third_party
from tests.soaking import soak_except


def parts_of(variable: replicax.Variable) -> set[tuple[int, ...]]:
    """The shapes of what the devices hold."""
    return {s.data.shape for s in variable.slot.array.addressable_shards}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("replicas", "parts"), [(1, [1, 8]), (1, [2, 4]), (2, [4, 1]), (4, [1, 2]), (1, [3, 2])])
@pytest.mark.parametrize("how", ["callable", "array", "numpy"])
def test_it_is_split_from_the_start(replicas: int, parts: list[int], how: str) -> None:
    strategy = logical_strategy(replicas, math.prod(parts))
    value = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    initial = {"callable": lambda: jnp.asarray(value), "array": jnp.asarray(value), "numpy": value}[how]
    with strategy.scope():
        v = replicax.Variable(initial, name="v", partition_dimensions=parts)
    assert parts_of(v) == {(24 // parts[0], 16 // parts[1])}
    np.testing.assert_array_equal(v.numpy(), value)
    [first, *_] = strategy.local_results(v)
    np.testing.assert_array_equal(first, value)
    where = f"split [{parts[0]}, {parts[1]}] over {math.prod(parts)} logical devices"
    where = where if replicas == 1 else f"mirrored on {replicas} replicas, {where} of each"
    assert v.layout.describe(strategy.extended.mesh) == where
    assert repr(v).startswith(f"<Variable 'v' float32[24,16] {where}:\n[[")


def test_no_device_has_the_whole_while_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, sizes, jit = logical_strategy(1, 8), [], jax.jit

    def measured(fn: Any, **options: Any) -> Any:
        jitted = jit(fn, **options)
        if "out_shardings" in options:
            memory = jitted.lower().compile().memory_analysis()
            sizes.append((memory.output_size_in_bytes, memory.temp_size_in_bytes))
        return jitted

    monkeypatch.setattr(jax, "jit", measured)
    with strategy.scope():
        replicax.Variable(lambda: jax.random.normal(jax.random.key(0), (2048, 256)), partition_dimensions=[1, 8])
    [(output, temporary)] = sizes
    whole = 2048 * 256 * 4
    assert output == whole / 8
    assert temporary < whole / 2  # random bits of the part, in three steps


def test_what_comes_from_the_host_is_split_there(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = logical_strategy(2, 4)
    value = np.random.default_rng(0).normal(size=(8, 4))  # float64, as NumPy makes it

    def to_one_device(array: Any, *args: Any) -> Any:
        raise AssertionError(f"{type(array)} of shape {np.shape(array)} was put on a device whole")

    with monkeypatch.context() as patch, strategy.scope():
        patch.setattr(module.jnp, "asarray", to_one_device)
        v = replicax.Variable(value, name="v", partition_dimensions=[4, 1])
        v.assign(2 * value)
        copies = replicax.Variable(
            value, synchronization="on_read", aggregation="mean", partition_dimensions=[4, 1], dtype=np.float32
        )
    assert v.dtype == jnp.float32
    assert parts_of(v) == {(2, 4)}
    assert parts_of(copies) == {(1, 2, 4)}
    np.testing.assert_allclose(v.numpy(), 2 * value, rtol=1e-6)
    np.testing.assert_allclose(copies.numpy(), value, rtol=1e-6)


def model(strategy: replicax.Strategy | None, logical: int) -> list[replicax.Variable]:
    def split(*parts: int) -> Any:
        return None if strategy is None else list(parts)

    rng = np.random.default_rng(3)
    return [
        replicax.Variable((0.3 * rng.normal(size=(6, 16))).astype(np.float32), partition_dimensions=split(1, logical)),
        replicax.Variable(np.zeros(16, np.float32), partition_dimensions=split(logical)),
        replicax.Variable((0.3 * rng.normal(size=(16, 3))).astype(np.float32), partition_dimensions=split(logical, 1)),
        replicax.Variable(np.zeros(3, np.float32)),
    ]


def trained(strategy: replicax.Strategy, logical: int | None, exact: bool) -> Any:
    x = np.random.default_rng(5).normal(size=(8, 9)).astype(np.float32)
    [batch] = strategy.distribute_dataset([x])
    with strategy.scope():
        variables = model(None if logical is None else strategy, logical or 1)
        optimizer = replicax.Optimizer(optax.adam(0.05))

    def step(x: Any) -> Any:
        w, b, u, c = variables

        def loss() -> Any:
            h = jnp.tanh(x[:, :6] @ w + b.value[None])
            return replicax.compute_average_loss(jnp.square(h @ u + c.value[None] - x[:, 6:]).sum(-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return share

    executors = ["compiled", "per_replica" if exact else "compiled", "compiled"]
    losses = [
        sum(np.asarray(v) for v in strategy.local_results(strategy.run(step, (batch,), options=replicax.RunOptions(e))))
        for e in executors
    ]
    return losses, variables, optimizer, strategy.extended.trace(step, args=(batch,))


@pytest.mark.parametrize(
    ("replicas", "logical", "exact"), soak_except([(1, 8, False), (2, 4, False), (2, 2, True)], (2, 4, False))
)
@third_party
def test_training_is_that_of_one_device(replicas: int, logical: int, exact: bool) -> None:
    reference, plain, slots, _ = trained(strategy_of(1), None, False)
    strategy = logical_strategy(replicas, logical)
    losses, variables, optimizer, executable = trained(strategy, logical, exact)
    np.testing.assert_allclose(losses, reference, rtol=1e-5)
    for ours, theirs in zip([*variables, *optimizer.variables], [*plain, *slots.variables], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5, err_msg=ours.name)
    w, b, u, c = (v.layout for v in variables)
    assert [s.layout for s in optimizer.variables[1:]] == [w, b, u, c] * 2  # a slot lies as its parameter does
    assert [parts_of(v) for v in variables] == [{(6, 16 // logical)}, {(16 // logical,)}, {(16 // logical, 3)}, {(3,)}]
    assert executable.call._cache_size() == 1
    # The gradients are summed in parts, and no parameter is gathered.
    assert "all-gather" not in {c.kind for c in executable.collectives()}


def test_a_copy_on_each_replica_in_parts() -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        v = replicax.Variable(
            jnp.zeros(4), name="v", synchronization="on_read", aggregation="sum", partition_dimensions=[2]
        )

    def step() -> Any:
        replica = jnp.float32(replicax.get_replica_context().replica_id_in_sync_group)
        return v.assign_add(jnp.arange(4.0) * (1.0 + replica)).value

    for executor in ("compiled", "per_replica", "compiled"):
        strategy.run(step, options=replicax.RunOptions(executor))
        assert parts_of(v) == {(1, 2)}
        assert v.layout.describe(strategy.extended.mesh) == (
            "a copy on each of 2 replicas, split [2] over 2 logical devices of each"
        )
    assert v.numpy().tolist() == [0.0, 9.0, 18.0, 27.0]
    assert [c.tolist() for c in strategy.local_results(v)] == [[0.0, 3.0, 6.0, 9.0], [0.0, 6.0, 12.0, 18.0]]
    v.assign(jnp.full(4, 8.0))
    assert (parts_of(v), v.numpy().tolist()) == ({(1, 2)}, [8.0] * 4)
    assert strategy.extended.trace(step).call._cache_size() == 1


def test_it_stays_split_whoever_assigns() -> None:
    strategy = logical_strategy(2, 4)
    with strategy.scope():
        v = replicax.Variable(jnp.ones((4, 8)), name="v", aggregation="mean", partition_dimensions=[1, 4])

    def rows(_: Any) -> None:
        v.scatter_add(replicax.IndexedSlices(jnp.ones((1, 8)), jnp.array([2]), v.shape))

    def scaled(factor: Any) -> Any:
        v.assign(v * (1.0 + factor * jnp.float32(replicax.get_replica_context().replica_id_in_sync_group)))
        return jax.lax.scan(lambda c, _: (c + v.value.sum(), None), 0.0, None, length=2)[0]

    def across(strategy: Any) -> Any:
        strategy.extended.update(v, lambda v, x: v.assign_sub(x), args=(jnp.ones((4, 8)),))

    value = np.ones((4, 8))
    for change, effect in [
        (lambda: strategy.run(scaled, args=(2.0,)), lambda x: 2 * x),
        (lambda: strategy.run(rows, args=(0,)), lambda x: x + (np.arange(4) == 2)[:, None]),
        (lambda: v.assign_add(jnp.ones((4, 8))), lambda x: x + 1),
        (lambda: strategy.run(lambda: replicax.get_replica_context().merge_call(across)), lambda x: x - 1),
        (lambda: v.assign(5.0 * np.ones((4, 8))), lambda x: 5 + 0 * x),
    ]:
        change()
        value = effect(value)
        np.testing.assert_allclose(v.numpy(), value)
        assert parts_of(v) == {(4, 2)}


def test_the_strategys_partitioner_splits_the_parts() -> None:
    strategy = logical_strategy(2, 2, over_all(2, min_bytes=0))
    with strategy.scope():
        v = replicax.Variable(jnp.ones((4, 4)), name="v", partition_dimensions=[2, 1])
        w = replicax.Variable(jnp.ones((4, 4)), name="w")
    assert strategy.run(lambda: (v.value @ w.value).sum()).tolist() == 64.0
    assert (parts_of(v), parts_of(w)) == ({(2, 2)}, {(2, 4)})
    assert "logical" in v.layout.describe(strategy.extended.mesh)
    assert "logical" not in w.layout.describe(strategy.extended.mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"partition_dimensions": [4]},
            r"variable 'v' \(float32\[4,6\]\) has 2 dims, but partition_dimensions \[4\] has",
        ),
        ({"partition_dimensions": [1, 2]}, r"variable 'v' .* makes 2 parts, but a replica has 4 logical device"),
        ({"partition_dimensions": [1, 4]}, r"variable 'v' .* dim 1 of size 6 does not divide into 4 parts"),
        (
            {"partition_dimensions": [2, 2], "partitioner": replicax.variables.FixedShardsPartitioner(2, dim=1)},
            r"variable 'v' .* parts of size 3 along dim 1, which do not divide into 2 pieces of one size",
        ),
    ],
)
@pytest.mark.parametrize("initial", [lambda: jnp.ones((4, 6)), np.ones((4, 6))], ids=["callable", "numpy"])
def test_what_does_not_fit(initial: Any, options: Any, message: str) -> None:
    strategy = logical_strategy(2, 4)
    with strategy.scope(), pytest.raises(ValueError, match=message):
        replicax.Variable(initial, name="v", **options)


def test_not_in_one_place_and_on_logical_devices() -> None:
    devices = np.array(jax.devices()[:4], dtype=object).reshape(2, 2)
    pairs = replicax.Strategy(replicax.StrategyExtended(devices, parameter_device=jax.devices()[5]))
    for options in ({"partition_dimensions": [2]}, {"logical_device": 1}):
        with pairs.scope(), pytest.raises(ValueError, match="'v' .* is to be on cpu:5, and can't be on logical"):
            replicax.Variable(jnp.ones(4), name="v", **options)


def test_beside_a_variable_that_is_split_over_replicas_and_logical_devices() -> None:
    strategy = logical_strategy(2, 2, replicax.variables.FixedShardsPartitioner(2))
    pieces, whole = "split along dim 0 over 2 replicas", "mirrored on 2 replicas"
    parts = "split [{}, {}] over 2 logical devices of each"
    with strategy.scope():
        columns = replicax.Variable(jnp.ones((4, 4)), partition_dimensions=[1, 2])
        rows = replicax.Variable(jnp.ones((4, 4)), partition_dimensions=[2, 1])
        second = replicax.Variable(jnp.ones((4, 4)), logical_device=1)
    for other, shape, where in [
        (columns, (4, 6), f"{pieces}, {parts.format(1, 2)}"),
        (columns, (4, 3), pieces),
        (columns, (4,), pieces),
        (columns, (6, 4), f"{whole}, {parts.format(1, 2)}"),
        (columns, (), whole),
        (rows, (4, 3), f"{pieces}, {parts.format(2, 1)}"),
        (rows, (4,), whole),
        (rows, (6, 3), f"{whole}, {parts.format(2, 1)}"),
        (second, (6,), f"on logical device 1, {pieces}"),
        (second, (1, 6), f"on logical device 1, {whole}"),
    ]:
        with strategy.scope(), strategy.extended.colocate_vars_with(other):
            v = replicax.Variable(np.arange(math.prod(shape)).reshape(shape))
        assert v.layout.describe(strategy.extended.mesh) == where
        np.testing.assert_array_equal(v.numpy(), np.arange(math.prod(shape)).reshape(shape))


def test_a_device_that_is_full_is_reported_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 32 bytes.")

    monkeypatch.setattr(module, "compute", full)
    with strategy_of(2).scope(), pytest.raises(jax.errors.JaxRuntimeError) as e:
        replicax.Variable(lambda: jnp.zeros((2, 4)), name="large")
    assert e.value.__notes__ == ["(raised while the initial value of variable 'large' (float32[2,4]) was computed)"]
