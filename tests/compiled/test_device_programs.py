"""Devices with several replicas keep pieces of a model: what they keep, gather and sum in each replica's turn."""

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
from replicax.variables.partitioners import over_all
from tests.compiled.test_local_replicas import context, goes_on_elsewhere
from tests.conftest import shared_strategy, strategy_of

LAYERS, WIDTH = 3, 160
RNG = np.random.default_rng(9)
INITIAL = {
    "layers": (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
    "last": (RNG.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
    "biases": np.zeros((LAYERS, WIDTH), np.float32),
}
LAYER, SMALL = 4 * WIDTH * WIDTH, 4 * LAYERS * WIDTH
BATCHES = RNG.normal(size=(2, 16, WIDTH)).astype(np.float32)


def placed(
    devices: int, per_device: int, partitioner: Any = None, logical: int = 1, at_once: int = 1
) -> replicax.Strategy:
    """Devices, or groups of logical devices, with so many replicas on each, and so many of these at the same time."""
    grid = np.array(jax.devices()[: devices * logical], dtype=object).reshape(devices, logical)
    replicas = devices * per_device
    return replicax.Strategy(
        replicax.StrategyExtended(grid, partitioner, num_replicas=replicas, replicas_at_once=at_once)
    )


class Training:
    """Of layers in a loop, each with a bias, and a last one that stands alone."""

    def __init__(self, strategy: replicax.Strategy) -> None:
        logical = strategy.extended.num_logical_devices
        parts = {"layers": [1, 1, logical], "last": [logical, 1]} if logical > 1 else {}
        self.strategy = strategy
        with strategy.scope():
            self.model = {
                name: replicax.Variable(value, name=name, partition_dimensions=parts.get(name))
                for name, value in INITIAL.items()
            }
            transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
            self.optimizer = replicax.Optimizer(transformation)
            self.seen = replicax.Variable(0, synchronization="on_read", aggregation="sum")

    def step(self, x: Any) -> Any:
        self.seen.assign_add(x.shape[0])
        layers, last, biases = self.model.values()

        def loss() -> Any:
            y, _ = jax.lax.scan(lambda y, p: (jnp.tanh(y @ p[0] + p[1][None]), None), x, (layers.value, biases.value))
            return replicax.compute_average_loss(jnp.square(y @ last.value - 1.0).mean(-1))

        value, gradients = replicax.value_and_grad(loss, self.model)()
        self.optimizer.apply_gradients(gradients, self.model)
        return value

    def go(self) -> list[Any]:
        batches = self.strategy.distribute_dataset(list(BATCHES))
        losses = [self.strategy.reduce("sum", self.strategy.run(self.step, args=(x,))) for x in batches]
        return [*losses, *(v.numpy() for v in [*self.model.values(), *self.optimizer.variables, self.seen])]

    def program(self) -> replicax.Executable:
        [x] = self.strategy.distribute_dataset([BATCHES[0]])
        return self.strategy.extended.trace(self.step, args=(x,))


@functools.cache
def on_one_device() -> list[Any]:
    return Training(strategy_of(1)).go()


def issued(program: replicax.Executable) -> set[tuple[str, int, int]]:
    """What goes between replicas: each kind of collective, its bytes, and how often a step issues such."""
    mesh = ProgramDevices({str(k): int(n) for k, n in program.mesh.shape.items()})
    uses = collectives_of(parse(program.compiled_text()), mesh)
    counts: dict[tuple[str, int], int] = {}
    for use in uses:
        if use.axes == ("replica",):
            counts[use.kind, use.bytes] = counts.get((use.kind, use.bytes), 0) + use.count
    return {(*use, count) for use, count in counts.items()}


GATHERED = {("all-gather", LAYER, 2 * 2 * LAYERS + 2), ("all-gather", SMALL, 1)}
"""In both turns: each layer forward and backward, and the last one; what is small once."""


@pytest.mark.parametrize(
    ("devices", "logical", "group", "expected"),
    [
        (2, 1, 2, GATHERED | {("reduce-scatter", LAYER // 2, 2 * LAYERS + 2), ("reduce-scatter", SMALL // 2, 1)}),
        (
            4,
            1,
            2,
            GATHERED
            | {("reduce-scatter", LAYER // 2, 2 * LAYERS + 2), ("reduce-scatter", SMALL // 2, 1)}
            | {("all-reduce", size // 2, 1) for size in (LAYERS * LAYER, LAYER, SMALL)},  # between groups: once
        ),
        (2, 2, 2, None),
    ],
    ids=["split", "groups", "split, in parts"],
)
def test_each_turn_gathers_and_scatters_what_is_large(devices: int, logical: int, group: int, expected: Any) -> None:
    training = Training(placed(devices, 2, replicax.variables.GroupPartitioner(group, over_all(group, 0)), logical))
    program = training.program()
    found = issued(program)
    if expected is None:  # gathers and scatters of a device's part only
        large = {(kind, size) for kind, size, _ in found if kind != "all-reduce" and size > SMALL}
        assert large == {("all-gather", LAYER // 2), ("reduce-scatter", LAYER // 4)}
    else:
        assert {use for use in found if use[1] > 64} == expected  # the others are of norms
    for mine, theirs in zip(training.go(), on_one_device(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    for name in ("layers", "last"):
        shard = training.model[name].slot.array.addressable_shards[0].data
        assert shard.size * group * logical == INITIAL[name].size


def test_replicas_at_once_share_what_is_gathered() -> None:
    training = Training(placed(2, 4, over_all(2, 0), at_once=2))
    assert issued(training.program()) >= GATHERED  # in two turns, of two replicas each
    for mine, theirs in zip(training.go(), on_one_device(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_plan_counts_every_turn() -> None:
    """As many examples of a device cost as much, in one part or in several."""
    plans = []
    for per_device in (1, 4):
        strategy = placed(2, per_device)
        step = Training(strategy).step
        plans.append(replicax.plan(strategy, step, jax.ShapeDtypeStruct((8 // per_device, WIDTH), jnp.float32)))
    assert plans[0].cost.matrix_flops == plans[1].cost.matrix_flops
    assert [(plan.replicas, plan.devices) for plan in plans] == [(2, 2), (8, 2)]


def test_a_device_never_has_the_whole_model_or_its_gradients() -> None:
    def temporaries(strategy: replicax.Strategy) -> float:
        with strategy.scope():
            w = replicax.Variable(jnp.zeros((24, 160, 160)), name="w")

        def step(x: Any) -> None:
            def loss() -> Any:
                return replicax.compute_average_loss(
                    jax.lax.scan(lambda y, p: (jnp.tanh(y @ p), None), x, w.value)[0].sum(-1)
                )

            _, [gradient] = replicax.value_and_grad(loss, [w])()
            w.assign_sub(context().all_reduce("sum", gradient))

        spec = strategy.distribute_values_from_function(lambda _: jnp.zeros((1, 160)))
        memory: Any = strategy.extended.trace(step, args=(spec,)).compiled().memory_analysis()
        return memory.temp_size_in_bytes / (w.size * 4)

    assert temporaries(placed(4, 3, over_all(4))) < 1.0 < temporaries(placed(4, 3))


def test_a_sum_in_a_narrow_dtype_is_carried_in_a_wide_one() -> None:
    """A gradient of bfloat16 is added up, over a device's replicas and over devices, as float32."""
    strategy = placed(2, 4, over_all(2))
    with strategy.scope():
        w = replicax.Variable(jnp.zeros((300, 256), jnp.bfloat16), name="w")

    def step() -> None:
        mine = 1.0 + jnp.asarray(context().replica_id_in_sync_group).astype(jnp.float32) / 64.0
        w.assign(context().all_reduce("sum", jnp.full(w.shape, mine, jnp.bfloat16)))

    program = strategy.extended.trace(step)
    assert [(c.kind, c.bytes) for c in program.collectives()] == [("reduce-scatter", w.size * 4 // 2)]
    strategy.run(step)
    assert set(np.asarray(w.numpy(), np.float32).ravel().tolist()) == {8.4375}


def test_steps_in_one_program() -> None:
    results = []
    for strategy in (strategy_of(1), placed(2, 2, over_all(2, 0))):
        training = Training(strategy)
        strategy.run_steps(lambda _, x: training.step(x), iter(strategy.distribute_dataset(list(BATCHES))), 2)  # noqa: B023
        results.append([v.numpy() for v in (*training.model.values(), training.seen)])
    for mine, theirs in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_a_checkpoint_goes_onto_any_other_placement(tmp_path: Any) -> None:
    pieces = over_all(2, min_bytes=0)
    goes_on_elsewhere(placed(2, 2, pieces), [placed(2, 2, pieces, 2), placed(1, 4)], tmp_path)


def test_what_a_replica_sees_of_a_piece() -> None:
    strategy = placed(2, 2, over_all(2, 0))
    with strategy.scope():
        v = replicax.Variable(jnp.arange(4.0), name="v")
    assert repr(v) == "<Variable 'v' float32[4] split along dim 0 over 2 devices: [0. 1. 2. 3.]>"
    assert [piece.tolist() for piece in strategy.local_results(v)] == [[0, 1], [0, 1], [2, 3], [2, 3]]

    def step() -> Any:
        return context().merge_call(lambda strategy: strategy.local_results(v))

    for options in (None, replicax.RunOptions("per_replica")):
        assert [piece.tolist() for piece in strategy.run(step, options=options)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_mirrored_variables_beside_split_ones() -> None:
    """What is not split goes its usual way in the same program: one sum, of all replicas, once."""
    strategy = shared_strategy(4, 2)
    with strategy.scope():
        whole = replicax.Variable(jnp.zeros(3), name="whole")
        pieces = replicax.Variable(jnp.zeros((200, 128)), partitioner=replicax.variables.FixedShardsPartitioner(2))

    def step() -> Any:
        number = context().replica_id_in_sync_group.astype(jnp.float32)
        whole.assign_add(context().all_reduce("sum", jnp.full(3, number)))
        pieces.assign_add(context().all_reduce("sum", jnp.full(pieces.shape, number)))
        return number * pieces.value[0, 0] + whole.value[0]

    seen = strategy.run(step)
    assert [float(x) for x in strategy.local_results(seen)] == [6.0, 12.0, 18.0, 24.0]
    assert whole.numpy().tolist() == [6.0] * 3
    assert set(pieces.numpy().ravel().tolist()) == {6.0}
