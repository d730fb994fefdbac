from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import collectives
from tests.conftest import strategy_of


def per_replica(strategy: replicax.Strategy, fn):
    return strategy.distribute_values_from_function(lambda ctx: fn(ctx.replica_id_in_sync_group))


def context() -> replicax.ReplicaContext:
    replica = replicax.get_replica_context()
    assert replica is not None
    return replica


# --- ReduceOp -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "SUM", "Sum", replicax.ReduceOp.SUM])
def test_reduce_op_in_any_case(name) -> None:
    assert replicax.ReduceOp.parse(name) is replicax.ReduceOp.SUM


@pytest.mark.parametrize("bad", ["total", None, 3])
def test_unknown_reduce_op(bad) -> None:
    with pytest.raises(ValueError, match="must be 'sum', 'mean' or a ReduceOp"):
        replicax.ReduceOp.parse(bad)


@pytest.mark.parametrize(("op", "instead"), [("max", "pmax"), ("MIN", "pmin"), ("maximum", "pmax")])
def test_reduce_op_of_jax_lax(pair, op, instead) -> None:
    with pytest.raises(ValueError, match=rf"in a step jax\.lax\.{instead}\(value, replicax\.REPLICA_AXIS\)"):
        replicax.ReduceOp.parse(op)
    [x] = pair.distribute_dataset([np.arange(4.0, dtype=np.float32)])
    combined = pair.run(lambda x: getattr(jax.lax, instead)(x, replicax.REPLICA_AXIS), args=(x,))
    assert combined.tolist() == ([2, 3] if instead == "pmax" else [0, 1])


# --- all_reduce -----------------------------------------------------------------------------------------

SHAPES = [(), (3,), (0,), (7, 5), (1, 1, 2), (200, 100)]  # the last is too large to be packed
DTYPES = [np.float32, np.int32, jnp.bfloat16, np.bool_, np.complex64]


def test_all_reduce_is_numpy_over_shapes_and_dtypes(strategy: replicax.Strategy) -> None:
    rng = np.random.default_rng(0)
    n = strategy.num_replicas_in_sync
    trees = [[rng.integers(0, 4, shape).astype(dtype) for shape in SHAPES for dtype in DTYPES] for _ in range(n)]
    value = strategy.distribute_values_from_function(lambda ctx: trees[ctx.replica_id_in_sync_group])
    result = strategy.run(lambda v: (context().all_reduce("sum", v), context().all_reduce("mean", v)), args=(value,))
    for total, mean, *parts in zip(*result, *trees, strict=True):
        wide = np.sum(np.stack(parts).astype(np.complex128), 0)
        np.testing.assert_allclose(np.asarray(total).astype(np.complex128), wide, rtol=1e-2)
        np.testing.assert_allclose(np.asarray(mean).astype(np.complex128), wide / n, rtol=1e-2)
        assert total.shape == mean.shape == parts[0].shape
        assert jnp.issubdtype(mean.dtype, jnp.inexact)


def test_many_arrays_are_one_all_reduce(pair: replicax.Strategy) -> None:
    values = [jnp.ones((4, i + 1)) for i in range(8)] + [jnp.ones((300, 100))]
    program = pair.extended.trace(lambda v: context().all_reduce("sum", v), args=(values,))
    (collective,) = program.collectives()
    assert collective.kind == "all-reduce"
    assert collective.arrays == 2  # the packed ones, and the one that is too large to pack
    assert collective.bytes == sum(v.nbytes for v in values)


def test_updates_by_packed_sums_are_equal_kernels(pair: replicax.Strategy) -> None:
    # XLA compiles equal kernels once. With offsets inside, each update of a variable would be a kernel of its own.
    def step(values):
        sums = context().all_reduce("sum", values)
        return [value - 0.1 * total for value, total in zip(values, sums, strict=True)]

    text = pair.extended.trace(step, args=([jnp.ones(64)] * 8,)).compiled_text()
    assert " dynamic-slice(" in text
    assert " slice(" not in text


