"""Variables that are split over the logical devices of each replica, and these parts over the replicas."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.hlo.collective_instructions import ProgramDevices, collectives_of
from replicax.hlo.instructions import parse
from replicax.variables.layout import Mirrored, Split
from replicax.variables.partitioners import over_all
from tests import processes
from tests.conftest import logical_strategy, strategy_of
from tests.programs.programs import third_party
from tests.strategies import workers_tpu

VALUE = np.arange(96, dtype=np.float32).reshape(8, 12)


def in_groups(size: int, replicas: int, logical: int = 2) -> replicax.Strategy:
    return logical_strategy(replicas, logical, replicax.variables.GroupPartitioner(size, over_all(size, min_bytes=0)))


def parts_of(variable: replicax.Variable) -> set[tuple[int, ...]]:
    """The shapes of what the devices hold."""
    return {s.data.shape for s in variable.slot.array.addressable_shards}


@pytest.mark.covering(1)
@pytest.mark.parametrize("initial", [VALUE, lambda: jnp.asarray(VALUE)], ids=["value", "callable"])
@pytest.mark.parametrize(
    ("dim", "parts", "held"), [(0, [1, 2], (4, 6)), (0, [2, 1], (2, 12)), (1, [1, 2], (8, 3)), (1, [2, 1], (4, 6))]
)
def test_each_device_has_a_part_of_a_piece(dim: int, parts: list[int], held: tuple[int, ...], initial: Any) -> None:
    strategy = in_groups(2, 4)
    pairs = replicax.variables.GroupPartitioner(2, replicax.variables.FixedShardsPartitioner(2, dim=dim))
    with strategy.scope():
        v = replicax.Variable(initial, name="v", partition_dimensions=parts, partitioner=pairs)
    assert parts_of(v) == {held}
    where = (
        f"split along dim {dim} over the 2 replicas of each of 2 groups, split {parts} over 2 logical devices of each"
    )
    assert v.layout.describe(strategy.extended.mesh) == where
    np.testing.assert_array_equal(v.numpy(), VALUE)
    for executor in ("compiled", "per_replica"):
        options = replicax.RunOptions(executor)
        np.testing.assert_array_equal(strategy.run(lambda: v.value + 0.0, options=options), VALUE)
        strategy.run(lambda: v.assign(v.value * 2.0), options=options)
        np.testing.assert_array_equal(v.numpy(), VALUE * 2)
        v.assign(VALUE)
    pieces = strategy.local_results(v)
    assert len(pieces) == 4
    for first in (0, 2):  # of each group
        rows = (
            np.split(np.asarray(pieces[first]), parts[dim], dim),
            np.split(np.asarray(pieces[first + 1]), parts[dim], dim),
        )
        np.testing.assert_array_equal(np.concatenate([x for pair in zip(*rows, strict=True) for x in pair], dim), VALUE)
    assert parts_of(v) == {held}


def train(strategy: replicax.Strategy, splits: bool, executor: str) -> tuple[list[Any], Any]:
    def parts(*counts: int) -> Any:
        return list(counts) if splits else None

    rng = np.random.default_rng(3)
    with strategy.scope():
        variables = [
            replicax.Variable(rng.normal(size=(8, 16)).astype(np.float32), name="a", partition_dimensions=parts(1, 2)),
            replicax.Variable(np.zeros(16, np.float32), name="b", partition_dimensions=parts(2)),
            replicax.Variable(rng.normal(size=(3, 16, 16)).astype(np.float32), partition_dimensions=parts(1, 2, 1)),
            replicax.Variable(np.zeros(16, np.float32), name="d"),
        ]
        optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)))

    def step(x: Any) -> Any:
        a, b, stack, d = variables

        def loss() -> Any:
            h = jnp.tanh(x @ a + b.value[None])
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stack.value)
            return replicax.compute_average_loss(jnp.square(h + d.value[None]).sum(-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return share, jnp.max(a.value), jnp.sum(stack.value, axis=1)[0]

    batches = list(strategy.distribute_dataset([rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]))
    results = [strategy.run(step, args=(x,), options=replicax.RunOptions(executor)) for x in batches]
    found = [*([strategy.reduce("sum", r[0]), *r[1:]] for r in results), *(v.numpy() for v in variables)]
    return [*found, *(v.numpy() for v in optimizer.variables)], strategy.extended.trace(step, args=(batches[0],))


@functools.cache
def on_one_device() -> list[Any]:
    return train(strategy_of(1), False, "compiled")[0]


@pytest.mark.parametrize(
    ("size", "replicas", "executor"),
    [
        (2, 4, "compiled"),
        pytest.param(2, 2, "per_replica", marks=pytest.mark.soak),
        pytest.param(4, 4, "compiled", marks=pytest.mark.soak),
    ],
)
@third_party
def test_training_is_that_of_one_device(size: int, replicas: int, executor: str) -> None:
    found, program = train(in_groups(size, replicas), True, executor)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(on_one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    # Of a, b, a layer of the stack and d each logical device gathers its part, and no more; and scatters as little.
    parts = {4 * 8 * 8, 4 * 8, 4 * 16 * 8, 4 * 16}
    of_results = {4 * size, 4 * 3 * 16}  # the largest element of each piece, and what is left of the stack
    uses = collectives_of(parse(program.compiled_text()), ProgramDevices({"replica": replicas, "logical0": 2}))
    between = [use for use in uses if use.axes == ("replica",) and use.participants == size]
    assert {use.bytes for use in between if use.kind == "all-gather"} == parts | of_results
    assert {use.bytes for use in between if use.kind == "reduce-scatter"} == {bytes // size for bytes in parts}
    assert not [use for use in uses if use.kind in ("collective-permute", "all-to-all")]


def test_slots_and_rows() -> None:
    strategy = in_groups(2, 2)
    with strategy.scope():
        v = replicax.Variable(
            VALUE, name="v", partition_dimensions=[2, 1], partitioner=replicax.variables.FixedShardsPartitioner(2)
        )
        optimizer = replicax.Optimizer(optax.adam(0.1))
        with strategy.extended.colocate_vars_with(v):
            row, flat = replicax.Variable(jnp.zeros((8, 3))), replicax.Variable(jnp.zeros(8))
    assert v.layout == Split(0, 8, 4, replicas=2, logical_parts=2, axes=(("logical0",), ()))
    optimizer.build([v])
    assert [s.layout for s in optimizer.variables[1:]] == [v.layout] * 2
    assert (row.layout, flat.layout) == (v.layout, Mirrored())
    rows, new = jnp.array([7, 0, 3, 99, -1], jnp.int32), jnp.ones((5, 12))
    strategy.run(lambda rows: v.assign(v.value.at[rows].add(new)), args=(rows,))
    np.testing.assert_array_equal(v.numpy(), jnp.asarray(VALUE).at[rows].add(new))


def test_the_strategys_partitioner_splits_parts_where_they_divide_evenly() -> None:
    strategy = in_groups(2, 2)
    with strategy.scope():
        both, other, odd = (
            replicax.Variable(np.zeros(shape, np.float32), partition_dimensions=parts)
            for shape, parts in [((8, 2), [2, 1]), ((3, 8), [1, 2]), ((6, 1), [2, 1])]
        )
    assert parts_of(both) == {(2, 2)}
    assert parts_of(other) == {(3, 2)}
    assert parts_of(odd) == {(3, 1)}  # parts of 3 rows are not split over 2 replicas
    with (
        strategy.scope(),
        pytest.raises(
            ValueError,
            match=r"'v' .*: partition_dimensions \[2, 1\] makes parts of size 3 along dim 0, .* into 2 pieces",
        ),
    ):
        replicax.Variable(
            np.zeros((6, 1)),
            name="v",
            partition_dimensions=[2, 1],
            partitioner=replicax.variables.FixedShardsPartitioner(2),
        )


def test_checkpoints_of_it_are_restored_from_and_onto_other_layouts(tmp_path) -> None:
    strategies = {"both": in_groups(2, 4), "mirrored": strategy_of(3)}
    value = np.arange(6144, dtype=np.float32).reshape(64, 96)
    found = {}
    for name, strategy in strategies.items():
        parts = {"a": [2, 1], "b": [1, 2]} if name == "both" else {"a": None, "b": None}
        with strategy.scope():
            found[name] = {
                k: replicax.Variable((i + 1) * value + len(found), partition_dimensions=p)
                for i, (k, p) in enumerate(parts.items())
            }
        replicax.Checkpoint(**found[name]).save(tmp_path / name)
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("arrays-*/**/*") if f.is_file()) for n in strategies]
    assert sizes[0] < 1.1 * sizes[1]
    for onto, source, more in (("mirrored", "both", 0), ("both", "mirrored", 1), ("both", "both", 0)):
        replicax.Checkpoint(**found[onto]).restore(tmp_path / source)
        for i, v in enumerate(found[onto].values()):
            np.testing.assert_array_equal(v.numpy(), (i + 1) * value + more)
    assert parts_of(found["both"]["a"]) == {(32, 48)}


@pytest.mark.soak
@third_party
def test_the_pieces_of_parts_may_be_on_several_workers() -> None:
    expected = workers_tpu.train_in_parts(strategy_of(1), splits=False)
    for found, shown, sizes in processes.run(workers_tpu.parts_and_pieces, devices=2):
        assert "split over" not in shown
        assert sizes == [(2, 4), (2,), (4, 4)]
        for mine, theirs in zip(found, [*expected, *expected], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
