"""Sparse updates: reduced as they are, and applied to the rows that they are about."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax import IndexedSlices
from tests.conftest import strategy_of

EXECUTORS = ["compiled", "per_replica"]
SHAPE = (6, 2)
RNG = np.random.default_rng(2)
TABLE = RNG.normal(size=SHAPE).astype(np.float32)


def here() -> replicax.ReplicaContext:
    context = replicax.get_replica_context()
    assert context is not None
    return context


def rows_of(replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Three rows, some of them twice, others on each replica."""
    rng = np.random.default_rng(replica)
    return rng.normal(size=(3, 2)).astype(np.float32), rng.integers(0, 6, size=3)


def dense(replicas: int) -> np.ndarray:
    total = np.zeros(SHAPE, np.float32)
    for i in range(replicas):
        values, indices = rows_of(i)
        np.add.at(total, indices, values)
    return total


def slices(strategy: replicax.Strategy) -> Any:
    values = strategy.distribute_values_from_function(lambda ctx: rows_of(ctx.replica_id_in_sync_group)[0])
    indices = strategy.distribute_values_from_function(lambda ctx: rows_of(ctx.replica_id_in_sync_group)[1])
    return values, indices


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_sum_is_the_rows_of_all(strategy: replicax.Strategy, op: str, executor: str) -> None:
    n = strategy.num_replicas_in_sync

    def step(values: Any, indices: Any, x: Any) -> Any:
        return here().all_reduce(op, {"rows": IndexedSlices(values, indices, SHAPE), "x": x})

    result = strategy.run(step, (*slices(strategy), 2.0), options=replicax.RunOptions(executor))
    assert isinstance(result["rows"], IndexedSlices)
    assert result["rows"].values.shape == (3 * n, 2)
    np.testing.assert_allclose(result["rows"].to_dense(), dense(n) / (n if op == "mean" else 1), rtol=1e-5, atol=1e-6)
    assert float(result["x"]) == (2 * n if op == "sum" else 2)


def test_it_never_becomes_the_whole_array() -> None:
    strategy = strategy_of(4)

    def step(values: Any, indices: Any) -> Any:
        return here().all_reduce("sum", IndexedSlices(values, indices, (1_000_000, 2)))

    found = strategy.extended.trace(step, slices(strategy)).collectives()
    assert collections.Counter(c.kind for c in found) == {"all-gather": 2}
    assert sum(c.bytes for c in found) == 4 * 3 * (2 + 1) * 4


def test_across_replicas() -> None:
    strategy = strategy_of(2)
    mine = strategy.run(lambda v, i: IndexedSlices(v, i, SHAPE), slices(strategy))
    assert isinstance(mine.values, replicax.PerReplica)
    for total in (
        strategy.reduce("sum", mine),
        strategy.extended.reduce_to("sum", mine, None),
        strategy.run(lambda v, i: here().merge_call(merge, args=(IndexedSlices(v, i, SHAPE),)), slices(strategy)),
    ):
        np.testing.assert_allclose(total.to_dense(), dense(2), rtol=1e-6)
    np.testing.assert_allclose(strategy.reduce("mean", mine).to_dense(), dense(2) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="IndexedSlices are reduced across replicas only; pass axis=None"):
        strategy.reduce("sum", mine, axis=0)
    with pytest.raises(ValueError, match=r"(?s)strategy.reduce\('sum', …\) .* which all 2 replicas share"):
        strategy.reduce("sum", IndexedSlices(*map(jnp.asarray, rows_of(0)), SHAPE))