def test_a_value_that_all_replicas_share_counts_n_times(strategy: replicax.Strategy) -> None:
    total = strategy.run(lambda x: context().all_reduce("sum", x), args=(jnp.ones(3),))
    np.testing.assert_array_equal(total, np.full(3, strategy.num_replicas_in_sync))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_of_a_reduction_is_the_same_reduction(strategy: replicax.Strategy, op: str) -> None:
    n = strategy.num_replicas_in_sync

    def step(w):
        # Replica i's loss is w_i times the reduction; the sum of all losses depends on x through each of them.
        return jax.grad(lambda x: w * context().all_reduce(op, x * x))(jnp.float32(3.0))

    got = strategy.run(step, args=(per_replica(strategy, lambda i: i + 1.0),))
    weights = np.arange(n) + 1.0
    combined = weights.sum() if op == "sum" else weights.mean()
    np.testing.assert_allclose(got, combined * 6.0, rtol=1e-6)  # one value: it is the same on every replica


def test_packing_keeps_what_each_array_is() -> None:
    pair = strategy_of(2)
    values = [jnp.arange(6, dtype=jnp.float32).reshape(2, 3), jnp.float32(7), jnp.arange(4, dtype=jnp.float32)]
    for limit in (0, 8, 1 << 20):
        before, collectives.PACK_LIMIT = collectives.PACK_LIMIT, limit
        try:
            got = strategy_of(2).run(lambda v: context().all_reduce("sum", v), args=(values,))
        finally:
            collectives.PACK_LIMIT = before
        for a, b in zip(got, values, strict=True):
            np.testing.assert_array_equal(a, 2 * b)
    assert pair.num_replicas_in_sync == 2


# --- all_gather -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_concatenates(strategy: replicax.Strategy, axis: int) -> None:
    parts = [np.arange(6.0, dtype=np.float32).reshape(2, 3) + 10 * i for i in range(strategy.num_replicas_in_sync)]
    value = per_replica(strategy, lambda i: parts[i])
    got = strategy.run(lambda x: context().all_gather({"x": x}, axis)["x"], args=(value,))
    np.testing.assert_array_equal(got, np.concatenate(parts, axis))
    np.testing.assert_array_equal(strategy.gather(value, axis), np.concatenate(parts, axis))


def test_the_gradient_of_all_gather_is_its_slice(pair: replicax.Strategy) -> None:
    def step(scale):
        mine = jnp.ones(2)
        return jax.grad(lambda x: jnp.sum(jnp.arange(4.0) * context().all_gather(x, 0)) * scale)(mine)

    grads = pair.run(step, args=(per_replica(pair, lambda i: i + 1.0),))
    np.testing.assert_allclose(pair.gather(grads, 0), np.arange(4.0) * 3.0)


