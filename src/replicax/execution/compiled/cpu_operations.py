"""Operations that XLA on CPUs is slow at, said in another way, with the same results.

The gradient of max-pooling is a loop there, over windows and the elements of each (``select-and-scatter``). It becomes
elementwise operations: which element each window chooses, by the same comparisons in the same order, so that of equal
ones it is the same; and for each element the sum of what windows hand to it, in the order of the windows. So the bits
are the same, but for the sign of zeros.

Pooling itself reads an array from memory there. With windows side by side it is elementwise operations of their
elements, which the compiler merges with what computes the array.

Convolutions are fast in one order of their dims. XLA brings them into it, but only at the top of a program. In a branch
or a loop, of which ``run_steps`` is one, a gradient by the filter takes many times as long
(``python -m benchmarks.peers --problems cnn``: JAX by hand in a scan). So their order is made here.

The gradient of a matrix product by a weight sums over examples, the first dims of both operands. XLA has its fast code
for products over a last and a first dim, and does not get there by itself. So the smaller operand is turned around
here. The order in which such a product is added up is another one then. So it is with the gradients of convolutions by
their filters; what becomes of them is in ``_jax/cpu/filter_gradients.py``.

A sum over elements of an array with more than four dims, as attention's gradient has it, takes many times as long as of
one with fewer, if the compiler merges it with the product that it sums up. So its operand gets as few dims as it can
have.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.contractions import (
    bind_in_fast_order,
    bind_over_inner_dims,
    is_in_fast_order,
    is_slow_over_examples,
)
from replicax._jax.cpu.apart import kept
from replicax._jax.cpu.filter_gradients import bind_by_filter, is_slow_by_filter
from replicax._jax.operation_params import PoolingWindows, dims_along, pooling_windows, windows_side_by_side
from replicax._jax.primitive_families import (
    CONTROL_FLOW,
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    MAX_POOLING,
    MIN_POOLING,
    POOLING_GRADIENTS,
    SUMS,
)
from replicax.execution.compiled.program_rewriting import Rewriting, Rule

MOST_DIMS = 4
"""With more dims than that, sums of products take many times as long."""

FEWEST_SUMMED = 1024
"""Elements of an operand that is worth another shape."""

LARGEST_WINDOW = 16
"""Elements of a window, or from one to the next: each is a slice of its own in the compiled program."""


class PoolingGradients(Rule):
    """The gradients of max-pooling. Not for a program in which the compiler decides how values are split."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in POOLING_GRADIENTS and _is_simple(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return [_pooling_gradient(pooling_windows(equation.params), *operands)]


class Pooling(Rule):
    """Pooling with windows side by side. Not for a program in which the compiler decides how values are split."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        if equation.primitive.name not in MAX_POOLING | MIN_POOLING:
            return False
        sizes = windows_side_by_side(equation.params)
        result: Any = equation.outvars[0].aval
        return sizes is not None and math.prod(sizes) <= LARGEST_WINDOW and result.size > 0

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        sizes = windows_side_by_side(equation.params) or ()
        count = getattr(equation.outvars[0].aval, "shape", ())
        better = lax.max if equation.primitive.name in MAX_POOLING else lax.min
        with _jax.from_line_of(equation):
            places = itertools.product(*map(range, sizes))
            return [functools.reduce(better, [_at(place, operands[0], count, sizes) for place in places])]


class Convolutions(Rule):
    """The order of dims of convolutions."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONVOLUTIONS and not is_in_fast_order(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_in_fast_order(equation, operands)


class WeightGradients(Rule):
    """The gradients of matrix products by weights. Not for a program whose values the compiler may split."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in MATRIX_PRODUCTS and is_slow_over_examples(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_over_inner_dims(equation, operands)


class FilterGradients(Rule):
    """The gradients of convolutions by their filters. Not for a program whose values the compiler may split."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONVOLUTIONS and is_slow_by_filter(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_by_filter(equation, operands)


class Sums(Rule):
    """Sums over elements of arrays with many dims. Not for a program whose values the compiler may split."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in SUMS and _has_many_dims(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            sizes, summed = _merged_dims(equation)
            # In memory, or the compiler merged the sum with what computes the operand, many dims and all.
            operand = kept(lax.reshape(operands[0], sizes))
            return [lax.reshape(jnp.sum(operand, summed), getattr(equation.outvars[0].aval, "shape", ()))]


def rules_for(jaxpr: _jax.Jaxpr, *, in_a_loop: bool, split: bool, in_order: bool) -> list[Rule]:
    """Those that have something to do in a program: the others need not look for it.

    Args:
      jaxpr: the program.
      in_a_loop: whether it will be in a loop or a branch as a whole.
      split: whether the compiler decides how values are split over devices.
      in_order: whether sums have to be taken in an order that does not depend on where a replica is.
    """
    convolutions = Convolutions()

    def is_inside(equation: _jax.Equation) -> bool:
        inner = _jax.sub_jaxprs(equation) if equation.primitive.name in CONTROL_FLOW else []
        return any(_jax.contains(program, convolutions.is_ours) for program in inner)

    wanted: list[tuple[Rule, Callable[[_jax.Equation], bool]]] = []
    if not split:
        wanted += [(rule, rule.is_ours) for rule in (Pooling(), PoolingGradients())]
        if not in_order:
            wanted += [(rule, rule.is_ours) for rule in (WeightGradients(), FilterGradients(), Sums())]
    wanted.append((convolutions, convolutions.is_ours if in_a_loop else is_inside))
    return [rule for rule, is_wanted in wanted if _jax.contains(jaxpr, is_wanted)]


def _has_many_dims(equation: _jax.Equation) -> bool:
    operand: Any = equation.invars[0].aval
    return (
        operand.ndim > MOST_DIMS
        and operand.size >= FEWEST_SUMMED
        and operand.dtype == jnp.float32
        and len(_merged_dims(equation)[0]) <= MOST_DIMS
    )


def _merged_dims(equation: _jax.Equation) -> tuple[list[int], list[int]]:
    """The shape of a sum's operand with as few dims as it can have, and which of them it sums over."""
    operand: Any = equation.invars[0].aval
    summed = dims_along(equation.params, operand.ndim)
    sides = [(d in summed, size) for d, size in enumerate(operand.shape) if size != 1]
    runs = [(side, math.prod(size for _, size in run)) for side, run in itertools.groupby(sides, lambda pair: pair[0])]
    return [size for _, size in runs], [i for i, (side, _) in enumerate(runs) if side]


