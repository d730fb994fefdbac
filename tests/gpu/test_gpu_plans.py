"""Steps compiled for GPUs that are not there, with every strategy."""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import replicax
from replicax.devices.mesh import slice_of
from replicax.gpu import compile_process
from replicax.planning import planner
from tests.gpu.described import devices, needs_compiler
from tests.planning.test_planner import FLOPS, PARAMETERS, build
from tests.soaking import soak_except

pytestmark = needs_compiler

STATE = 2 * 4 * PARAMETERS  # parameters and momenta


@pytest.mark.parametrize(
    ("name", "processes", "slices"),
    [("h100:8", 1, 1), ("a3-megagpu-8g:2", 2, 2), ("gb200:36x4", 36, 2), ("l40s:3x1", 3, 3)],
)
def test_described_devices(name: str, processes: int, slices: int) -> None:
    resolver = replicax.GPUClusterResolver(topology=name)
    found = resolver.devices
    assert resolver.kind == resolver.environment == "absent"
    assert [[d.process_index for d in row] for row in found] == [[i] * found.shape[1] for i in range(processes)]
    assert {d.device_kind for d in found.flat} == {resolver.model.device_kind}
    assert {d.platform for d in found.flat} == {"gpu"}
    assert [slice_of(row[0]) for row in found] == [i * slices // processes for i in range(processes)]
    strategy = replicax.MirroredStrategy(found)
    assert (strategy.extended.is_absent, strategy.extended.slices) == (True, slices)


SHARDED = {("all-gather", 16), ("reduce-scatter", 16), ("all-reduce", 16)}
PLACEMENTS = {
    "mirrored": (lambda found: replicax.MirroredStrategy(found), {("all-reduce", 16)}, STATE),
    "several workers": (lambda found: replicax.MultiWorkerMirroredStrategy(found), {("all-reduce", 16)}, STATE),
    "sharded": (lambda found: replicax.ShardedStrategy(found), SHARDED, STATE // 16),
    "a group for each host": (
        lambda found: replicax.MirroredStrategy(found, variable_partitioner=replicax.variables.GroupPartitioner()),
        {("all-gather", 8), ("reduce-scatter", 8), ("all-reduce", 2), ("all-reduce", 16)},
        STATE // 8,
    ),
    "several replicas on each": (
        lambda found: replicax.MirroredStrategy(found, num_replicas=64),
        {("all-reduce", 16)},
        STATE + 3 * 4 * 128 * 256,
    ),
    "one": (lambda found: replicax.OneDeviceStrategy(found[0, 0]), set(), STATE),
}


QUICK = ("mirrored", "a group for each host")


@pytest.mark.parametrize("placement", soak_except(PLACEMENTS, *QUICK))
def test_every_strategy(placement: str) -> None:
    make, among, state = PLACEMENTS[placement]
    strategy = make(devices("h100:2x8"))
    plan = replicax.plan(strategy, *build(strategy))
    replicas_each = strategy.num_replicas_in_sync // plan.devices
    assert (plan.platform, plan.chip.name, plan.is_absent, plan.fits) == ("gpu", "h100", True, True)
    assert plan.cost.matrix_flops == FLOPS * replicas_each
    assert plan.memory.arguments == pytest.approx(state + 4 * 128 * 256, rel=0.02)
    assert plan.memory.capacity == int(0.75 * 84942979072)
    found = {(c.kind, c.participants) for c in plan.collectives}
    assert found <= among
    assert bool(found) == bool(among)


def test_logical_devices_within_a_host() -> None:
    strategy = replicax.MirroredStrategy(devices("h100:2x8"), num_logical_devices=4)
    plan = replicax.plan(strategy, *build(strategy, parts=4))
    assert (plan.replicas, plan.mesh) == (4, {"replica": 4, "logical0": 2, "logical1": 2})
    assert plan.cost.matrix_flops == FLOPS // 4
    assert {c.participants for c in plan.collectives} == {2, 4} or {c.participants for c in plan.collectives} == {4}
    for replica in strategy.extended.logical_devices:
        assert len({d.process_index for d in replica}) == 1


# --- what a compiler for absent devices can't do by itself ----------------------------------------------


FURTHER = [pytest.param(more, marks=pytest.mark.soak, id=str(more)) for more in ({}, {"num_replicas": 16})]


@pytest.mark.parametrize("arguments", [{"num_logical_devices": 2}, *FURTHER], ids=str)
def test_calls_of_the_host(arguments) -> None:
    strategy = replicax.MirroredStrategy(devices(), **arguments)

    def step(x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        jax.debug.print("sum {}", y.sum())
        jax.debug.callback(lambda: None)
        z = io_callback(lambda v: v, jax.ShapeDtypeStruct((), x.dtype), y.sum(), ordered=True)

        def body(carry, _):
            jax.debug.print("carry {}", carry)
            return carry + 1, None

        return replicax.get_replica_context().all_reduce("sum", jax.lax.scan(body, z, None, length=3)[0])

    plan = replicax.plan(strategy, step, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert plan.fits is True
    assert {c.kind for c in plan.collectives} >= {"all-reduce"}


def test_the_compiler_refuses_a_step() -> None:
    strategy = replicax.MirroredStrategy(devices())
    with pytest.raises(
        replicax.errors.CompilationError, match=r"the step '<lambda>' was traced, but .* for NVIDIA H100 80GB"
    ):
        replicax.plan(strategy, lambda x: jnp.linalg.eig(x)[0], jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_the_compiler_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = replicax.MirroredStrategy(devices("l4:3"))  # whose process has not begun
    served = compile_process._COMMAND
    code = "import os; os.write(2, b'fatal error: in __triton_collective\\nstack trace'); os.abort()"
    monkeypatch.setattr(compile_process, "_COMMAND", [sys.executable, "-c", code])
    with pytest.raises(replicax.errors.CompilationError) as e:
        replicax.plan(strategy, lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    message = str(e.value)
    assert message.startswith("the step '<lambda>' was traced, but can't be compiled for NVIDIA L4: XLA's compiler ")
    assert "ended its process by SIGABRT: fatal error: in __triton_collective." in message
    advised = re.findall(r"XLA_FLAGS=--(\w+)=", message)
    assert advised or "try another version of JAX" in message
    for flag in advised:  # this JAX has it
        jax.jit(lambda x: x).lower(0.0).compile({flag: ""})
    monkeypatch.setattr(compile_process, "_COMMAND", served)
    assert replicax.plan(strategy, lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32)).fits  # another process


@pytest.mark.soak
def test_what_another_process_compiles_is_what_jax_would_compile() -> None:
    strategy = replicax.ShardedStrategy(devices())
    step, spec = build(strategy)
    plan = replicax.plan(strategy, step, spec)
    executable, _ = planner._traced_program(strategy, step, spec)
    analysis = executable.compiled().memory_analysis()
    assert plan.memory.arguments == analysis.argument_size_in_bytes
    assert plan.memory.aliased == analysis.alias_size_in_bytes
    assert plan.memory.temporaries == pytest.approx(analysis.temp_size_in_bytes, abs=1024)
