"""Checks of a step whose gradients are accumulated: the loss is a share, and an optimizer gets its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from replicax import _jax
from replicax.collectives import share_back_p, share_p
from replicax.errors import TraceError
from replicax.execution.program.dataflow import Control, Dataflow, Found


def check_loss(name: str, jaxpr: _jax.Jaxpr, has_update: bool, new: Sequence[Any], old: Sequence[Any]) -> None:
    """Raise a ValueError if the gradients of micro-batches would not add up.

    Args:
      name: of the step.
      jaxpr: the step on one micro-batch.
      has_update: whether an optimizer takes gradients.
      new: those results that are new values of variables, and of arrays in objects.
      old: the results that are their values before.
    """
    if not has_update and (_has(jaxpr, share_back_p) or _descends(jaxpr, new, old)):
        raise ValueError(
            f"{name}: the step differentiates its loss, and calls no apply_gradients (of a replicax.Optimizer) or "
            "update (of an nnx.Optimizer), which add up the gradients of micro-batches. Its own update would be one "
            "for each micro-batch, with a part of the gradient: update with an optimizer."
        )
    if has_update and not _has(jaxpr, share_p):
        raise ValueError(
            f"{name}: the gradients of micro-batches are added up, so the loss must be each one's share of the mean "
            "over the whole batch: end it with replicax.compute_average_loss(losses). (A mean of a micro-batch would "
            "count once for each of them.)"
        )


def _has(jaxpr: _jax.Jaxpr, primitive: Any) -> bool:
    return _jax.contains(jaxpr, lambda equation: equation.primitive is primitive)


def makes_share(equation: _jax.Equation) -> bool:
    """Return whether an equation, or one in the programs inside, makes a share."""
    return equation.primitive is share_p or any(_has(inner, share_p) for inner in _jax.sub_jaxprs(equation))


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


def used_too_early(name: str, what: str) -> TraceError:
    """The error for a use of what an update that waits is to change."""
    return TraceError(
        f"{name} is {what} after apply_gradients, or the update of an nnx.Optimizer or metric, which changes it only "
        "when the sums over all micro-batches are known. Use it before; what has to follow the update belongs into "
        "the optimizer (optax.chain), or into a callback."
    )
