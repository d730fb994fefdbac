"""Plans of pipelines, which are many programs."""

from __future__ import annotations

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.pipeline import dispatch
from replicax.planning import pipeline_costs, planner

ROWS, WIDTH, MICROBATCHES = 32, 256, 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
SPEC = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def build(strategy, stages: int, width: int = WIDTH):
    """A pipeline of equal stages."""
    with strategy.scope():
        weights = [replicax.Variable(lambda: jnp.zeros((width, width)), name=f"w{k}") for k in range(stages)]
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def train_step(x):
        def loss():
            total = 0.0
            for h in jnp.split(x, MICROBATCHES):
                for k, w in enumerate(weights):
                    h = jnp.tanh(strategy.assign_to_logical_device(h, k) @ w)
                share = replicax.compute_average_loss(
                    jnp.square(h).mean(-1), global_batch_size=ROWS * strategy.num_replicas_in_sync
                )
                total += share
            return total

        share, gradients = replicax.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return share

    return train_step


def on_tpus(topology: str, shape: list[int]) -> replicax.TPUStrategy:
    resolver = replicax.TPUClusterResolver(topology=topology)
    return replicax.TPUStrategy(resolver, replicax.DeviceAssignment.build(resolver.topology, shape, num_replicas=None))


def here(replicas: int, stages: int) -> replicax.Strategy:
    devices = np.array(jax.devices()[: replicas * stages]).reshape(replicas, stages)
    return replicax.Strategy(replicax.StrategyExtended(devices))


