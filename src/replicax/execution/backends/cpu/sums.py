"""Sums over elements of arrays with many dims, and sums of many small arrays over the replicas.

A sum over elements of an array with more than four dims, as attention's gradient has it, takes many times as long as of
one with fewer, if XLA's CPU backend merges it with the product that it sums up. So its operand gets as few dims as it
can have.

An all-reduce takes time for each array there (16.7 ms for 100 arrays of 4 KiB on 8 devices, and 2.7 ms when they are
packed into one). Copying large arrays costs more than that saves. Measured by ``benchmarks/packing.py``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.operation_params import dims_along
from replicax._jax.primitive_families import SUMS
from replicax.collectives import PACK_LIMIT, all_reduce_p, packs
from replicax.communication import CommunicationImplementation, CommunicationOptions
from replicax.execution.backends.cpu.apart import cut_alike, kept
from replicax.execution.backends.cpu.rule import CPURule
from replicax.execution.compiled.program_rewriting import Rewriting

MOST_DIMS = 4
"""With more dims than that, sums of products take many times as long."""

FEWEST_SUMMED = 1024
"""Elements of an operand that is worth another shape."""


class Sums(CPURule):
    """Sums over elements of arrays with many dims."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in SUMS and _has_many_dims(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            sizes, summed = _merged_dims(equation)
            # In memory, or the compiler merged the sum with what computes the operand, many dims and all.
            operand = kept(lax.reshape(operands[0], sizes))
            return [lax.reshape(jnp.sum(operand, summed), getattr(equation.outvars[0].aval, "shape", ()))]


class SmallSums(CPURule):
    """Sums over the replicas of many small arrays, which are packed."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        if equation.primitive is not all_reduce_p or equation.params["in_order"]:
            return False
        options = equation.params["options"] or CommunicationOptions()
        is_plain = not options.bytes_per_pack and options.implementation is not CommunicationImplementation.RING
        return is_plain and bool(packs([v.aval for v in equation.invars], PACK_LIMIT)[0])

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        groups, whole = packs(operands, PACK_LIMIT)
        buffers = [jnp.concatenate([operands[i].reshape(-1) for i in members]) for members in groups]
        totals = all_reduce_p.bind(*buffers, *(operands[i] for i in whole), **equation.params)
        results = dict(zip(whole, totals[len(groups) :], strict=True))
        for members, total in zip(groups, totals, strict=False):
            results.update(zip(members, cut_alike(total, [operands[i].shape for i in members]), strict=True))
        return [results[i] for i in range(len(operands))]


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
