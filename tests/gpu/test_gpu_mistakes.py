"""What can't be done with GPUs that are not there is told before anything is compiled, with what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import replicax
from tests.gpu.described import devices, needs_compiler
from tests.planning.test_planner import build
from tests.programs.programs import third_party

pytestmark = needs_compiler


def resolver(name: str = "h100:2x4") -> replicax.GPUClusterResolver:
    return replicax.GPUClusterResolver(topology=name)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: replicax.MirroredStrategy(resolver()),
            TypeError,
            r"devices must be a list of devices .* got GPUClusterResolver\(.*pass resolver.devices",
        ),
        (
            lambda: replicax.TPUStrategy(devices()),
            TypeError,
            r"TPUStrategy: expected .{,150}…. For GPUs: MirroredStrat",
        ),
        (
            lambda: replicax.DeviceAssignment.build(devices(), computation_shape=[2, 1, 1]),
            TypeError,
            r"must be a Topology, got .{,80}…\. Assignments are of TPU cores; for GPUs: .*num_logical_devices",
        ),
        (
            lambda: replicax.ParameterServerStrategy(resolver()),
            ValueError,
            r"has no job 'worker'; .* described for plans, .* MirroredStrategy\(resolver.devices\)",
        ),
        (
            lambda: replicax.MirroredStrategy([*devices()[0], jax.devices()[0]]),
            ValueError,
            r"names gpu:0 \(NVIDIA H100 80GB HBM3\) and cpu:0 \(cpu; entry 8\), and no program runs on both",
        ),
        (
            lambda: replicax.MirroredStrategy([devices()[0, 0], devices("l4:2")[0, 1]]),
            ValueError,
            r"gpu:0 \(NVIDIA H100 80GB HBM3\) and gpu:1 \(NVIDIA L4; entry 1\), .* for a plan, of one topology",
        ),
        (
            lambda: replicax.CentralStorageStrategy(devices()),
            ValueError,
            r"copies variables between cpu:0 and gpu:0, .* only described .*parameter_device=devices\[0\]",
        ),
        (
            lambda: replicax.CentralStorageStrategy(["cpu:0"], parameter_device=devices()[0, 0]),
            ValueError,
            r"of which one is only described",
        ),
        (
            lambda: replicax.MirroredStrategy(
                devices("h100:7"), variable_partitioner=replicax.variables.GroupPartitioner(2)
            ),
            ValueError,
            r"group_size 2 does not divide the number of replicas, 7: choose one of 1, 7",
        ),
        (
            lambda: replicax.MirroredStrategy(devices(), num_logical_devices=3),
            ValueError,
            r"num_logical_devices must divide the number of devices.*: got 3 for 8 device",
        ),
        (lambda: replicax.TPUClusterResolver(topology="h100:8"), ValueError, r"'h100:8' is not a TPU slice"),
        (lambda: resolver("v5e:4x4"), ValueError, r"no GPU is called 'v5e'; .*TPUs are called v5e:4x4"),
    ],
)
def test_a_strategy_that_can_not_be(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_what_needs_the_devices() -> None:
    with pytest.raises(replicax.errors.AbsentDeviceError, match=r"strategy\.run needs .* are absent.*replicax\.plan"):
        replicax.MirroredStrategy(devices()).run(lambda: 1.0)


def test_variables_on_one_of_the_described_gpus() -> None:
    some = devices()[0]
    strategy = replicax.CentralStorageStrategy(list(some[1:5]), parameter_device=some[0])
    plan = replicax.plan(strategy, *build(strategy, width=128))
    assert (plan.devices, plan.fits) == (4, True)


@pytest.mark.parametrize("strategy", [replicax.MultiWorkerMirroredStrategy, replicax.ShardedStrategy])
def test_a_resolver_brings_its_devices(strategy) -> None:
    """And not those of this machine, of which nothing was said."""
    made = strategy(cluster_resolver=resolver())
    assert made.num_replicas_in_sync == 8
    assert made.extended.is_absent


def test_a_replica_on_the_gpus_of_two_hosts() -> None:
    strategy = replicax.MirroredStrategy(devices("h100:2x8"), num_logical_devices=16)
    plan = replicax.plan(strategy, *build(strategy, width=128, parts=16))
    assert (plan.replicas, plan.devices, plan.topology) == (1, 16, "2x8")
    assert any("network" in c.way for c in plan.collectives)


def cudnn_attention(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


def solution(x):
    import lineax

    return lineax.linear_solve(lineax.MatrixLinearOperator(x), x[0]).value


@pytest.mark.parametrize(
    ("step", "shape", "message"),
    [
        (cudnn_attention, (2, 128, 4, 64), r"can't be traced .* CUDA's libraries .*='xla'.*cuDNN not found"),
        (lambda x: jnp.linalg.eig(x)[0], (8, 8), r"was traced, but .* CUDA's libraries .*linalg.eig"),
        (solution, (8, 8), r"Equinox' error_if .* EQX_ON_ERROR=off .*Unknown backend"),
    ],
)
@third_party
def test_what_needs_the_libraries_of_a_gpu_says_what_to_do(step, shape: tuple[int, ...], message: str) -> None:
    spec = jax.ShapeDtypeStruct(shape, jnp.bfloat16 if step is cudnn_attention else jnp.float32)
    with pytest.raises(replicax.errors.CompilationError, match=message):
        replicax.plan(replicax.MirroredStrategy(devices()), step, spec)