def check(plan: replicax.planning.Plan, stages: int, replicas: int) -> None:
    assert [stage.logical_device for stage in plan.stages] == list(range(stages))
    # Forward, and twice for the gradients; the input has none.
    assert [s.cost.matrix_flops for s in plan.stages] == [2 * PRODUCT] + [3 * PRODUCT] * (stages - 1)
    batch, parameters = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH
    for k, stage in enumerate(plan.stages):
        own = {b.name: b.bytes for b in stage.memory.buffers if b.kind == "variable"}
        assert own == {f"w{k}": parameters, f"optimizer[0].trace/w{k}": parameters}
        assert stage.memory.arguments == 2 * parameters + (k == 0) * batch
        assert stage.memory.aliased == 2 * parameters
        # The gradient is there, and where it is summed over the replicas the sum and the compiler's copy, too.
        assert parameters <= stage.memory.temporaries < (2 + 2 * (replicas > 1)) * parameters + 4 * batch
        reduced = [c for c in stage.collectives if c.kind == "all-reduce"]
        assert [(c.axes, c.participants, c.count) for c in reduced] == [(("replica",), replicas, 1)] * (replicas > 1)
        assert sum(c.bytes for c in reduced) == parameters * (replicas > 1)
        there = [c for c in stage.collectives if c.kind == "send" and c.bytes > 16]
        expected = {f"to logical device {n}": MICROBATCHES for n in (k - 1, k + 1) if 0 <= n < stages}
        assert {c.where: c.count for c in there} == expected
        assert all(c.bytes == batch // MICROBATCHES and "replica" not in c.axes for c in there)
    assert plan.memory.total == max(s.memory.total for s in plan.stages)
    assert plan.cost in [s.cost for s in plan.stages]
    assert [s["memory"]["total"] for s in json.loads(plan.to_json())["stages"]] == [s.memory.total for s in plan.stages]


def test_on_tpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compiling = [], pipeline_costs.compile_regions
    monkeypatch.setattr(planner, "compile_regions", lambda e: compiled.extend(compiling(e)) or compiled)
    strategy = on_tpus("v5e:2x2", [1, 2, 1])
    plan = replicax.plan(strategy, build(strategy, 2), SPEC)
    assert sum(s.memory.code for s in plan.stages) == sum(c.code for c in set(compiled))
    check(plan, 2, 2)
    assert (plan.fits, plan.replicas, plan.is_absent) == (True, 2, True)
    assert all(s.programs < 2 * MICROBATCHES + 2 for s in plan.stages)  # microbatches share theirs
    assert all(c.seconds > 0 for s in plan.stages for c in s.collectives)
    assert plan.timeline == max((s.timeline for s in plan.stages), key=lambda t: t.seconds)
    assert [p.replicas for p in plan.scaling] == [1, 2]
    assert plan.scaling[-1].seconds == plan.timeline.seconds  # of the stage that is busy longest


@pytest.mark.parametrize(("replicas", "stages"), [pytest.param(1, 2, marks=pytest.mark.soak), (2, 3)])
def test_on_devices_that_are_there(replicas: int, stages: int) -> None:
    strategy = here(replicas, stages)
    step, begin = build(strategy, stages), time.perf_counter()
    plan = replicax.plan(strategy, step, SPEC)
    assert plan.trace_seconds + plan.compile_seconds < time.perf_counter() - begin  # each program counts once
    check(plan, stages, replicas)
    assert (plan.fits, plan.estimate, plan.scaling) == (None, None, ())
    assert [s.busy for s in plan.stages] == [s.cost.matrix_flops + s.cost.other_flops for s in plan.stages]
    [x] = strategy.distribute_dataset([np.ones((ROWS * replicas, WIDTH), np.float32)])
    report = strategy.extended.trace(step, args=(x,)).placement()
    assert [s.memory.arguments for s in plan.stages] == [d.variable_bytes + d.argument_bytes for d in report.devices]
    strategy.run(step, args=(x,))  # the step runs as before
    assert strategy.extended.trace_count(step) == 1


@pytest.mark.parametrize(("memory", "fits"), [(1e6, False), pytest.param(1e9, True, marks=pytest.mark.soak)])
def test_each_program_fits_but_not_all_that_is_there(memory: float, fits: bool) -> None:
    strategy = here(1, 2)
    chip = replicax.planning.Chip("card", flops=1e15, memory=memory, bandwidth=3e12, link=50e9, links=9)
    step = build(strategy, 2)
    assert planner.variables_alone(strategy, step, SPEC, chip=chip) == (0, None)  # logical devices have different ones
    plan = replicax.plan(strategy, step, SPEC, chip=chip)
    assert plan.fits is fits
    # Each microbatch runs its program, and what a device predicts and counts is the same.
    assert (
        [s.timeline.flops for s in plan.stages]
        == [s.cost.matrix_flops for s in plan.stages]
        == [
            2 * PRODUCT,
            3 * PRODUCT,
        ]
    )


def test_memory_has_what_is_there_when_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array that a launch or a send has left behind is in memory until it is not needed any more."""
    strategy = here(1, 2)
    most = [0, 0]
    send = dispatch._send

    def watched_send(sent: dispatch.Send, values: list[object]) -> None:
        send(sent, values)
        arrays = {id(v): v for v in values if isinstance(v, jax.Array) and not v.is_deleted()}.values()
        for k in range(2):
            at_once = sum(a.nbytes for a in arrays if a.sharding.device_set == {strategy.extended.mesh.devices[0, k]})
            most[k] = max(most[k], at_once)

    def step(x):
        parts = [jnp.tanh(strategy.assign_to_logical_device(x * (i + 1), 0)) for i in range(8)]
        there = [strategy.assign_to_logical_device(part, 1) for part in parts]
        return functools.reduce(jnp.matmul, there)

    spec = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    plan = replicax.plan(strategy, step, spec)
    monkeypatch.setattr(dispatch, "_send", watched_send)
    strategy.run(step, args=(next(iter(strategy.distribute_dataset([np.ones((WIDTH, WIDTH), np.float32)]))),))
    array = 4 * WIDTH * WIDTH
    assert most[1] > 5 * array
    for stage, there in zip(plan.stages, most, strict=True):
        memory = stage.memory.total - stage.memory.code
        assert there <= memory <= there + 3 * array  # with what a program works on


@pytest.mark.soak
def test_a_stage_that_does_not_fit() -> None:
    strategy = on_tpus("v5e:2x2", [1, 2, 1])
    plan = replicax.plan(strategy, build(strategy, 2, width=50_000), jax.ShapeDtypeStruct((ROWS, 50_000), jnp.float32))
    assert plan.fits is False
    assert plan.verdict.startswith("does not fit: needs ")
    assert plan.memory.total > plan.memory.capacity


def test_a_stage_that_can_not_be_compiled() -> None:
    strategy = on_tpus("v5e:2x2", [1, 2, 1])

    def step(x):
        return jnp.linalg.eig(strategy.assign_to_logical_device(x * 2, 1))[0]

    with pytest.raises(replicax.errors.CompilationError, match=r"the step 'step' was traced, but .* for TPU v5 lite: "):
        replicax.plan(strategy, step, jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_variables_that_are_only_written_and_results_have_names() -> None:
    strategy = here(1, 2)
    with strategy.scope():
        used, last = (replicax.Variable(np.zeros((ROWS, WIDTH), np.float32), name=name) for name in ("used", "last"))
    closed_over = jnp.ones((ROWS, WIDTH))

    def step(x):
        h = strategy.assign_to_logical_device(jnp.tanh(x) * used, 1) * closed_over
        last.assign(h)
        return h + 1, strategy.assign_to_logical_device(used.value, 1) + 1

    plan = replicax.plan(strategy, step, SPEC)
    size, array = 4 * ROWS * WIDTH, f"float32[{ROWS},{WIDTH}]"
    assert [(c.kind, c.bytes, c.count) for c in plan.stages[0].collectives] == [("send", size, 2)]  # and the variable
    second = plan.stages[1].memory
    found = {(b.kind, b.name, b.type, b.count) for b in second.buffers if b.kind != "temporary"}
    assert found == {
        ("variable", "last", array, 1),
        ("constant", "closed over", array, 1),
        ("output", "returned", array, 2),
    }
    assert (second.arguments, second.outputs, second.aliased) == (size, 3 * size, 0)
