"""Predicted steps of programs that are really compiled for GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import replicax
from examples import language_model
from replicax.backends.gpu import GATHERS_AHEAD
from replicax.planning.render.tables import sections
from tests.gpu.described import devices, needs_compiler

pytestmark = needs_compiler

PROGRAMS = ("language_model.py:", "test_gpu_timeline.py:")

SMALL = language_model.Size(layers=2, width=512, heads=4, groups=4, hidden=1408, words=512, length=256)
LARGER = language_model.Size(layers=4, width=1024, heads=8, groups=8, hidden=2816, words=1024, length=512)


def plan_of_blocks() -> replicax.planning.Plan:
    """What is in the language model, but for attention, which takes most of the time to compile."""
    layers, width = 4, 512
    strategy = replicax.ShardedStrategy(devices("h100:2x8"))
    with strategy.scope():
        up = replicax.Variable(lambda: jnp.zeros((layers, width, 4 * width)), name="up")
        down = replicax.Variable(lambda: jnp.zeros((layers, 4 * width, width)), name="down")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def layer(x, weights):
        up, down = weights
        return jnp.tanh(x + jax.nn.gelu(x @ up) @ down), None

    def step(x):
        def loss(weights):
            return replicax.compute_average_loss(
                jnp.square(jax.lax.scan(jax.checkpoint(layer), x, weights)[0]).mean(-1)
            )

        share, gradients = replicax.value_and_grad(loss, [up, down])([up, down])
        optimizer.apply_gradients(zip(gradients, [up, down], strict=True))
        return share

    return replicax.plan(strategy, step, jax.ShapeDtypeStruct((512, width), jnp.float32))


def plan_of(size: language_model.Size) -> replicax.planning.Plan:
    strategy = replicax.ShardedStrategy(list(replicax.GPUClusterResolver(topology="h100:2x8").devices.flat))
    standard = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with pytest.MonkeyPatch.context() as patch, standard[0], standard[1]:
        patch.setitem(language_model.SIZES, "small", size)
        return replicax.plan(strategy, *language_model.plan(strategy, "small", batch=4))


@pytest.fixture(scope="module", params=[pytest.param(lambda: plan_of(SMALL), marks=pytest.mark.soak), plan_of_blocks])
def plan(request: pytest.FixtureRequest) -> replicax.planning.Plan:
    return request.param()


def test_the_walk_goes_through_the_whole_program(plan) -> None:
    """What it computes and sends, what of that is hidden, and which kernels are the dearest."""
    timeline = plan.timeline
    assert timeline.flops == plan.cost.matrix_flops
    assert timeline.communication == pytest.approx(sum(c.count * c.seconds for c in plan.collectives))
    # Each layer is computed once more in the backward pass, which is a fourth of what is computed of it.
    assert 0.7 < timeline.model_flops / timeline.flops < 0.8
    assert plan.estimate.at_least < timeline.seconds
    assert timeline.kernels < timeline.seconds < timeline.kernels * 1.1 + timeline.communication

    assert 0 < timeline.hidden < 1
    assert sum(wait.exposed for wait in timeline.waits) == pytest.approx(timeline.exposed)
    assert all(wait.exposed <= wait.seconds * 1.001 and wait.why for wait in timeline.waits)
    assert any(wait.where.startswith(PROGRAMS) for wait in timeline.waits)

    kernels = timeline.dearest
    assert len(kernels) == 10
    assert [k.seconds for k in kernels] == sorted((k.seconds for k in kernels), reverse=True)
    assert any(k.kind == "product" and k.where.startswith(PROGRAMS) for k in kernels)
    assert "The dearest kernels" in {section.title for section in sections(plan)}


def test_attention_in_a_kernel_of_its_own() -> None:
    """Pallas' kernels compile without a GPU, and are known by their names."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    strategy = replicax.MirroredStrategy(devices())
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((64, 64)), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        def loss():
            y = (x @ w.value.astype(jnp.bfloat16)).astype(jnp.bfloat16)
            with jax.named_scope("causal"), jax.numpy_rank_promotion("allow"):
                y = mha(y, y, y, None, sm_scale=0.1, causal=True)
            return replicax.compute_average_loss(y.astype(jnp.float32).mean(axis=(1, 2, 3)))

        value, gradients = replicax.value_and_grad(loss, [w])()
        optimizer.apply_gradients(gradients, [w])
        return value

    found = replicax.plan(strategy, step, jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)).timeline
    one = 2 * (2 * 4 * 256 * 256 * 64) // 2  # a product of queries with the keys that come before them
    assert {"attention", "attention, backward"} <= set(found.by_kind)
    assert found.flops - 2 * 2 * (2 * 256 * 4 * 64 * 64) == (2 + 5) * one  # besides, two products with the weights


