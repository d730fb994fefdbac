"""What XLA on CPUs is slow at is said in another way, and computes the same bits."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax
from replicax._jax import contains
from replicax.backends.cpu import CPU, NEEDED
from replicax.backends.cpu.convolutions import Convolutions
from replicax.backends.cpu.pooling import PoolingGradients
from replicax.backends.cpu.small_sums import SmallSums
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting
from tests.conftest import shared_strategy, strategy_of

POOLS = {
    "2x2": ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "a remainder": ((1, 3, 3, 1), (1, 3, 3, 1), "VALID"),
    "padding on one side": ((1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
    "padding on both sides": ((1, 3, 2, 1), (1, 3, 2, 1), ((0, 0), (2, 2), (1, 1), (0, 0))),
    "windows of padding alone": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (2, 4), (0, 0), (0, 0))),
    "gaps": ((1, 2, 1, 1), (1, 3, 2, 1), "VALID"),
    "examples and channels": ((2, 1, 2, 3), (2, 1, 2, 3), "VALID"),
    "overlap": ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "much overlap": ((1, 4, 4, 1), (1, 1, 1, 1), "VALID"),
    "some overlap": ((1, 4, 3, 1), (1, 3, 2, 1), ((0, 0), (1, 0), (0, 2), (0, 0))),
}
QUICK = {"padding on both sides", "windows of padding alone", "gaps", "some overlap"}
PASS = Rewriting([PoolingGradients(), Convolutions()])


def rules_for(jaxpr: Any, *, in_a_loop: bool, split: bool, in_order: bool) -> Any:
    found = CPU().rules(jaxpr, Target(in_a_loop, split, None, in_order, False))
    return [rule for rule in found if type(rule) not in NEEDED]


LARGE = ((1, 5, 5, 1), (1, 5, 5, 1), "VALID")


def pooling(op: str, window: Any, dtype: Any) -> Any:
    """The gradient of a pooling as a function of its operand and the cotangent."""
    sizes, strides, padding = window
    start, reduce = (-jnp.inf, lax.max) if op == "max" else (jnp.inf, lax.min)

    def gradient(x: Any) -> Any:
        pooled, back = jax.vjp(lambda x: lax.reduce_window(x, dtype.type(start), reduce, sizes, strides, padding), x)
        seeds = np.random.default_rng(1).normal(size=pooled.shape)
        return back(jnp.asarray(seeds, dtype))[0]

    return gradient


def operand(kind: str, dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 8, 3))
    if kind == "ties":
        x = rng.integers(0, 2, size=x.shape).astype(float)
    elif kind == "strange":
        x = rng.choice([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], size=x.shape)
    return jnp.asarray(x, dtype)


def chooses(jaxpr: Any) -> bool:
    return contains(jaxpr, lambda e: e.primitive.name == "select_and_scatter_add")


@pytest.mark.parametrize(
    ("name", "op", "dtype"),
    [
        *(pytest.param(name, "max", "float32", marks=[] if name in QUICK else pytest.mark.soak) for name in POOLS),
        ("overlap", "min", "float32"),
        ("a remainder", "max", "bfloat16"),
    ],
)
def test_the_gradient_of_pooling_is_the_same(name: str, op: str, dtype: str) -> None:
    fn = pooling(op, POOLS[name], jnp.dtype(dtype))
    ours = PASS.applied_to(fn)
    operands = [operand(kind, dtype) for kind in ("numbers", "ties", "strange")]
    assert chooses(jax.make_jaxpr(fn)(operands[0]).jaxpr)
    assert not chooses(jax.make_jaxpr(ours)(operands[0]).jaxpr)
    first, second = jax.jit(ours), jax.jit(fn)
    for x in operands:
        np.testing.assert_array_equal(first(x), second(x))


def test_large_windows_and_narrow_floats_are_left_alone() -> None:
    for window, dtype in ((LARGE, "float32"), (POOLS["2x2"], "float8_e5m2")):
        fn, x = pooling("max", window, jnp.dtype(dtype)), operand("numbers", dtype)
        assert chooses(jax.make_jaxpr(PASS.applied_to(fn))(x).jaxpr)


@pytest.mark.parametrize("shape", [(2, 1, 1, 3), (2, 1, 8, 3), (0, 7, 8, 3)])
def test_operands_without_a_window_have_a_gradient_of_zeros(shape: tuple[int, ...]) -> None:
    fn = pooling("max", POOLS["2x2"], jnp.dtype("float32"))
    np.testing.assert_array_equal(jax.jit(PASS.applied_to(fn))(jnp.ones(shape)), np.zeros(shape))


# --- convolutions ---------------------------------------------------------------------------------------


def gradients(x: Any, kernel: Any) -> Any:
    """By both operands of a convolution, whose dims are in an order that is slow on CPUs."""

    def loss(x: Any, kernel: Any) -> Any:
        strides = (1,) * (x.ndim - 2)
        return jnp.sin(lax.conv(jnp.sin(x), kernel, strides, "SAME")).sum()

    return jax.grad(loss, (0, 1))(x, kernel)


def in_a_loop(x: Any, kernel: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        dx, dkernel = gradients(*carry)
        return (x + 0.1 * dx, kernel + 0.1 * dkernel), None

    return lax.scan(turn, (x, kernel), None, length=2)[0]


def in_a_branch(x: Any, kernel: Any) -> Any:
    return lax.cond(x.sum() < 1e9, gradients, lambda x, kernel: (x, kernel), x, kernel)


SLOW = "bf01_oi01"


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        pytest.param(gradients, (2, 3, 9, 8), marks=pytest.mark.soak),
        (in_a_branch, (2, 3, 9, 8)),
        (in_a_loop, (2, 3, 7)),
        pytest.param(in_a_loop, (2, 3, 9, 8), marks=pytest.mark.soak),
        pytest.param(in_a_loop, (2, 3, 4, 5, 6), marks=pytest.mark.soak),
    ],
)
def test_convolutions_have_the_fast_order_wherever_they_are(fn: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), "float32")
    kernel = jnp.asarray(rng.normal(size=(4, 3, *[3] * (len(shape) - 2))), "float32")
    ours = jax.jit(PASS.applied_to(fn))
    for found, expected in zip(ours(x, kernel), jax.jit(fn)(x, kernel), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert orders(ours.lower(x, kernel).as_text(dialect="hlo")) == {fast(len(shape) - 2)}


def orders(text: str) -> set[str]:
    """The orders of dims of a program's convolutions."""
    return set(re.findall(r"dim_labels=(\S+?)[,\s]", text))


