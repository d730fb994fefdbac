"""The gradient of max-pooling as elementwise operations.

XLA's CPU backend makes it a loop over windows and the elements of each (``select-and-scatter``). Here it becomes
elementwise operations: which element each window chooses, by the same comparisons in the same order, so that of equal
ones it is the same; and for each element the sum of what windows hand to it, in the order of the windows. So the bits
are the same, but for the sign of zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.operation_params import PoolingWindows, pooling_windows
from replicax._jax.primitive_families import POOLING_GRADIENTS
from replicax.backends.cpu.apart import kept
from replicax.backends.cpu.rule import CPURule
from replicax.execution.compiled.program_rewriting import Rewriting

LARGEST_WINDOW = 16
"""Elements of a window, or from one to the next: each is a slice of its own in the compiled program."""


class PoolingGradients(CPURule):
    """The gradients of max-pooling."""

    keeps_order = True

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in POOLING_GRADIENTS and _is_simple(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return [_pooling_gradient(pooling_windows(equation.params), *operands)]


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
    number = _chosen_number([_at(place, padded, count, windows.strides) for place in places], windows.largest)

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
    """Add a dim of size 1 behind each dim."""
    return lax.reshape(array, [n for size in array.shape for n in (size, 1)])


def _numbers(steps: Sequence[int], windows: PoolingWindows) -> Any:
    """The numbers of the places of a window that are ``steps`` strides from its beginning, by what is left over.

    Where there is no such place, a number that none has.
    """
    number, exist = jnp.int8(0), jnp.bool_(True)
    shape = [n for stride in windows.strides for n in (1, stride)]
    for dim, (size, stride) in enumerate(zip(windows.sizes, windows.strides, strict=True)):
        place = lax.broadcasted_iota(jnp.int8, shape, 2 * dim + 1) + jnp.int8(steps[dim] * stride)
        number, exist = number * jnp.int8(size) + place, exist & (place < size)
    return jnp.where(exist, number, -2)


def _at(place: Sequence[int], padded: Any, count: Sequence[int], strides: Sequence[int]) -> Any:
    """The element at this place of each window."""
    ends = [p + (n - 1) * s + 1 for p, n, s in zip(place, count, strides, strict=True)]
    return lax.slice(padded, place, ends, strides)


def _chosen_number(elements: Sequence[Any], largest: bool) -> Any:
    """The number of the element that each window chooses."""
    chosen, *others = elements
    number = jnp.zeros(chosen.shape, jnp.int8)
    for i, other in enumerate(others, 1):
        stay = lax.ge(chosen, other) if largest else lax.le(chosen, other)
        chosen, number = lax.select(stay, chosen, other), lax.select(stay, number, lax.full_like(number, i))
    return kept(number)  # or the compiler finds it out anew for each element of the result
