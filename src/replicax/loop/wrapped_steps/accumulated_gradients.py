"""Checks of a step whose gradients are accumulated: the loss is a share, and an optimizer gets its gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from replicax import _jax
from replicax._jax.operation_params import dims_along
from replicax._jax.primitive_families import (
    ADDITIONS,
    ALIKE_ALONG_AXIS,
    BROADCASTS,
    CASTS,
    DIFFERENCES,
    MATRIX_PRODUCTS,
    NEGATIONS,
    NONLINEAR_FUNCTIONS,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    SLICES,
    SQUEEZES,
    SUMS,
    UNSTACKS,
)
from replicax.collectives import all_reduce_p, alone_p, share_back_p, share_p
from replicax.errors import ShareWarning, TraceError, warn
from replicax.execution.program.dataflow import Control, Dataflow, Found


def check_loss(
    name: str,
    jaxpr: _jax.Jaxpr,
    gradients: Sequence[Any],
    new: Sequence[Any],
    old: Sequence[Any],
    sums: Sequence[str | None],
) -> None:
    """Raise a ValueError if the gradients of micro-batches would not add up, and warn of numbers that do not.

    ``jaxpr`` is the step on one micro-batch; of its results an optimizer takes ``gradients``, ``new`` are new values of
    variables and of arrays in objects, and ``old`` those before. The first results are numbers that are returned:
    ``sums`` has the names of those that are added up.
    """
    differentiates = _jax.contains(jaxpr, lambda equation: equation.primitive is share_back_p)
    if not gradients and (differentiates or _descends(jaxpr, new, old)):
        raise ValueError(
            f"{name}: the step differentiates its loss, and calls no apply_gradients (of a replicax.Optimizer) or "
            "update (of an nnx.Optimizer), which add up the gradients of micro-batches. Its own update would be one "
            "for each micro-batch, with a part of the gradient: update with an optimizer."
        )
    if gradients and not any(map(makes_share, jaxpr.eqns)):
        raise ValueError(
            f"{name}: the gradients of micro-batches are added up, so the loss must be each one's share of the mean "
            "over the whole batch: end it with replicax.compute_average_loss(losses). (A mean of a micro-batch would "
            "count once for each of them.)"
        )
    if gradients:
        ratios = _Ratios(name)
        facts = ratios.run(jaxpr, [_OF_BATCH | _OWN] * len(jaxpr.invars), final=True)[0]
        if any(fact & _DIVIDED and v in gradients for v, fact in zip(jaxpr.outvars, facts, strict=True)):
            raise ValueError(f"{name}: the gradients{ratios.divided_at} are divided {_CURES}")
        for number, fact in zip(sums, facts, strict=False):
            if number is not None and fact & (_OWN | _NONLINEAR) == _NONLINEAR:
                warn(
                    f"{name} returns {number!r}, a nonlinear function of sums over the replicas, such as a norm, and "
                    "returned numbers are added up over the micro-batches. Return the sums, and compute it from what "
                    f"is logged; or for the mean of the micro-batches' pass train(reduce={{{number!r}: 'mean'}}).",
                    ShareWarning,
                )


def makes_share(equation: _jax.Equation) -> bool:
    """Return whether an equation, or one in the programs inside, makes a share."""
    return _jax.is_or_contains(equation, lambda e: e.primitive is share_p)


def _descends(jaxpr: _jax.Jaxpr, new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Return whether a new value is computed from a derivative that depends on the old one, as in gradient descent."""
    program = _jax.opened(jaxpr.replace(outvars=[*new, *old]))
    found, _ = _Derivatives((0, 0)).run(program, [(1 << i, 0) for i in range(len(program.invars))], final=True)
    return any(derived & before for (_, derived), (before, _) in zip(found[: len(new)], found[len(new) :], strict=True))


class _Derivatives(Dataflow[tuple[int, int]]):
    """The fact on a value is which inputs it depends on, and which of them by a derivative, as bits."""

    def join(self, facts: Iterable[tuple[int, int]]) -> tuple[int, int]:
        inputs = derived = 0
        for more_inputs, more_derived in facts:
            inputs, derived = inputs | more_inputs, derived | more_derived
        return inputs, derived

    def equation(
        self, equation: _jax.Equation, facts: list[tuple[int, int]], control: Control, final: bool
    ) -> Found[tuple[int, int]]:
        if not _jax.is_backward(equation):
            return super().equation(equation, facts, control, final)
        inputs, derived = self.join(facts)
        return [(inputs, inputs | derived)] * len(equation.outvars), facts

    def operation(
        self, equation: _jax.Equation, facts: list[tuple[int, int]], control: Control, final: bool
    ) -> Found[tuple[int, int]]:
        fact = self.join(facts)
        return [fact] * len(equation.outvars), [fact] * len(facts)


_OF_BATCH, _SUMMED, _RATIO, _VARIED, _DERIVED, _DIVIDED, _OWN, _NONLINEAR = (1 << i for i in range(8))
_CURES = (
    "by a sum over one micro-batch, such as the number of its tokens. The gradients of micro-batches are added up, so "
    "divide the loss by the sum over the whole batch. Give each example that number, as an array of the batch, and "
    "divide by its first: compute_average_loss(losses, global_batch_size=batch['tokens'][0]). Or have "
    "several replicas on a device in place of micro-batches (num_replicas= of the strategy): they count together."
)