def test_layers_that_are_variables_of_their_own_are_not_gathered_as_one() -> None:
    strategy = replicax.ShardedStrategy(devices())
    with strategy.scope():
        weights = [replicax.Variable(lambda: jnp.zeros((2048, 2048)), name=f"w{i}") for i in range(8)]
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        def loss():
            h = x
            for w in weights:
                h = h @ w
            return replicax.compute_average_loss(jnp.square(h).mean(-1))

        share, gradients = replicax.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return share

    found = replicax.plan(strategy, step, jax.ShapeDtypeStruct((2048, 2048), jnp.float32))
    gathers = [c for c in found.collectives if c.kind == "all-gather"]
    assert sum(c.count * c.bytes for c in gathers) >= 8 * 4 * 2048**2
    assert max(c.bytes for c in gathers) <= 30 * 2**20
    assert found.timeline.hidden > 0.45


def test_calls_that_are_not_known_are_named() -> None:
    strategy = replicax.MirroredStrategy(devices())
    found = replicax.plan(strategy, jnp.linalg.cholesky, jax.ShapeDtypeStruct((64, 64), jnp.float32)).timeline
    assert found.opaque == ("cusolver_potrf_ffi",)
    assert found.by_kind["opaque"] > 0


@pytest.mark.soak
def test_gathers_are_started_a_layer_ahead(monkeypatch) -> None:
    """The strategy sets the compiler's options for it; those that ``XLA_FLAGS`` names are left to it."""
    plan = plan_of(LARGER)
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}={value}" for name, value in GATHERS_AHEAD.items()))
    left = plan_of(LARGER)
    assert left.cost.matrix_flops == plan.cost.matrix_flops
    assert plan.timeline.hidden > left.timeline.hidden + 0.1
    assert sum(c.count for c in plan.collectives) < sum(c.count for c in left.collectives)


@pytest.mark.soak
def test_of_a_model_of_7_billion_parameters_nine_tenths_of_communication_are_hidden() -> None:
    """Llama 2 7B on 8 x 8 H100s, fully sharded, 2 texts of 4,096 words for each; ``benchmarks/gpu_options.py``."""
    strategy = replicax.ShardedStrategy(list(devices("h100:8x8").flat))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = replicax.plan(strategy, *language_model.plan(strategy, "7b", 2, 4096))
    assert found.fits
    assert {c.kind for c in found.collectives} == {"all-gather", "reduce-scatter", "all-reduce"}
    sent = sum(c.count * c.bytes for c in found.collectives)
    summed = sum(c.count * c.bytes for c in found.collectives if c.kind == "all-reduce")
    assert summed < 1e-4 * sent  # so what is hidden is gathered and scattered
    assert found.timeline.hidden >= 0.9
    assert (found.tokens, found.examples) == (4097, 128)
    memory = found.memory
    assert sum(memory.peak.values()) == memory.total
    layers_inputs = 32 * 2 * 4096 * 4096 * 2  # what goes into each layer, in bfloat16
    assert layers_inputs <= memory.peak["activations"] <= 1.5 * layers_inputs
