"""What is in memory when it is fullest, by kind, of steps whose activations are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import replicax
from replicax.hlo.instructions import parse
from replicax.hlo.live_ranges import LiveRanges, LiveValue
from replicax.planning.timeline.peak import ACTIVATIONS, COPIES, INPUTS, OTHERS, VARIABLES, temporaries_by_kind
from tests.conftest import strategy_of

WIDTH, BATCH, LAYERS = 64, 4096, 6
ONE = 4 * BATCH * WIDTH  # bytes of a layer's result


def plan_of(loop: bool, remat: bool = False) -> replicax.planning.Plan:
    """A step whose backward pass needs the result of each layer, and its sine's derivative."""
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((LAYERS, WIDTH, WIDTH)), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def layer(h, weights):
        return jnp.sin(h @ weights), None

    def step(x):
        def loss():
            one = jax.checkpoint(layer) if remat else layer
            h = x
            if loop:
                h, _ = jax.lax.scan(one, h, w.value)
            else:
                for i in range(LAYERS):
                    h, _ = one(h, w.value[i])
            return replicax.compute_average_loss(jnp.square(h).sum(-1))

        value, gradients = replicax.value_and_grad(loss, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return value

    return replicax.plan(strategy, step, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


@pytest.mark.parametrize("loop", [False, True])
def test_a_step_by_kind(loop: bool) -> None:
    memory = plan_of(loop).memory
    assert sum(memory.peak.values()) == memory.total
    assert memory.peak[VARIABLES] == 2 * 4 * LAYERS * WIDTH * WIDTH  # and the momenta
    assert memory.peak[INPUTS] == pytest.approx(ONE, rel=0.01)
    assert LAYERS * ONE <= memory.peak[ACTIVATIONS] <= 2.5 * LAYERS * ONE


def test_layers_that_are_computed_again_keep_less() -> None:
    kept, again = (plan_of(True, remat).memory.peak[ACTIVATIONS] for remat in (False, True))
    assert (LAYERS - 1) * ONE <= again <= (LAYERS + 2) * ONE < 0.7 * kept


def test_without_a_backward_pass_nothing_is_kept_for_it() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((WIDTH, WIDTH)), name="w")
    found = replicax.plan(strategy, lambda x: jnp.sin(jnp.sin(x @ w) @ w), jax.ShapeDtypeStruct((8, WIDTH), "float32"))
    assert ACTIVATIONS not in found.memory.peak


def test_gathered_variables_are_known_by_the_names_of_a_programs_arguments() -> None:
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weights = [replicax.Variable(lambda: jnp.zeros((512, 512)), name=f"w{i}") for i in range(3)]

    def step(x):
        for w in weights:
            x = jnp.sin(x @ w)
        return x.sum()

    found = replicax.plan(strategy, step, jax.ShapeDtypeStruct((8, 512), jnp.float32))
    assert 512 * 512 * 4 <= found.memory.peak[COPIES] <= 3 * 512 * 512 * 4


LOOP = """
%body (p: (bf16[16], f32[16], f32[16])) -> (bf16[16], f32[16], f32[16]) {
  %p = (bf16[16], f32[16], f32[16]) parameter(0)
  %c = bf16[16] get-tuple-element(%p), index=0
  %h = f32[16] get-tuple-element(%p), index=1
  %a = f32[16] get-tuple-element(%p), index=2
  %n = f32[16] multiply(%h, %c)
  ROOT %t = (bf16[16], f32[16], f32[16]) tuple(%c, %n, %a)
}

ENTRY %main (w: f32[16], x: f32[16]) -> f32[16] {
  %w = f32[16] parameter(0), metadata={op_name="args[0][0]"}
  %x = f32[16] parameter(1), metadata={op_name="args[2][0]"}
  %z = f32[] constant(0)
  %zeros = f32[16] broadcast(%z), dimensions={}
  %cast = bf16[16] convert(%w)
  %start = (bf16[16], f32[16], f32[16]) tuple(%cast, %x, %zeros)
  %loop = (bf16[16], f32[16], f32[16]) while(%start), condition=%none, body=%body
  %last = f32[16] get-tuple-element(%loop), index=1
  ROOT %g = f32[16] multiply(%last, %last), metadata={op_name="jit(f)/transpose(jvp())/mul"}
}
"""


STEPS = ("w", "x", "z", "zeros", "cast", "p", "n", "loop", "g")


def test_what_a_loop_hands_on_is_of_the_kind_of_what_it_began_with() -> None:
    alive = [
        LiveValue("w", (), 64, 0, 9),  # an argument
        LiveValue("p", (0,), 32, 5, 7),  # the weights
        LiveValue("p", (1,), 64, 5, 9),  # the layer's result
        LiveValue("zeros", (), 64, 3, 9),
    ]
    found = temporaries_by_kind(parse(LOOP), LiveRanges(STEPS, tuple(alive)), 1000)
    assert found == {COPIES: 32, ACTIVATIONS: 64, OTHERS: 904}
    # What shares a place counts for each: all together they are no more than there are.
    found = temporaries_by_kind(parse(LOOP), LiveRanges(STEPS, tuple(alive)), 48)
    assert found == {COPIES: 16, ACTIVATIONS: 32, OTHERS: 0}


@pytest.mark.parametrize(("end", "found"), [(7, {OTHERS: 1000}), (8, {ACTIVATIONS: 64, OTHERS: 936})])
def test_what_the_first_backward_operation_takes_is_kept_for_it(end: int, found: dict[str, int]) -> None:
    result = LiveValue("n", (), 64, 6, end)
    assert temporaries_by_kind(parse(LOOP), LiveRanges(STEPS, (result,)), 1000) == found


def test_tokens() -> None:
    strategy = strategy_of(2)
    chip = replicax.planning.Chip("card", flops=1e15, memory=1e9, bandwidth=3e12)
    text = {
        "text": jax.ShapeDtypeStruct((4, 128), jnp.int32),
        "translation": jax.ShapeDtypeStruct((4, 120), jnp.int32),
        "label": jax.ShapeDtypeStruct((4,), jnp.int32),
        "features": jax.ShapeDtypeStruct((4, 512), jnp.float32),
    }
    found = replicax.plan(strategy, lambda e: jnp.sin(e["text"].astype(jnp.float32)), text, chip=chip)
    assert (found.examples, found.tokens) == (8, 128)
    assert found.to_dict()["tokens_per_second"] == found.tokens_per_second == found.examples_per_second * 128
    assert found.examples_per_second * found.timeline.seconds == pytest.approx(8)  # of all replicas together
    images = jax.ShapeDtypeStruct((4, 28, 28), jnp.uint8)
    other = replicax.plan(strategy, lambda x: jnp.sin(x.astype(jnp.float32)), images, chip=chip)
    assert (other.examples, other.tokens, other.tokens_per_second) == (8, None, None)
