"""Splitting values over logical devices: the same numbers as on one device, and really less work for each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.execution.tracing import arguments
from tests.conftest import logical_strategy, strategy_of
from tests.soaking import soak_except


def factorisations(count: int, rank: int) -> list[list[int]]:
    return [list(p) for p in itertools.product(range(1, count + 1), repeat=rank) if math.prod(p) == count]


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def kinds(strategy: replicax.Strategy, fn: Callable[..., Any], *args: Any) -> list[str]:
    return [c.kind for c in strategy.extended.trace(fn, args=args).collectives()]


# --- the same numbers -----------------------------------------------------------------------------------


EVERY_SPLIT = [(r, p) for r, n in ((1, 8), (2, 4), (4, 2)) for p in factorisations(n, 3)]
SPLITS = [(1, [2, 1, 4]), (2, [2, 2, 1]), (4, [1, 1, 2]), (1, [1, 2, 3])]


@pytest.mark.parametrize(
    ("replicas", "parts"),
    [*SPLITS, *(pytest.param(*split, marks=pytest.mark.soak) for split in EVERY_SPLIT if split not in SPLITS)],
    ids=str,
)
def test_values_and_gradients_are_those_of_one_device(replicas: int, parts: list[int]) -> None:
    strategy = logical_strategy(replicas, math.prod(parts))
    x, w = normal(replicas, 24, 24, 24), normal(24, 12, seed=1)
    with strategy.scope():
        v = replicax.Variable(w, name="w")

    def forward(x: Any, w: Any, split: Callable[[Any], Any]) -> Any:
        h = jnp.tanh(split(x) @ w)
        return split(jnp.concatenate([h, h * h], -1)).mean((-1, -2))

    def step(x: Any) -> Any:
        def split(a: Any) -> Any:
            return strategy.split_to_logical_devices(a, parts)

        def loss(x: Any) -> Any:
            return forward(x, v, split).sum()

        value, (of_w,) = replicax.value_and_grad(loss, [v])(x)
        total = replicax.get_replica_context().all_reduce("sum", of_w)
        v.assign_sub(0.1 * total)
        return value, jax.grad(loss)(x), total

    def plain(w: Any, x: Any) -> Any:
        return forward(x.reshape(-1, 24, 24), w, lambda a: a).sum()

    reference = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))
    data = strategy.distribute_values_from_function(lambda ctx: x[ctx.replica_id_in_sync_group])
    executable = strategy.extended.trace(step, args=(data,))
    for _ in range(2):
        value, (of_w, _) = reference(w, x)
        values, gradients, total = strategy.run(step, args=(data,))
        w = w - 0.1 * of_w
        _, (_, of_x) = reference(w, x)  # the step has assigned before it differentiates by x
        np.testing.assert_allclose(sum(map(np.asarray, strategy.local_results(values))), value, rtol=1e-5)
        np.testing.assert_allclose(total, of_w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(v.numpy(), w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.stack(strategy.local_results(gradients)), of_x, rtol=1e-5, atol=1e-5)
    assert strategy.extended.trace_count(step) == 1
    assert executable.call._cache_size() == 1  # compiled once


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # all replicas differentiate the same
@pytest.mark.parametrize("executor", soak_except(["compiled", "per_replica"], "compiled"))
def test_under_transformations(executor: str) -> None:
    strategy = logical_strategy(2, 4)
    options = replicax.RunOptions(executor)
    x, w = jnp.asarray(normal(8, 8)), jnp.asarray(normal(8, 8, seed=1))

    def body(split: Callable[[Any], Any]) -> Any:
        def fn(x: Any, w: Any) -> Any:
            scanned = jax.lax.scan(lambda c, r: (jnp.tanh(split(c) @ w + r[None]), c.sum()), x, x)
            mapped = jax.vmap(split)(jnp.stack([x, w]))
            branch = jax.lax.cond(x[0, 0] > 0, lambda: split(x), lambda: split(w))
            jitted = jax.jit(lambda a: split(a * 2))(x)
            kept = jax.checkpoint(lambda a: jnp.sin(split(a) @ w))(x)
            looped = jax.lax.fori_loop(0, 3, lambda i, c: split(c) * 0.5, x)
            return jax.tree.map(jnp.sum, (scanned, mapped * mapped, branch, jitted, kept, looped))

        def gradients(x: Any, w: Any) -> Any:  # no reverse mode through fori_loop without a fixed length
            return jax.grad(lambda x: sum(jax.tree.leaves(fn(x, w))))(x)

        return fn, gradients

    fn, gradients = body(lambda a: strategy.split_to_logical_devices(a, [2, 2]))
    plain, plain_gradients = body(lambda a: a)
    for ours, theirs in ((fn, plain), (gradients, plain_gradients)):
        found = strategy.run(ours, args=(x, w), options=options)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, jax.jit(theirs)(x, w))


def test_nested_maps_and_second_derivatives() -> None:
    strategy = logical_strategy(1, 4)

    def fn(split: Callable[[Any], Any]) -> Any:
        f = jax.vmap(jax.vmap(lambda a: jnp.sum(jnp.sin(split(a)) ** 2)))
        return jax.jit(jax.hessian(lambda a: f(a).sum()))

    x = jnp.asarray(normal(2, 1, 4))
    found = strategy.run(fn(lambda a: strategy.split_to_logical_devices(a, [4])), args=(x,))
    np.testing.assert_allclose(found, fn(lambda a: a)(x), rtol=1e-5, atol=1e-6)


def test_locality_passes_through() -> None:
    strategy = logical_strategy(2, 2)

    def step(mine: Any, shared: Any) -> Any:
        split = strategy.split_to_logical_devices
        total = replicax.get_replica_context().all_reduce("sum", split(mine, [2]))
        return split(mine, [2]), split(shared, [2]), strategy.replicate_to_logical_devices(total)

    mine = strategy.distribute_values_from_function(lambda ctx: jnp.full(2, ctx.replica_id_in_sync_group))
    assert "".join(p.value for p in strategy.extended.trace(step, args=(mine, jnp.ones(2))).localities) == "TMM"


def test_what_has_been_reduced_still_counts_as_reduced() -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        v = replicax.Variable(jnp.zeros(2), name="v")
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def twice(x: Any) -> None:
        total = replicax.get_replica_context().all_reduce("sum", x)
        optimizer.apply_gradients([(strategy.split_to_logical_devices(total, [2]), v)])

    with pytest.raises(replicax.errors.LocalityError, match="has been all-reduced"):
        strategy.run(twice, args=(jnp.ones(2),))


# --- really split ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # all replicas differentiate the same
def test_layers_and_their_gradients_take_a_part_of_the_work_and_the_memory() -> None:
    strategy = logical_strategy(2, 4)

    def compiled(split: bool) -> Any:
        def loss(w: Any, x: Any) -> Any:
            for _ in range(4):
                x = jnp.tanh(x @ w)
                if split:
                    x = strategy.split_to_logical_devices(x, [4, 1])
            return x.sum()

        args = (jnp.ones((256, 256)), jnp.ones((1024, 256)))
        return strategy.extended.trace(lambda w, x: jax.grad(loss)(w, x).sum(), args=args).compiled()

    whole, split = compiled(False), compiled(True)
    assert whole.cost_analysis()["flops"] / split.cost_analysis()["flops"] == pytest.approx(4, rel=0.01)
    activations = 4 * 1024 * 256 * 4  # bytes; a gradient of the weights comes on top
    assert whole.memory_analysis().temp_size_in_bytes > activations
    assert split.memory_analysis().temp_size_in_bytes < activations / 4 + 5 * 256 * 256 * 4


def conv(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    ("replicas", "parts"), soak_except([(1, [1, 2, 4, 1]), (2, [1, 4, 1, 1]), (2, [1, 2, 2, 1])], (2, [1, 2, 2, 1]))
)
def test_a_split_image_is_convolved_in_parts_that_exchange_their_borders(replicas, parts) -> None:
    strategy = logical_strategy(replicas, math.prod(parts))
    images, kernel = normal(replicas, 2, 32, 32, 4), normal(3, 3, 4, 4, seed=1)
    data = strategy.distribute_values_from_function(lambda ctx: images[ctx.replica_id_in_sync_group])
    data = strategy.split_to_logical_devices(data, parts)

    def step(x: Any, kernel: Any) -> Any:
        def loss(kernel: Any, x: Any) -> Any:
            y = strategy.split_to_logical_devices(conv(jax.nn.relu(conv(x, kernel)), kernel), parts)
            return jnp.sum(jnp.sin(y))

        return jax.value_and_grad(loss)(kernel, strategy.split_to_logical_devices(x, parts))

    executable = strategy.extended.trace(step, args=(data, kernel))
    forward = strategy.extended.trace(lambda x, k: step(x, k)[0], args=(data, kernel)).collectives()
    assert {c.kind for c in forward} == {"collective-permute", "all-reduce"}  # which sums up the loss
    borders = [c.bytes for c in forward if c.kind == "collective-permute"]
    assert max(borders) < images[0].nbytes / 4
    values, gradients = strategy.run(step, args=(data, kernel))
    reference = jax.jit(jax.value_and_grad(lambda k, x: jnp.sum(jnp.sin(conv(jax.nn.relu(conv(x, k)), k)))))
    for i, (value, gradient) in enumerate(
        zip(strategy.local_results(values), strategy.local_results(gradients), strict=True)
    ):
        expected = reference(kernel, images[i])
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-4)
    assert executable.call._cache_size() == 1


def pool(x: Any, start: float, reduction: Any) -> Any:
    return jax.lax.reduce_window(x, np.float32(start), reduction, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def windows(x: Any) -> dict[str, Any]:
    """Windows of one shape with other values beyond the edges, all of the same image."""
    kernel = jnp.ones((3, 3, 3, 4))
    largest = functools.partial(pool, start=-np.inf, reduction=jax.lax.max)
    return {
        "convolution": jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        "maximum": largest(x),
        "minimum": pool(x, np.inf, jax.lax.min),
        "sum": pool(x, 0.0, jax.lax.add),
        "gradient": jax.grad(lambda x: jnp.sum(largest(x) ** 2))(x),
        "zeros": jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]),
        "sevens": jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=7.0),
        "sums": jax.lax.cumsum(x, 1),
        "products": jax.lax.cumprod(x, 1),
        "maxima": jax.lax.cummax(x, 1),
    }


def columns(x: Any) -> dict[str, Any]:
    """Changes of one column, and of one element, at a place that only one of the devices has."""
    return {
        "set": x.at[:, 2].set(9.0),
        "set a slice": x.at[:, 2:3].set(9.0),
        "added": x.at[:, 1].add(1.0),
        "multiplied": x.at[:, 1].multiply(2.0),
        "gradient": jax.grad(lambda x: jnp.sum(x.at[:, 2].set(9.0) ** 2))(x),
        "element": x.at[1, 3].set(9.0),
    }


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # all replicas differentiate the same
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("fn", "shape", "parts"),
    [(windows, (2, 8, 8, 3), [1, 2, 1, 1]), (columns, (2, 4), [1, 2])],
    ids=["windows", "columns"],
)
def test_operations_on_one_split_value_do_not_affect_each_other(fn: Any, shape: Any, parts: Any, replicas: int) -> None:
    strategy = logical_strategy(replicas, 2)
    values = normal(replicas, *shape)
    data = strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])
    results = strategy.run(lambda x: fn(strategy.split_to_logical_devices(x, parts)), args=(data,))
    for replica in range(replicas):
        for name, expected in jax.jit(fn)(values[replica]).items():
            found = strategy.local_results(results[name])[replica]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_only_windows_that_are_filled_with_other_values_are_kept_apart() -> None:
    strategy = logical_strategy(1, 2)

    def barriers(fn: Callable[[Any], Any]) -> int:
        split = strategy.split_to_logical_devices
        lowered = strategy.extended.trace(lambda x: fn(split(x, [1, 2])), (jnp.ones((4, 4)),)).lowered()
        return str(lowered.as_text()).count("optimization_barrier")

    assert barriers(lambda x: jax.grad(lambda x: jnp.sum(x[:, 1:] ** 2))(jnp.cumsum(x, 1))) == 0
    assert barriers(lambda x: jnp.pad(x, 1, constant_values=1.0)) == 1


def test_replicating_gathers_once() -> None:
    strategy = logical_strategy(2, 4)

    def step(x: Any) -> Any:
        return strategy.replicate_to_logical_devices(strategy.split_to_logical_devices(x, [4, 1]) * 2) + 1

    assert kinds(strategy, step, jnp.ones((8, 3))) == ["all-gather"]


def test_a_sum_over_replicas_stays_in_parts() -> None:
    """Many small arrays are packed where a replica has one device; here that would bring their parts together."""
    strategy = logical_strategy(2, 4)

    def step(x: Any) -> Any:
        arrays = [strategy.split_to_logical_devices(x * float(i), [4]) for i in range(1, 6)]
        totals = replicax.get_replica_context().all_reduce("sum", arrays)
        return [strategy.split_to_logical_devices(t, [4]).sum() for t in totals]

    x = strategy.distribute_values_from_function(lambda ctx: jnp.ones(64))
    collectives = strategy.extended.trace(step, args=(x,)).collectives()
    assert {c.kind for c in collectives} == {"all-reduce"}
    assert max(c.bytes for c in collectives) == 5 * 64 * 4 // 4
    assert [float(t) for t in strategy.run(step, args=(x,))] == [128.0 * i for i in range(1, 6)]


# --- what may be split, and from where ------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_variables_numbers_and_pytrees(executor: str) -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        v = replicax.Variable(jnp.arange(4.0), name="v")

    def step() -> Any:
        tree = strategy.experimental_split_to_logical_devices({"v": v, "n": np.ones(2, np.float32)}, [2])
        scalar = strategy.experimental_replicate_to_logical_devices(3.0)
        return tree, scalar, isinstance(scalar, jax.Array), v

    tree, scalar, is_array, same = strategy.run(step, options=replicax.RunOptions(executor))
    assert tree["v"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (tree["n"].tolist(), float(scalar), is_array, same is v) == ([1.0, 1.0], 3.0, True, True)


WRONG: list[tuple[Any, str]] = [
    ([2, 2, 1], r"has 2 dims, but partition_dimensions \[2, 2, 1\] has 3 entries"),
    ([2, 4], r"partition_dimensions \[2, 4\] makes 8 parts, but a replica has 4 logical device\(s\)"),
    ([1, 4], r"dim 1 of size 6 does not divide into 4 parts \(6 = 4 × 1 \+ 2\)"),
    ("ab", "must be a list of positive ints"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG, ids=str)
@pytest.mark.parametrize("where", ["compiled", "per_replica", "outside"])
def test_what_does_not_fit_is_named(where: str, parts: Any, message: str) -> None:
    strategy = logical_strategy(2, 4)
    with strategy.scope():
        v = replicax.Variable(jnp.ones((4, 6)), name="kernel")
    names = {
        r"split_to_logical_devices: \['x'\]\[0\] \(float32\[4,6\]\)": {"x": [jnp.ones((4, 6))]},
        r"split_to_logical_devices: the array \(float32\[4,6\]\)": jnp.ones((4, 6)),
        r"split_to_logical_devices: variable 'kernel' \(float32\[4,6\]\)": v,
    }
    for name, value in names.items():

        def split(value: Any = value) -> Any:
            v.assign(v * 2)
            return strategy.split_to_logical_devices(value, parts)

        def in_step(step: Any = split) -> Any:
            return strategy.run(step, options=replicax.RunOptions(where))

        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            strategy.split_to_logical_devices(value, parts) if where == "outside" else in_step()
    assert float(v.numpy().sum()) == 24.0  # nothing has been assigned


def test_one_logical_device_has_the_whole() -> None:
    strategy = strategy_of(2)
    x = jnp.ones((4, 6))
    assert strategy.run(lambda x: strategy.split_to_logical_devices(x, [1, 1]) + 1, args=(x,)).sum() == 48.0
    assert kinds(strategy, lambda x: strategy.replicate_to_logical_devices(x) + 1, x) == []
    with pytest.raises(ValueError, match=r"makes 2 parts, but a replica has 1 logical device\(s\)"):
        strategy.run(lambda x: strategy.split_to_logical_devices(x, [2, 1]), args=(x,))


def test_in_another_strategys_step() -> None:
    ours, other = logical_strategy(2, 4), strategy_of(2)
    with pytest.raises(
        replicax.errors.ContextError, match="split_to_logical_devices of Strategy.* in a step of Mirrored"
    ):
        other.run(lambda: ours.split_to_logical_devices(jnp.ones(4), [4]))


def test_inputs_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is split outside a step need not be whole on any device, nor is it gathered at the door."""
    strategy = logical_strategy(2, 4)
    x = strategy.distribute_values_from_function(lambda ctx: normal(8, 8, seed=ctx.replica_id_in_sync_group))
    shared = normal(8, 8, seed=7)
    split_x, split_shared = strategy.split_to_logical_devices((x, shared), [2, 2])
    assert split_x.form.array.addressable_shards[0].data.shape == (1, 4, 4)
    assert split_shared.addressable_shards[0].data.shape == (4, 4)

    def step(x: Any, shared: Any) -> Any:
        return (strategy.split_to_logical_devices(x, [2, 2]) * strategy.split_to_logical_devices(shared, [2, 2])).sum()

    whole = strategy.run(step, args=(x, shared))
    monkeypatch.setattr(arguments, "put", None)  # nothing is moved
    parts = strategy.run(step, args=(split_x, split_shared))
    monkeypatch.undo()
    assert strategy.extended.trace_count(step) == 1
    np.testing.assert_allclose([float(v) for v in parts.values], [float(v) for v in whole.values], rtol=1e-6)
    for i, component in enumerate(strategy.local_results(split_x)):
        np.testing.assert_array_equal(component, normal(8, 8, seed=i))
        assert component.devices() == {strategy.extended.worker_devices[i]}
    uneven = strategy.distribute_values_from_function(lambda ctx: jnp.ones(4 + ctx.replica_id_in_sync_group))
    with pytest.raises(TypeError, match="is not an array of the same shape on every replica"):
        strategy.split_to_logical_devices(uneven, [4])