class _Ratios(Dataflow[int]):
    """Raise a ValueError for a share that is divided by a sum over a micro-batch, such as the number of its tokens.

    The fact on a value is, as bits: whether it depends on the examples; on a sum over them, or over the replicas;
    whether it is a number divided by such a sum; whether its elements may differ; whether it is computed from a
    derivative; whether it is one that was divided by such a sum; whether it depends on this replica's own examples; and
    whether it is a nonlinear function of what all replicas have combined.
    """

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self._name = name
        self.divided_at = ""  # where a derivative was

    def join(self, facts: Iterable[int]) -> int:
        return functools.reduce(operator.or_, facts, 0)

    def sliced(self, facts: list[int]) -> list[int]:
        return [0] * len(facts)  # an iteration may have a single example, and sums over what belongs to it

    def operation(self, equation: _jax.Equation, facts: list[int], control: Control, final: bool) -> Found[int]:
        name, fact = equation.primitive.name, self.join(facts)
        if final and equation.primitive is share_p and fact & _RATIO and not equation.params.get("of_each", False):
            raise ValueError(f"{self._name}: the loss at {_jax.source_line(equation)} is divided {_CURES}")
        shapes, operands = ([getattr(v.aval, "shape", ()) for v in vs] for vs in (equation.outvars, equation.invars))
        is_number = not any(shapes)
        spreads = name in _SPREADING
        if not spreads and not (is_number and name in _LINEAR):
            fact &= ~_RATIO
        if not spreads and name not in _LINEAR:
            fact &= ~_DIVIDED
        fact = fact & ~_VARIED if is_number else fact if spreads else fact | _VARIED
        if name in UNSTACKS or (name in SLICES and shapes[0][:1] == (1,)):
            fact &= ~_OF_BATCH  # as in an iteration
        if name in SUMS and fact & _OF_BATCH and 0 in dims_along(equation.params, len(operands[0])):
            fact |= _SUMMED
        if name in _OVER_REPLICAS and not all(isinstance(v, _jax.Literal) and v.val == 1 for v in equation.invars):
            fact |= _SUMMED  # a sum of ones is the number of replicas
        if name in QUOTIENTS and is_number and facts[1] & _SUMMED:
            fact |= _RATIO
        if equation.primitive is share_p:  # is made to be added up
            fact = fact & ~_NONLINEAR | _OWN
        elif name in _OVER_REPLICAS:
            fact &= ~(_OWN | _NONLINEAR)
        elif fact & (_OF_BATCH | _OWN) == _OF_BATCH and self._is_nonlinear(name, [f & _OF_BATCH for f in facts]):
            fact |= _NONLINEAR
        if not any(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact) for v in equation.outvars):
            fact &= ~_NONLINEAR  # a count, or a comparison
        if self._divides(name, facts):
            fact |= _DIVIDED
            self.divided_at = f" at {_jax.source_line(equation)}"
        return [fact] * len(equation.outvars), facts

    def equation(self, equation: _jax.Equation, facts: list[int], control: Control, final: bool) -> Found[int]:
        found, after = super().equation(equation, facts, control, final)
        if _jax.is_backward(equation):
            found = [fact & ~_DIVIDED | _DERIVED for fact in found]
        return found, after

    def _is_nonlinear(self, name: str, of_batch: list[int]) -> bool:
        """Return whether an operation is surely no linear function of those operands that depend on the examples."""
        if name in PRODUCTS | MATRIX_PRODUCTS:
            return all(of_batch)
        return name in NONLINEAR_FUNCTIONS or (name in QUOTIENTS and bool(of_batch[1]))

    def _divides(self, name: str, facts: list[int]) -> bool:
        """Return whether an operation divides derivatives by a number that is a sum, and none of derivatives."""
        if name in QUOTIENTS:
            pairs = [(facts[0], facts[1] & _SUMMED, facts[1])]
        elif name in PRODUCTS:
            pairs = [(a, b & _RATIO, b) for a, b in (facts, facts[::-1])]
        else:
            return False
        return any(a & _DERIVED and is_sum and not b & (_VARIED | _DERIVED) for a, is_sum, b in pairs)


_OVER_REPLICAS = ALIKE_ALONG_AXIS | {all_reduce_p.name, alone_p.name}
_SPREADING = BROADCASTS | RESHAPES | SQUEEZES | CASTS
_LINEAR = ADDITIONS | DIFFERENCES | PRODUCTS | QUOTIENTS | NEGATIONS | CASTS | {share_p.name}


def used_too_early(name: str, what: str) -> TraceError:
    """The error for a use of what an update that waits is to change."""
    return TraceError(
        f"{name} is {what} after apply_gradients, or the update of an nnx.Optimizer or metric, which changes it only "
        "when the sums over all micro-batches are known. Use it before; what has to follow the update, or to happen "
        "once for the whole batch, such as an average of the weights, belongs into the optimizer (optax.chain), or "
        "into a callback."
    )