@pytest.mark.parametrize(
    ("value", "axis", "message"),
    [
        (1.0, 0, "a scalar has no axis: add a dim first"),
        (jnp.ones(2), 1, "axis 1 is out of range"),
        (jnp.ones(2), -2, "out of range"),
    ],
)
def test_gathering_what_has_no_such_axis(strategy: replicax.Strategy, value, axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy.run(lambda v: context().all_gather(v, axis), args=(value,))
    with pytest.raises(ValueError, match=message):
        strategy.gather(per_replica(strategy, lambda _: value), axis)


def test_gather_of_a_shared_value(pair: replicax.Strategy) -> None:
    with pytest.raises(ValueError, match="all 2 replicas share"):
        pair.gather(jnp.ones(2), 0)
    one = replicax.OneDeviceStrategy("cpu:0")
    assert one.gather(jnp.ones(2), 0).shape == (2,)
    with pytest.raises(ValueError, match="axis 1 is out of range"):
        one.gather(jnp.ones(2), 1)


def test_gather_of_uneven_components(pair: replicax.Strategy) -> None:
    value = per_replica(pair, lambda i: np.full(3 - 2 * i, i))
    np.testing.assert_array_equal(pair.gather(value, 0), [0, 0, 0, 1])


# --- reduce ---------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (0, -1), [1]])
def test_reduce_is_numpy(strategy: replicax.Strategy, op: str, axis) -> None:
    n = strategy.num_replicas_in_sync
    parts = [np.random.default_rng(i).normal(size=(4, 3)).astype(np.float32) for i in range(n)]
    got = strategy.reduce(op, {"v": per_replica(strategy, lambda i: parts[i])}, axis)["v"]
    axes = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    stacked = np.stack(parts)
    reducer = np.sum if op == "sum" else np.mean
    expected = reducer(stacked, axis=(0, *(a + 1 if a >= 0 else a for a in axes)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_mean_with_an_axis_counts_elements(pair: replicax.Strategy) -> None:
    value = per_replica(pair, lambda i: [np.arange(4.0), np.array([10.0, 20.0])][i])
    assert float(pair.reduce("mean", value, axis=0)) == pytest.approx((0 + 1 + 2 + 3 + 10 + 20) / 6)
    with pytest.raises(ValueError, match=r"different shapes \[\(4,\), \(2,\)\]; pass axis=0"):
        pair.reduce("sum", value)


@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, np.int32)], ids=["of one dtype", "of two"])
def test_an_axis_that_leaves_sizes_that_differ_is_refused(pair: replicax.Strategy, dtypes) -> None:
    value = per_replica(pair, lambda i: np.ones((2, 1 + i, 3), dtypes[i]))
    for axis, needed in ((0, r"\(0, 1\)"), (-1, r"\(1, 2\)")):
        text = rf"different shapes \[\(2, 1, 3\), \(2, 2, 3\)\], and axis={axis} leaves .*; pass axis={needed} "
        with pytest.raises(ValueError, match=text):
            pair.reduce("mean", value, axis=axis)
    np.testing.assert_array_equal(pair.reduce("mean", value, axis=1), np.ones((2, 3)))


def test_components_that_are_empty_or_differ_in_each_dim(pair: replicax.Strategy) -> None:
    value = per_replica(pair, lambda i: np.zeros(0 if i else 2, np.float32) + 3)
    assert float(pair.reduce("mean", value, axis=0)) == 3.0
    uneven = per_replica(pair, lambda i: np.ones((2, 3) if i else (1, 4), np.float32))
    assert float(pair.reduce("sum", uneven, axis=(0, 1))) == 10.0
    nothing = per_replica(pair, lambda i: np.zeros(0, np.float32))
    assert float(pair.reduce("sum", nothing, axis=0)) == float(pair.reduce("mean", nothing, axis=0)) == 0.0
    unlike = per_replica(pair, lambda i: np.zeros(0, [np.float32, np.int32][i]))
    assert float(pair.reduce("mean", unlike, axis=0)) == 0.0


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_mean_is_finite_where_the_sum_is_not(executor) -> None:
    """As in jnp.mean: integers are added up as floats, and numbers of half precision along an axis as float32."""
    strategy = strategy_of(2)
    of_each = strategy.distribute_values_from_function
    pixels = of_each(lambda ctx: np.full(2, 200, np.uint8))
    words = of_each(lambda ctx: np.full((4, 16384), 50_000, np.int32))
    halves = of_each(lambda ctx: np.full(50_000, 0.5, np.float16))

    def step(x):
        return replicax.get_replica_context().all_reduce("mean", x)

    assert strategy.run(step, args=(pixels,), options=replicax.RunOptions(executor)).tolist() == [200, 200]
    assert strategy.reduce("mean", pixels).tolist() == [200, 200]
    assert float(strategy.reduce("mean", words, axis=(0, 1))) == 50_000
    mean = strategy.reduce("mean", halves, axis=0)
    assert (float(mean), mean.dtype) == (0.5, jnp.float16)


def test_the_mean_of_integers_is_a_float(strategy: replicax.Strategy) -> None:
    value = per_replica(strategy, lambda i: np.int32(i))
    n = strategy.num_replicas_in_sync
    assert float(strategy.reduce("mean", value)) == pytest.approx((n - 1) / 2)


@pytest.mark.parametrize("shared", [0, 1.5, np.ones(3, np.float32)])
def test_reduce_of_a_shared_value(pair: replicax.Strategy, shared) -> None:
    with pytest.raises(ValueError, match="all 2 replicas share"):
        pair.reduce("sum", shared)
    assert pair.reduce("mean", shared) is shared
    one = replicax.OneDeviceStrategy("cpu:0")
    assert one.reduce("sum", shared) is shared
    assert one.reduce("mean", shared) is shared


