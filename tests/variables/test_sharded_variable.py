"""Variables that are split over the replicas, and partitioners."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.layout import Mirrored, Split
from replicax.variables.partitioners import over_all
from tests.conftest import shared_strategy, strategy_of

PER_REPLICA = replicax.RunOptions(executor="per_replica")
INITIAL = np.arange(21, dtype=np.float32).reshape(7, 3)


def make(strategy: replicax.Strategy, value: Any = INITIAL, **options: Any) -> replicax.variables.ShardedVariable:
    with strategy.scope():
        return replicax.variables.ShardedVariable(value, name="v", **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("initial", [INITIAL, lambda: jnp.asarray(INITIAL)], ids=["value", "callable"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_each_replica_holds_a_piece_and_reads_the_whole(replicas: int, initial: Any) -> None:
    strategy = strategy_of(replicas)
    v = make(strategy, initial, partitioner=replicax.variables.FixedShardsPartitioner(replicas))
    assert v.shape == (7, 3)
    np.testing.assert_array_equal(v.value, INITIAL)
    np.testing.assert_array_equal(strategy.run(lambda: v.value), INITIAL)
    np.testing.assert_array_equal(strategy.run(lambda: v.value, options=PER_REPLICA), INITIAL)
    pieces = strategy.local_results(v)
    np.testing.assert_array_equal(np.concatenate(pieces), INITIAL)
    if replicas > 1:
        piece = -(-7 // replicas)
        assert [p.shape[0] for p in pieces] == [max(0, min(piece, 7 - i * piece)) for i in range(replicas)]
        for shard in v.slot.array.addressable_shards:
            assert shard.data.shape == (piece, 3)


def test_the_largest_dim_that_divides_evenly_is_split(pair: replicax.Strategy) -> None:
    assert make(pair, jnp.zeros((9, 4))).layout == Split(dim=1, size=4, piece=2, replicas=2)
    assert make(pair, jnp.zeros((9, 3))).layout == Split(dim=0, size=9, piece=5, replicas=2)
    assert make(shared_strategy(4, 2), jnp.zeros((9, 6))).layout == Split(dim=1, size=6, piece=3, replicas=2)
    assert make(pair, 1.0).layout == Mirrored()  # a scalar has nothing to split


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_it_is_assigned_like_any_other(method: str, aggregation: str, executor: str) -> None:
    strategy = strategy_of(3)
    v = make(strategy, aggregation=aggregation)
    with strategy.scope():
        plain = replicax.Variable(INITIAL, aggregation=aggregation)
    getattr(v, method)(INITIAL * 2)
    getattr(plain, method)(INITIAL * 2)
    np.testing.assert_array_equal(v.value, plain.value)
    x = strategy.distribute_values_from_function(lambda ctx: INITIAL + np.float32(ctx.replica_id_in_sync_group))
    if aggregation == "none":
        with pytest.raises(replicax.errors.LocalityError, match="variable 'v' .* was assigned a value, but it differs"):
            strategy.run(lambda x: getattr(v, method)(x), args=(x,), options=replicax.RunOptions(executor))
        np.testing.assert_array_equal(v.value, plain.value)
        x = INITIAL
    for variable in (v, plain):
        strategy.run(
            lambda x, variable=variable: getattr(variable, method)(x), args=(x,), options=replicax.RunOptions(executor)
        )
    np.testing.assert_allclose(v.value, plain.value, rtol=1e-6)


def test_slots_are_split_as_their_variable(pair: replicax.Strategy) -> None:
    v, w = make(pair), make(pair, jnp.zeros((4, 8)), partitioner=replicax.variables.FixedShardsPartitioner(2, dim=1))
    with pair.scope():
        plain = replicax.Variable(jnp.zeros((7, 3)))
        optimizer = replicax.Optimizer(optax.adam(0.1))
    optimizer.build([v, w, plain])
    count, *slots = optimizer.variables
    assert count.layout == Mirrored()
    assert [s.layout for s in slots] == [v.layout, w.layout, plain.layout] * 2
    assert all(isinstance(s.layout, Split) for s in (slots[0], slots[1]))


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_one_without_elements_is_assigned_and_read(pair: replicax.Strategy, shape: tuple[int, int], options) -> None:
    v = make(pair, jnp.zeros(shape))

    def step() -> None:
        v.assign(v.value + 1)

    for _ in range(2):
        pair.run(step, options=options)
        assert v.numpy().shape == shape
    v.assign(jnp.ones(shape))
    assert v.numpy().shape == shape
    assert [len(piece) for piece in pair.local_results(v)] == [shape[0] // 2] * 2


def test_a_value_read_before_stays_valid(pair: replicax.Strategy) -> None:
    v = make(pair)
    before = v.value
    pair.run(lambda: v.assign_add(jnp.ones((7, 3))))
    np.testing.assert_array_equal(before, INITIAL)
    np.testing.assert_array_equal(v.value, INITIAL + 1)


def test_created_inside_a_step(pair: replicax.Strategy) -> None:
    def step() -> Any:
        return replicax.variables.ShardedVariable(lambda: jnp.zeros(5), name="inside").assign_add(jnp.ones(5)).value

    assert [float(pair.run(step)[4]) for _ in range(3)] == [1, 2, 3]


def test_it_cannot_be_on_read(pair: replicax.Strategy) -> None:
    with pytest.raises(ValueError, match="variable 'v': an on-read variable can't be split, because each replica has"):
        make(pair, synchronization="on_read", trainable=False)


def test_random_keys_are_not_split() -> None:
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"], over_all(2, min_bytes=0))
    with strategy.scope():
        keys = replicax.Variable(jax.random.split(jax.random.key(0), 4))
    assert keys.layout == Mirrored()


# --- partitioners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitioner", "shape", "pieces"),
    [
        (replicax.variables.FixedShardsPartitioner(3), (10, 2), [3, 1]),
        (replicax.variables.FixedShardsPartitioner(3, dim=-1), (10, 2), [1, 2]),
        (replicax.variables.FixedShardsPartitioner(3, dim=-2), (10, 2), [3, 1]),
        (replicax.variables.FixedShardsPartitioner(3), (), []),
        (replicax.variables.MinSizePartitioner(), (1 << 20,), [1]),
        (replicax.variables.MinSizePartitioner(max_shards=4), (1 << 20,), [4]),
        (replicax.variables.MinSizePartitioner(1 << 21, 4), (1 << 20,), [2]),
        (replicax.variables.MinSizePartitioner(1 << 30, 4), (1 << 20,), [1]),
        (replicax.variables.MinSizePartitioner(1, 100), (5, 5), [5, 1]),
        (replicax.variables.MinSizePartitioner(1, 100, dim=1), (5, 4), [1, 4]),
        (replicax.variables.MaxSizePartitioner(1 << 20), (1 << 20,), [4]),
        (replicax.variables.MaxSizePartitioner(1 << 20, max_shards=3), (1 << 20,), [3]),
        (replicax.variables.MaxSizePartitioner(100), (10, 10), [5, 1]),
        (replicax.variables.MaxSizePartitioner(1), (4, 10), [4, 1]),
        (replicax.variables.MaxSizePartitioner(80, dim=1), (10, 4), [1, 2]),
        (replicax.variables.MaxSizePartitioner(1), (), []),
        (replicax.variables.MaxSizePartitioner(1), (0, 3), [1, 1]),
        (over_all(4), (255,), [1]),
        (over_all(4), (256,), [4]),
        (over_all(4), (90, 8), [1, 4]),
        (over_all(4), (90, 6), [4, 1]),
        (over_all(4), (16, 16), [4, 1]),
    ],
)
def test_how_many_pieces(partitioner: Any, shape: tuple[int, ...], pieces: list[int]) -> None:
    assert partitioner(shape, jnp.float32) == pieces


@pytest.mark.parametrize(
    ("shards", "sizes"), [(2, [4, 3, 0, 0]), (3, [3, 3, 1, 0]), (4, [2, 2, 2, 1]), (9, [2, 2, 2, 1]), (1, [7] * 4)]
)
def test_pieces_on_four_replicas(shards: int, sizes: list[int]) -> None:
    strategy = strategy_of(4)
    v = make(strategy, partitioner=replicax.variables.FixedShardsPartitioner(shards))
    assert [p.shape[0] for p in strategy.local_results(v)] == sizes
    strategy.run(lambda: v.assign_add(jnp.ones((7, 3))))
    np.testing.assert_array_equal(v.value, INITIAL + 1)


def test_a_strategy_with_a_partitioner_of_its_own() -> None:
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"], replicax.variables.MinSizePartitioner(64, max_shards=2))
    with strategy.scope():
        small, large = replicax.Variable(jnp.zeros(31)), replicax.Variable(jnp.zeros(32))
    assert small.layout == Mirrored()
    assert large.layout == Split(dim=0, size=32, piece=16, replicas=2)


def test_what_is_no_partitioner(pair: replicax.Strategy) -> None:
    for use in (lambda: make(pair, partitioner="x"), lambda: replicax.ShardedStrategy(["cpu:0"], 3)):
        with pytest.raises(TypeError, match="a partitioner is a function from shape and dtype to .*, got ('x'|3)"):
            use()


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: replicax.variables.FixedShardsPartitioner(0), "num_shards must be an int of at least 1, got 0"),
        (lambda: replicax.variables.MinSizePartitioner(True), "min_shard_bytes must be an int of at least 1, got True"),
        (
            lambda: replicax.variables.MaxSizePartitioner(1, 0),
            "MaxSizePartitioner: max_shards must be an int of at least 1, got 0",
        ),
        (
            lambda: replicax.variables.FixedShardsPartitioner(2, dim=2)((3, 3), "float32"),
            r"dim 2 is out of range .* \(3, 3\)",
        ),
        (
            lambda: replicax.variables.FixedShardsPartitioner(2, dim=-3)((3, 3), "float32"),
            r"dim -3 is out of range .* \(3, 3\)",
        ),
        (
            lambda: replicax.variables.MaxSizePartitioner(1, dim="rows"),
            "MaxSizePartitioner: dim must be an int, got 'rows'",
        ),
        (lambda: make(strategy_of(1), partitioner=lambda *_: [2]), r"each of the 2 dims of \(7, 3\), .* got \[2\]"),
        (lambda: make(strategy_of(2), partitioner=lambda *_: 2), "must return a positive number for each .* got 2"),
        (lambda: make(strategy_of(2), partitioner=lambda *_: ["2", 1]), r"a positive number for .* got \['2', 1\]"),
        (lambda: make(strategy_of(2), partitioner=lambda *_: [2, 2]), r"variable 'v': the partitioner .* got \[2, 2\]"),
        (lambda: make(strategy_of(2), partitioner=lambda *_: [2]), r"each of the 2 dims of \(7, 3\), .* got \[2\]"),
        (lambda: make(strategy_of(2), partitioner=lambda *_: [0, 1]), r"must return a positive number .* got \[0, 1\]"),
    ],
)
def test_bad_partitioners(make_it: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()