def fast(dims: int) -> str:
    space = "012"[:dims]
    return f"b{space}f_{space}io->b{space}f"


@pytest.mark.parametrize("groups", [{"feature_group_count": 2}, {"batch_group_count": 2}])
def test_groups_and_dilation_stay(groups: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), "float32") for shape in ((4, 4, 9, 8), (6, 4, 3, 2)))
    kernel = kernel[:, : 4 // groups.get("feature_group_count", 1)]

    def fn(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (2, 1), ((1, 2), (0, 3)), (1, 2), (2, 1), **groups)

    np.testing.assert_allclose(PASS.applied_to(fn)(x, kernel), fn(x, kernel), rtol=1e-5, atol=1e-5)


# --- in programs of a strategy --------------------------------------------------------------------------


def training(strategy: replicax.Strategy) -> tuple[Any, list[replicax.Variable]]:
    """A step of a CNN with max-pooling, and its variables."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        kernels = [
            replicax.Variable(rng.normal(size=shape).astype(np.float32) / 4) for shape in ((3, 3, 2, 4), (3, 3, 4, 3))
        ]

    def loss_fn(x: Any) -> Any:
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel.value, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = lax.reduce_window(jnp.tanh(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return replicax.compute_average_loss(jnp.square(x).sum((1, 2, 3)))

    def step(x: Any) -> None:
        _, gradients = replicax.value_and_grad(lambda: loss_fn(x), kernels)()
        context = replicax.get_replica_context()
        for kernel, gradient in zip(kernels, context.all_reduce("sum", gradients), strict=True):
            kernel.assign_sub(0.1 * gradient)

    return step, kernels


IMAGES = np.random.default_rng(1).normal(size=(8, 8, 12, 2)).astype(np.float32)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy_of(1), id="1", marks=pytest.mark.soak),
        pytest.param(strategy_of(2), id="2", marks=pytest.mark.soak),
        pytest.param(shared_strategy(4, 2), id="4 on 2"),
    ],
)
def test_training_is_that_of_plain_jax(strategy: replicax.Strategy) -> None:
    step, kernels = training(strategy)
    [batch] = strategy.distribute_dataset([IMAGES])
    values = [jnp.asarray(k.numpy()) for k in kernels]

    @jax.jit
    @jax.grad
    def gradients(values: Any) -> Any:
        x = jnp.asarray(IMAGES)
        for kernel in values:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = lax.reduce_window(jnp.tanh(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.square(x).sum((1, 2, 3)).mean()

    for _ in range(4):
        values = [v - 0.1 * g for v, g in zip(values, gradients(values), strict=True)]
    strategy.run(step, args=(batch,))
    strategy.run_steps(lambda ctx, x: step(x), iter(strategy.distribute_dataset([IMAGES] * 3)), 3)
    for kernel, value in zip(kernels, values, strict=True):
        np.testing.assert_allclose(kernel.numpy(), value, rtol=1e-5, atol=1e-6)


def test_a_step_and_a_loop_of_steps_have_convolutions_in_the_fast_order_and_no_search_in_windows() -> None:
    step, _ = training(strategy := strategy_of(2))
    [batch] = strategy.distribute_dataset([IMAGES])
    program = strategy.extended.trace(step, args=(batch,))
    assert chooses(program.program.jaxpr)
    for executable in (program, program.repeated(3)):
        text = executable.compiled_text()
        assert orders(text) == {fast(2)}
        assert "select-and-scatter" not in text


@pytest.mark.parametrize(
    ("fn", "in_a_loop", "rules"),
    [
        (gradients, False, []),
        (gradients, True, [Convolutions]),
        (in_a_branch, False, [Convolutions]),
        (in_a_loop, False, [Convolutions]),
        (lambda x, kernel: in_a_loop(jnp.sin(x), jnp.sin(kernel))[0] @ jnp.ones((8, 8)), False, [Convolutions]),
        (lambda x, kernel: lax.scan(lambda c, _: (c * 2, None), x, None, 3)[0], True, []),
        (lambda x, kernel: pooling("max", POOLS["2x2"], jnp.dtype("float32"))(x), False, [PoolingGradients]),
        (lambda x, kernel: pooling("max", LARGE, jnp.dtype("float32"))(x), True, []),
    ],
)
def test_a_program_is_gone_through_only_for_what_the_compiler_is_slow_at(fn: Any, in_a_loop: bool, rules: Any) -> None:
    program = jax.make_jaxpr(fn)(jnp.ones((2, 3, 9, 8)), jnp.ones((3, 3, 3, 3))).jaxpr
    found = rules_for(program, in_a_loop=in_a_loop, split=False, in_order=False)
    assert [type(rule) for rule in found] == rules
    found = rules_for(program, in_a_loop=in_a_loop, split=True, in_order=False)
    assert [type(rule) for rule in found] == [rule for rule in rules if rule is Convolutions]


@pytest.mark.parametrize(
    ("sizes", "options", "rules"),
    [
        ((3, 5), None, [SmallSums]),
        ((3, 100_000, 5), None, [SmallSums]),
        ((3, 100_000), None, []),
        ((3, 5), replicax.CommunicationOptions(bytes_per_pack=16), []),
        ((3, 5), replicax.CommunicationOptions(implementation="ring"), []),
    ],
)
def test_small_sums_are_packed_unless_options_tell_how(pair: Any, sizes: Any, options: Any, rules: Any) -> None:
    def step(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", x, options)

    program = pair.extended.trace(step, args=([np.ones(n, np.float32) for n in sizes],)).program.jaxpr
    found = rules_for(program, in_a_loop=False, split=False, in_order=False)
    assert [type(rule) for rule in found] == rules


@pytest.mark.parametrize("number", [1.0, np.int32(4), np.float32(0), np.complex64(2j)])
def test_numbers_are_summed_together_with_arrays(pair: Any, number: Any) -> None:
    def step(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", [x, number, number, x.astype(jnp.result_type(number))])

    total, *numbers, other = pair.run(step, args=(np.arange(3, dtype=np.float32),))
    np.testing.assert_array_equal([total, other.real], [[0, 2, 4]] * 2)
    assert numbers == [2 * number] * 2


def test_a_function_that_is_called_often_is_still_one_to_the_compiler() -> None:
    @jax.jit
    def block(x: Any, kernel: Any) -> Any:
        return jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    def loss(kernel: Any, x: Any) -> Any:
        for _ in range(10):
            x = block(x, kernel)
        return jnp.square(x).sum()

    kernel, x = jnp.full((3, 3, 2, 2), 0.1), jnp.ones((1, 6, 6, 2))
    plain = jax.jit(jax.grad(loss)).lower(kernel, x).as_text()
    ours = jax.jit(PASS.applied_to(jax.grad(loss))).lower(kernel, x).as_text()
    assert ours.count("stablehlo.convolution") == plain.count("stablehlo.convolution")