@pytest.mark.parametrize("count", [1, 2])
def test_reduce_of_what_is_no_number(count: int) -> None:
    """Such as the result of a coordinator's function that was not fetched."""
    strategy = strategy_of(count)
    for op in ("sum", "mean"):
        with pytest.raises(TypeError, match=r"strategy.reduce: the value is 'x', and not an array of numbers"):
            strategy.reduce(op, {"loss": "x"})


def test_reduce_along_an_axis_of_a_shared_value() -> None:
    one = replicax.OneDeviceStrategy("cpu:0")
    assert float(one.reduce("sum", jnp.arange(4.0), axis=0)) == 6.0
    assert float(strategy_of(2).reduce("mean", jnp.arange(4.0), axis=0)) == 1.5


@pytest.mark.parametrize("axis", [2, -3, (0, 2), (0, 0), (0, -2), True])
def test_reduce_along_an_axis_that_is_not_there(strategy: replicax.Strategy, axis) -> None:
    with pytest.raises(ValueError, match="axis"):
        strategy.reduce("sum", per_replica(strategy, lambda i: np.ones((2, 3))), axis)


def test_axes_of_numpy_types(pair) -> None:
    value = per_replica(pair, lambda i: np.ones((2, 3)))
    assert pair.reduce("sum", value, np.int64(0)).shape == (3,)
    assert pair.gather(value, np.int64(0)).shape == (4, 3)
    with pytest.raises(ValueError, match="axis must be an int"):
        pair.gather(value, None)
    with pytest.raises(ValueError, match="axis must be an int, a tuple of ints or None, got 1.5"):
        pair.reduce("sum", value, 1.5)


def test_gathering_nothing(strategy) -> None:
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: np.ones((0, 3)))
    assert strategy.gather(value, 0).shape == (0, 3)
    assert strategy.run(lambda v: context().all_gather(v, 1), args=(value,)).shape == (0, 3 * n)


def test_one_replica_counts_as_many_do() -> None:
    replica = context()
    assert replica.all_reduce("mean", 3).dtype == jnp.float32
    assert replica.all_reduce("sum", True).dtype == jnp.int32
    strategy = replicax.OneDeviceStrategy("cpu:0")
    assert strategy.reduce("mean", jnp.int32(3)).dtype == jnp.float32
    assert strategy.reduce("sum", jnp.array(True)).dtype == jnp.int32
    assert strategy.reduce("sum", np.array([2**40])).tolist() == [2**40]  # stays on the host
    assert strategy.reduce("mean", jnp.zeros((0, 2)), axis=0).tolist() == [0, 0]
    with strategy.scope():
        own = replicax.Variable(jnp.ones(2), name="own", synchronization="on_read", aggregation="sum")
    assert isinstance(strategy.gather(own, axis=0), jax.Array)


def test_reduce_of_a_tree_is_one_all_reduce(pair: replicax.Strategy) -> None:
    def step(tree):
        return context().merge_call(lambda s, t: s.reduce("sum", t), args=(tree,))

    tree = {"a": jnp.ones(3), "b": [jnp.ones(()), jnp.ones((2, 2))]}
    assert [c.kind for c in pair.extended.trace(step, args=(tree,)).collectives()] == ["all-reduce"]


def test_reducing_again_and_again_traces_once(pair: replicax.Strategy) -> None:
    for i in range(12):  # the tenth retrace would warn, and warnings are errors
        pair.reduce("sum", per_replica(pair, lambda r, i=i: np.float32(r + i)), axis=None)


# --- local_results --------------------------------------------------------------------------------------


