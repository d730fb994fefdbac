"""Gradients of convolutions by their filters are said in ways that XLA on CPUs is quick at, with the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicax._jax import contains
from replicax.execution.backends.cpu import CPU
from replicax.execution.backends.cpu.filter_gradients import MOST_PARTS
from replicax.execution.backends.cpu.narrow_floats import NarrowSums
from replicax.execution.backends.cpu.products import Convolutions, FilterGradients
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting

PASS = Rewriting([FilterGradients(), Convolutions()])
LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")

# Images, channels of the operand and of the result, the filter, and how; then what the gradient becomes.
CASES: dict[str, tuple[tuple[int, int, int, int], tuple[int, int], dict[str, Any], str | int]] = {
    "one channel": ((8, 32, 1, 16), (3, 3), {}, "product"),
    "channels first": ((8, 32, 1, 16), (3, 3), {"dimension_numbers": FIRST}, "product"),
    "strides": ((9, 33, 3, 40), (3, 3), {"window_strides": (2, 1)}, "product"),
    "strides and padding": ((9, 41, 3, 64), (3, 3), {"window_strides": (2, 3), "padding": ((2, 0), (0, 3))}, "product"),
    "holes": ((9, 33, 2, 16), (3, 2), {"rhs_dilation": (2, 3)}, "product"),
    "cut off": ((9, 32, 2, 16), (2, 3), {"padding": ((-1, 0), (0, -2))}, "product"),
    "a filter of one element": ((8, 24, 64, 16), (1, 1), {}, "product"),
    "one element, strides": ((8, 48, 64, 16), (1, 1), {"window_strides": (2, 2)}, "product"),
    "parts": ((16, 24, 16, 32), (3, 3), {}, 3),
    "parts, channels first": ((16, 24, 16, 32), (3, 3), {"dimension_numbers": FIRST}, 3),
    "parts of unlike sizes": ((17, 48, 16, 32), (3, 3), {"window_strides": (2, 2)}, 3),
    "few examples": ((2, 96, 16, 32), (3, 3), {}, 2),
    "as many parts as there may be": ((20, 64, 16, 32), (3, 3), {}, MOST_PARTS),
    "holes and parts": ((16, 28, 16, 32), (3, 3), {"rhs_dilation": (2, 2), "padding": "SAME"}, 4),
}


def gradient(name: str, *, in_a_loop: bool = False) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """The gradient of a loss by a filter, as a function of images and filter; and such."""
    (images, size, inputs, outputs), filter_size, how, _ = CASES[name]
    how = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAST, **how}
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, size, size, inputs)).astype(np.float32)
    kernel = rng.normal(size=(*filter_size, inputs, outputs)).astype(np.float32)
    if how["dimension_numbers"] is FIRST:
        x, kernel = x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)

    def by_filter(x: Any, kernel: Any) -> Any:
        return jax.grad(lambda k: jnp.sin(lax.conv_general_dilated(x, k, **how)).sum())(kernel)

    def looped(x: Any, kernel: Any) -> Any:
        return lax.scan(lambda k, _: (k - 1e-3 * by_filter(x, k), None), kernel, None, length=2)[0]

    return looped if in_a_loop else by_filter, (jnp.asarray(x), jnp.asarray(kernel))


def counted(jaxpr: Any) -> dict[str, int]:
    """How many products and convolutions a program has."""
    found = {"dot_general": 0, "conv_general_dilated": 0}

    def note(equation: Any) -> bool:
        if equation.primitive.name in found:
            found[equation.primitive.name] += 1
        return False

    contains(jaxpr, note)
    return found


@pytest.mark.parametrize(
    ("name", "in_a_loop"),
    [*((name, False) for name in CASES), *((name, True) for name in ("one channel", "parts, channels first"))],
)
def test_the_gradient_is_the_same_number_computed_in_another_way(name: str, in_a_loop: bool) -> None:
    fn, operands = gradient(name, in_a_loop=in_a_loop)
    ours = PASS.applied_to(fn)
    expected = jax.jit(fn)(*operands)
    np.testing.assert_allclose(jax.jit(ours)(*operands), expected, rtol=1e-4, atol=1e-5 * float(abs(expected).max()))
    before, after = (counted(jax.make_jaxpr(f)(*operands).jaxpr) for f in (fn, ours))
    becomes = CASES[name][-1]
    assert before == {"dot_general": 0, "conv_general_dilated": 2}
    if becomes == "product":
        assert after == {"dot_general": 1, "conv_general_dilated": 1}
    else:
        assert after == {"dot_general": 0, "conv_general_dilated": 1 + becomes}


def program(shape: Any, kernel: Any, dtype: str = "float32", **how: Any) -> Any:
    how = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAST, **how}
    x, k = jnp.ones(shape, dtype), jnp.ones(kernel, dtype)
    by_filter = jax.grad(lambda k, x: lax.conv_general_dilated(x, k, **how).astype("float32").sum())
    return jax.make_jaxpr(by_filter)(k, x).jaxpr


HOLES = {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}


@pytest.mark.parametrize(
    ("shape", "kernel", "how"),
    [
        pytest.param((2, 16, 16, 1), (3, 3, 1, 8), {}, id="small"),
        pytest.param((8, 16, 16, 32), (3, 3, 32, 64), {}, id="not larger than two parts"),
        pytest.param((8, 16, 16, 256), (3, 3, 256, 256), {}, id="a filter that is as large as the images"),
        pytest.param((8, 32, 32, 4), (3, 3, 1, 16), {"feature_group_count": 4}, id="groups of channels"),
        pytest.param((8, 32, 32, 1), (3, 3, 1, 16), {"batch_group_count": 4}, id="groups of examples"),
        pytest.param(
            (8, 32, 32, 1),
            (3, 3, 1, 16),
            {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))},
            id="holes in the images",
        ),
        pytest.param((8, 32, 32, 1), (3, 3, 1, 16), {"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param((0, 32, 32, 1), (3, 3, 1, 16), {}, id="no images"),
    ],
)
def test_other_gradients_are_left_alone(shape: Any, kernel: Any, how: Any) -> None:
    rules = CPU().rules(program(shape, kernel, **how), Target())
    assert not any(isinstance(rule, FilterGradients) for rule in rules)


def test_convolutions_themselves_are_left_alone_however_large() -> None:
    def fn(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=LAST)

    for shape, kernel in (((64, 32, 32, 32), (3, 3, 32, 64)), ((1, 64, 64, 16), (3, 3, 16, 4096))):
        traced = jax.make_jaxpr(fn)(jnp.ones(shape), jnp.ones(kernel)).jaxpr
        assert not CPU().rules(traced, Target(False, False, False, False))


def test_sums_in_order_and_splits_of_the_compiler_leave_them_alone() -> None:
    traced = program((8, 32, 32, 1), (3, 3, 1, 16))
    assert [type(rule) for rule in CPU().rules(traced, Target(False, False, False, False))] == [FilterGradients]
    assert [type(rule) for rule in CPU().rules(traced, Target(False, True, False, False))] == [NarrowSums]
    assert CPU().rules(traced, Target(False, False, False, True)) == []