@pytest.mark.parametrize("shared", ["values", "indices"])
def test_what_all_replicas_share_of_it_is_there_once_for_each(shared: str) -> None:
    strategy = strategy_of(2)
    values, indices = slices(strategy)
    expected = np.zeros(SHAPE, np.float32)
    for replica in range(2):
        own = dict(zip(("values", "indices"), rows_of(replica), strict=True))
        own[shared] = dict(zip(("values", "indices"), rows_of(0), strict=True))[shared]
        np.add.at(expected, own["indices"], own["values"])
    if shared == "values":
        values = jnp.asarray(rows_of(0)[0])
    else:
        indices = jnp.asarray(rows_of(0)[1])
    total = strategy.reduce("sum", IndexedSlices(values, indices, SHAPE))
    np.testing.assert_allclose(total.to_dense(), expected, rtol=1e-6)


def merge(strategy: replicax.Strategy, rows: Any) -> Any:
    return strategy.extended.batch_reduce_to("sum", [(rows, None)])[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("replicas", "size", "dtype"), [(1, 6, "int32"), (2, 6, "int32"), (2, 256, "uint8")])
def test_a_merge_fn_leaves_out_the_rows_of_padding(replicas: int, size: int, dtype: str, executor: str) -> None:
    strategy = strategy_of(replicas)
    with strategy.scope():
        table = replicax.Variable(jnp.zeros((size, 2)), name="table")

    def step(ids: Any) -> Any:
        rows = here().merge_call(merge, args=(IndexedSlices(jnp.ones((len(ids), 2)), ids, (size, 2)),))
        table.scatter_update(rows)
        return rows.to_dense()

    batches = [np.array([5, 1, 2, 3], dtype), np.array([5, 1, 1], dtype)]
    _, batch = strategy.distribute_dataset(batches, replicax.InputOptions(partial_batch="pad"))
    total = strategy.run(step, args=(batch,), options=replicax.RunOptions(executor))
    assert total[:6, 0].tolist() == [0, 2, 0, 0, 0, 1]
    assert table.numpy()[:6, 0].tolist() == [0, 1, 0, 0, 0, 1]
    assert not total[6:].any()
    with pytest.raises(ValueError, match=r"strategy\.reduce along dim 0 of a value .* computed from a padded batch"):
        strategy.run(lambda ids: step(jnp.sort(ids)), args=(batch,))


def test_replicas_may_hold_different_numbers_of_rows() -> None:
    strategy = strategy_of(2)

    def step() -> Any:
        k = 1 + here().replica_id_in_sync_group
        return here().all_reduce("sum", IndexedSlices(jnp.ones((k, 2)), jnp.zeros(k, jnp.int32), SHAPE))

    with replicax.debug():
        total = strategy.run(step)
    assert total.to_dense()[0].tolist() == [3, 3]


@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
def test_a_variable_takes_different_numbers_of_rows(aggregation: str) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        table = replicax.Variable(jnp.zeros(SHAPE), aggregation=aggregation)

    def step() -> None:
        k = 2 - here().replica_id_in_sync_group
        table.scatter_add(IndexedSlices(jnp.ones((k, 2)), jnp.arange(k), SHAPE))

    with replicax.debug():
        strategy.run(step)
    assert table.numpy()[:2, 0].tolist() == ([2, 1] if aggregation == "sum" else [1, 1])


# --- variables ------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", ["mirrored", "split"])
@pytest.mark.parametrize("method", ["scatter_add", "scatter_sub"])
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_rows_are_combined_by_the_aggregation(aggregation: str, method: str, kind: str, executor: str) -> None:
    strategy = strategy_of(2)
    make = replicax.variables.ShardedVariable if kind == "split" else replicax.Variable
    with strategy.scope():
        table = make(TABLE, name="table", aggregation=aggregation)
    strategy.run(
        lambda v, i: getattr(table, method)(IndexedSlices(v, i, SHAPE)),
        slices(strategy),
        options=replicax.RunOptions(executor),
    )
    change = {"sum": dense(2), "mean": dense(2) / 2, "only_first_replica": dense(1)}[aggregation]
    np.testing.assert_allclose(table.value, TABLE + (change if method == "scatter_add" else -change), rtol=1e-5)