def _is_simple(equation: _jax.Equation) -> bool:
    cotangent: Any = equation.invars[0].aval
    operand: Any = equation.invars[1].aval
    has_infinities = jnp.issubdtype(operand.dtype, jnp.floating) and operand.dtype.itemsize > 1
    has_windows = cotangent.size > 0  # an image that is smaller than a window has none
    windows = pooling_windows(equation.params)
    is_small = max(math.prod(windows.sizes), math.prod(windows.strides)) <= LARGEST_WINDOW
    return has_infinities and has_windows and is_small


def _pooling_gradient(windows: PoolingWindows, cotangent: Any, operand: Any) -> Any:
    """For each element of the operand the sum of the cotangents of the windows that have chosen it."""
    count = cotangent.shape
    lowest = operand.dtype.type(-math.inf if windows.largest else math.inf)
    padded = lax.pad(operand, lowest, [(before, after, 0) for before, after in windows.padding])
    places = list(itertools.product(*map(range, windows.sizes)))
    number = _chosen([_at(place, padded, count, windows.strides) for place in places], windows.largest)

    # Elements are a number of strides apart, or have nothing to do with each other. A place of a window is a number of
    # strides, and what is left over, for which there is a dim of its own.
    extents = list(map(_ceil, padded.shape, windows.strides))
    whole: Any = None
    for steps in reversed(list(itertools.product(*map(range, map(_ceil, windows.sizes, windows.strides))))):
        around = [(before, e - before - n, 0) for before, e, n in zip(steps, extents, count, strict=True)]
        numbers = _beside(lax.pad(number, number.dtype.type(-1), around))
        handed = _beside(lax.pad(cotangent, cotangent.dtype.type(0), around))
        part = jnp.where(numbers == _numbers(steps, windows), handed, 0)
        whole = part if whole is None else whole + part  # the last steps belong to the first window
    whole = lax.reshape(whole, [e * stride for e, stride in zip(extents, windows.strides, strict=True)])
    around = [
        (-before, before + size - n, 0)
        for (before, _), size, n in zip(windows.padding, operand.shape, whole.shape, strict=True)
    ]
    return lax.pad(whole, whole.dtype.type(0), around)


def _ceil(size: int, stride: int) -> int:
    return -(-size // stride)


def _beside(array: Any) -> Any:
    """With a dim of size 1 behind each dim."""
    return lax.reshape(array, [n for size in array.shape for n in (size, 1)])


def _numbers(steps: Sequence[int], windows: PoolingWindows) -> Any:
    """What the places of a window are called that are so many strides from its begin, by what is left over.

    Where there is no such place, it is a name that none has.
    """
    found, exist = jnp.int8(0), jnp.bool_(True)
    shape = [n for stride in windows.strides for n in (1, stride)]
    for dim, (size, stride) in enumerate(zip(windows.sizes, windows.strides, strict=True)):
        place = lax.broadcasted_iota(jnp.int8, shape, 2 * dim + 1) + jnp.int8(steps[dim] * stride)
        found, exist = found * jnp.int8(size) + place, exist & (place < size)
    return jnp.where(exist, found, -2)


def _at(place: Sequence[int], padded: Any, count: Sequence[int], strides: Sequence[int]) -> Any:
    """The element at this place of each window."""
    ends = [p + (n - 1) * s + 1 for p, n, s in zip(place, count, strides, strict=True)]
    return lax.slice(padded, place, ends, strides)


def _chosen(elements: Sequence[Any], largest: bool) -> Any:
    """Which of its elements each window chooses."""
    chosen, *others = elements
    number = jnp.zeros(chosen.shape, jnp.int8)
    for i, other in enumerate(others, 1):
        stay = lax.ge(chosen, other) if largest else lax.le(chosen, other)
        chosen, number = lax.select(stay, chosen, other), lax.select(stay, number, lax.full_like(number, i))
    return kept(number)  # or the compiler finds it out anew for each element of the result