def test_local_results(pair: replicax.Strategy) -> None:
    value = per_replica(pair, lambda i: np.int32(i))
    assert [int(v) for v in pair.local_results(value)] == [0, 1]
    assert pair.local_results(5) == (5,)
    first, second = pair.local_results({"v": value, "c": "x"})
    assert (int(first["v"]), first["c"], int(second["v"]), second["c"]) == (0, "x", 1, "x")
    with pair.scope():
        v = replicax.Variable(3.0)
    assert [float(x) for x in pair.local_results(v)] == [3.0, 3.0]


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_local_results_of_what_all_replicas_have_computed_alike(strategy, executor) -> None:
    """An entry for each replica, as of a mirrored variable; outside a step, and in a merge_fn."""
    n, options = strategy.num_replicas_in_sync, replicax.RunOptions(executor)
    alike = strategy.run(lambda x: x * 2, args=(3.0,), options=options)
    assert [float(v) for v in strategy.local_results(alike)] == [6.0] * n
    counted = []

    def merge(strategy, x):
        counted.append(len(strategy.local_results(strategy.reduce("mean", x))))

    x = per_replica(strategy, np.float32)
    strategy.run(lambda x: replicax.get_replica_context().merge_call(merge, args=(x,)), args=(x,), options=options)
    assert set(counted) == {n}


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_local_results_of_random_keys_in_a_merge_fn(pair: replicax.Strategy, executor: str) -> None:
    keys = per_replica(pair, lambda i: jax.random.split(jax.random.key(i), 2))
    second = pair.run(
        lambda keys: context().merge_call(lambda s, keys: s.local_results(keys)[1], args=(keys,)),
        args=(keys,),
        options=replicax.RunOptions(executor),
    )
    np.testing.assert_array_equal(*map(jax.random.key_data, (second, pair.local_results(keys)[1])))


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("key", [jax.random.split(jax.random.key(5)), jax.random.PRNGKey(5)], ids=["keys", "raw"])
def test_a_variable_is_a_key_as_its_value_is(pair: replicax.Strategy, key: jax.Array, executor: str) -> None:
    with pair.scope():
        v = replicax.Variable(key)
    step = lambda key: [jax.random.key_data(context().random_key(x)) for x in (v, key)]  # noqa: E731
    own = pair.run(step, (key,), options=replicax.RunOptions(executor))
    np.testing.assert_array_equal(*(list(map(np.asarray, pair.local_results(x))) for x in own))


def test_local_results_of_what_no_replica_has_computed(pair) -> None:
    for value in (jnp.ones(2), np.ones(2), 5, "text", None, pair.extended.reduce_to("mean", 1.0, "cpu:5")):
        [result] = pair.local_results(value)
        assert result is value
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[5])
    assert len(pair.local_results(elsewhere)) == 1
    assert len(jax.jit(pair.local_results)(jnp.ones(2))) == 1


def test_local_results_of_a_nest_has_an_entry_for_each_replica(pair) -> None:
    assert pair.local_results([1, 2]) == ([1, 2], [1, 2])
    assert pair.local_results({"a": 1}) == ({"a": 1}, {"a": 1})
    assert pair.local_results(5) == (5,)


def test_gather_of_what_does_not_fit(pair) -> None:
    x = pair.distribute_values_from_function(lambda ctx: jnp.ones((1, 2 + ctx.replica_id_in_sync_group)))
    with pytest.raises(ValueError, match=r"may differ in dim 0 only, but have .*\(1, 3\)\]: join them along dim 1"):
        pair.gather(x, axis=0)
    assert pair.gather(x, axis=-1).shape == (1, 5)
    kinds = per_replica(pair, lambda i: np.full((1, 2 + i), 1 + i, [np.float32, np.int32][i]))
    with jax.numpy_dtype_promotion("standard"):
        assert pair.gather(kinds, axis=1).tolist() == [[1, 1, 2, 2, 2]]
    ranks = per_replica(pair, lambda i: np.ones((2,) * (1 + i)))
    for combine in (lambda: pair.gather(ranks, axis=0), lambda: pair.reduce("sum", ranks)):
        with pytest.raises(ValueError, match=r"have (different )?shapes \[\(2,\), \(2, 2\)\]"):
            combine()


def test_an_axis_is_an_int(pair) -> None:
    def step(x):
        return replicax.get_replica_context().all_gather(x, axis="rows")

    with pytest.raises(ValueError, match="all_gather: axis must be an int, got 'rows'"):
        pair.run(step, args=(np.ones(2),))