def test_on_read_each_replica_changes_its_own_copy() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        table = replicax.Variable(TABLE, synchronization="on_read", aggregation="sum")
    strategy.run(lambda v, i: table.scatter_update(IndexedSlices(v, i, SHAPE)), slices(strategy))
    for replica, copy in enumerate(strategy.local_results(table)):
        values, indices = rows_of(replica)
        assert copy[indices[-1]].tolist() == values[-1].tolist()
    with pytest.raises(ValueError, match="scatter_add in cross-replica context would change every copy; call it"):
        table.scatter_add(IndexedSlices(jnp.ones((1, 2)), jnp.zeros(1, jnp.int32), SHAPE))


def test_from_across_and_what_all_agree_on(pair: replicax.Strategy) -> None:
    with pair.scope():
        table = replicax.Variable(TABLE, name="table")
    rows = IndexedSlices(jnp.ones((1, 2)), jnp.array([4]), SHAPE)
    table.scatter_update(rows)
    pair.run(lambda: table.scatter_add(rows))
    assert table.numpy()[4].tolist() == [2, 2]
    np.testing.assert_array_equal(table.numpy()[:4], TABLE[:4])
    with pytest.raises(replicax.errors.LocalityError, match="variable 'table' .* was assigned a value, but it differs"):
        pair.run(lambda v, i: table.scatter_add(IndexedSlices(v, i, SHAPE)), slices(pair))


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_the_gradient_of_a_lookup(pair: replicax.Strategy, tx: Any, executor: str) -> None:
    strategy = pair

    def train(sparse: bool) -> np.ndarray:
        with strategy.scope():
            table = replicax.Variable(TABLE, name="table")
            optimizer = replicax.Optimizer(tx)

        def step(values: Any, indices: Any) -> None:
            rows = IndexedSlices(values, indices, list(SHAPE))
            optimizer.apply_gradients([(rows if sparse else rows.to_dense(), table)])

        for _ in range(2):
            strategy.run(step, slices(strategy), options=replicax.RunOptions(executor))
        return table.numpy()

    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic
        np.testing.assert_allclose(train(sparse=True), train(sparse=False), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_has_been_reduced_is_not_reduced_again(pair: replicax.Strategy) -> None:
    with pair.scope():
        table = replicax.Variable(TABLE, name="table")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(values: Any, indices: Any, aggregate: bool) -> None:
        rows = here().all_reduce("sum", IndexedSlices(values, indices, SHAPE))
        optimizer.apply_gradients([(rows, table)], aggregate=aggregate)

    with pytest.raises(replicax.errors.LocalityError, match="gradient of variable 'table' .* has been all-reduced"):
        pair.run(step, (*slices(pair), True))
    pair.run(step, (*slices(pair), False))
    np.testing.assert_allclose(table.value, TABLE - 0.1 * dense(2), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t: IndexedSlices(jnp.ones((2, 3)), jnp.zeros(2, int), SHAPE), ValueError, r"\[k, 2\] .* got \[2, 3\]"),
        (lambda t: IndexedSlices(jnp.ones((2, 2)), jnp.zeros(3, int), SHAPE), ValueError, r"got \[2, 2\] and \[3\]"),
        (lambda t: IndexedSlices(jnp.ones((2, 2)), jnp.zeros(2), SHAPE), ValueError, "indices must be integers"),
        (lambda t: t.scatter_add(jnp.ones(SHAPE)), TypeError, "scatter_add takes IndexedSlices, got"),
        (lambda t: t.scatter_add(rows((5, 2))), ValueError, r"scatter_add got rows of an array of shape \(5, 2\)"),
        (lambda t: t.scatter_update(rows(SHAPE)), ValueError, "scatter_update can't combine rows by 'sum'"),
        (lambda t: t.scatter_add(rows(SHAPE, jnp.complex64)), TypeError, "complex64, which does not cast"),
    ],
)
def test_wrong_rows(make: Any, error: type[Exception], message: str) -> None:
    with strategy_of(2).scope():
        table = replicax.Variable(TABLE, name="table", aggregation="sum")
    with pytest.raises(error, match=message):
        make(table)


def rows(shape: tuple[int, ...], dtype: Any = jnp.float32) -> IndexedSlices:
    return IndexedSlices(jnp.ones((1, 2), dtype), jnp.zeros(1, jnp.int32), shape)


def test_rows_of_each_replica_from_across(pair: replicax.Strategy) -> None:
    with pair.scope():
        table = replicax.Variable(TABLE, name="table")
    values, indices = slices(pair)
    with pytest.raises(
        replicax.errors.LocalityError, match="'table' .*: scatter_add got .*, rows of each replica. Combine them"
    ):
        table.scatter_add(IndexedSlices(values, indices, SHAPE))
    table.scatter_add(pair.reduce("sum", IndexedSlices(values, indices, SHAPE)))
    np.testing.assert_allclose(table.value, TABLE + dense(2), rtol=1e-5)


def test_transformations_batch_and_stack_slices() -> None:
    made = jax.vmap(lambda v: IndexedSlices(v, jnp.array([0, 1]), SHAPE))(jnp.ones((4, 2, 2)))
    assert made.values.shape == (4, 2, 2)
    assert jax.tree.map(jnp.sum, made).values == 16
    dense_of_each = jax.vmap(lambda s: s.to_dense())(made)
    assert dense_of_each.shape == (4, *SHAPE)
    _, stacked = jax.lax.scan(lambda c, v: (c, IndexedSlices(v, jnp.array([0, 1]), SHAPE)), 0, jnp.ones((3, 2, 2)))
    assert stacked.indices.shape == (3, 2)
    assert IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [-6, 5], SHAPE).to_dense()[::5].tolist() == [[1, 2], [3, 4]]


def test_rows_of_booleans_are_counted(pair: replicax.Strategy) -> None:
    rows = IndexedSlices(jnp.ones((1, 2), bool), jnp.array([1]), SHAPE)
    total = pair.run(lambda: here().all_reduce("sum", rows))
    assert total.to_dense()[1].tolist() == [2, 2]


def test_a_row_out_of_range_is_refused_where_it_is_known(strategy) -> None:
    with strategy.scope():
        table = replicax.Variable(np.ones((5, 2), np.float32), name="table")
    ran = []
    for index in (99, 5, -6):
        problem = rf"the index {index} at \[1\] is out of range for an array of shape \(5, 2\), .* the rows 0 to 4"
        for indices in ([0, index], np.array([0, index])):
            with pytest.raises(ValueError, match="IndexedSlices: " + problem):
                replicax.IndexedSlices(jnp.ones((2, 2)), indices, (5, 2))
        slices = replicax.IndexedSlices(jnp.ones((2, 2)), jnp.array([0, index]), (5, 2))
        for method in (table.scatter_add, table.scatter_sub, table.scatter_update):
            with (
                strategy.scope(),
                pytest.raises(ValueError, match=rf"variable 'table' .*: {method.__name__}: " + problem),
            ):
                method(slices)

        def step(index=index):
            ran.append(table.scatter_add(replicax.IndexedSlices(jnp.ones((1, 2)), np.array([index]), table.shape)))

        with pytest.raises(ValueError, match=rf"IndexedSlices: the index {index} at \[0\] is out of range"):
            strategy.run(step)
    assert not ran
    np.testing.assert_array_equal(table.numpy(), np.ones((5, 2)))


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_row_out_of_range_that_a_step_computes_is_left_out(strategy, executor) -> None:
    with strategy.scope():
        table = replicax.Variable(np.zeros((5, 1), np.float32), name="table", aggregation="only_first_replica")

    def step(rows):
        table.scatter_add(replicax.IndexedSlices(jnp.ones((3, 1)), rows * 3, table.shape))

    strategy.run(step, args=(jnp.array([1, 33, -1]),), options=replicax.RunOptions(executor=executor))
    assert table.numpy()[:, 0].tolist() == [0, 0, 1, 1, 0]
