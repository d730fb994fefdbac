"""Warns of the commonest mistake: replicas add up gradients of losses that are not their shares."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from replicax.checks.loss_scale.scale_pass import LossScalePass
from replicax.checks.loss_scale.terms import Kind, Level, ScaleFact, effective_kind
from replicax.errors import ShareWarning
from replicax.execution.program.program import Program
from replicax.locality import T
from replicax.values import Scale

__warningregistry__: dict[Any, Any] = {}


def check_loss_scale(program: Program, asked: bool, is_ragged: bool) -> tuple[Scale | None, ...]:
    """Warn if gradients that are summed over the replicas are certainly not those of shares.

    Args:
      program: the captured program.
      asked: whether the step has read the number of replicas.
      is_ragged: whether other replicas may have another number of examples.

    Returns:
      The scale of each computed result (see :attr:`replicax.PerReplica.scale`); ``None`` if it is not certain.
    """
    found: dict[tuple[str, int, Kind], str] = {}
    scales: list[set[Scale]] = [set() for _ in program.jaxpr.outvars[len(program.writes) :]]
    for rows in program.numbers_of_examples or [0]:
        check = LossScalePass(program, rows, asked, is_ragged)
        facts = check.output_facts()
        changed = [(use.describe(), fact) for use, fact in zip(program.writes, facts, strict=False)]
        returned = facts[len(changed) :]
        # A pure step returns its arguments, changed by gradients. Its other results may still be scaled outside.
        changed += [("what it returns", m) for m in returned if m.outside and m.locality is not T]
        for what, fact in changed:
            for line, kind in _mistakes(fact, program.replicas, is_ragged):
                place = check.place(line)
                found.setdefault((*place, kind), what)
        for place in map(check.place, check.means_of_means):
            if (*place, Kind.RAGGED) not in found:
                found.setdefault((*place, Kind.MEAN_OF_MEANS), "")
        for fact, scale in zip(returned, scales, strict=True):
            scale.update(_scale(fact, program.replicas, is_ragged))
    for (file, line, kind), variable in found.items():
        text = _TEXTS[kind].format(n=program.replicas, variable=variable, step=repr(program.name))
        warnings.warn_explicit(f"{text} {_IF_MEANT}", ShareWarning, file, line, registry=__warningregistry__)
    return tuple(scale.pop() if len(scale) == 1 else None for scale in scales)


def _scale(fact: ScaleFact, replicas: int, is_ragged: bool) -> Iterable[Scale]:
    """The scale of a result, if it is certain."""
    if (
        fact.locality is T
        and not fact.has_unknown
        and not fact.has_examples
        and {t.level for t in fact.terms} == {Level.LOSS}
    ):
        kinds = {effective_kind(t, replicas) for t in fact.terms}
        if kinds == {Kind.MEAN}:
            yield "ragged mean" if is_ragged else "mean"
        elif kinds == {Kind.SHARE}:
            yield "share"


def _mistakes(fact: ScaleFact, replicas: int, is_ragged: bool) -> list[tuple[int, Kind]]:
    """The mistakes in the new value of a variable: the line and the kind of each."""
    totals = [(t, effective_kind(t, replicas)) for t in fact.terms if t.level is Level.TOTAL]
    # An average of parameters that each replica has changed alone is not a gradient.
    averaged = any(t.kind is Kind.REPEATED and kind is Kind.SHARE for t, kind in totals)
    found = [(t.line, kind) for t, kind in totals if kind in _TEXTS and not (averaged and kind is Kind.DOUBLE_SCALED)]
    if is_ragged:
        found += [(t.line, Kind.RAGGED) for t, kind in totals if t.kind is Kind.MEAN and kind is Kind.SHARE]
    return found


_SUMMED = "and its gradient is summed over the {n} replicas, into {variable}"
_TEXTS = {
    Kind.MEAN: (
        "step {step}: this is a mean over one replica's own examples. It is in a loss that is differentiated, "
        + _SUMMED
        + ": that is {n} times the gradient of the mean over the whole batch. Use "
        "replicax.compute_average_loss(per_example_losses), which is this replica's share of that mean; or average the "
        'gradients (all_reduce("mean", gradients), and apply_gradients with aggregate=False).'
    ),
    Kind.REPEATED: (
        "step {step}: here something that is the same on every replica is added to this replica's share of a loss. "
        "Each of the {n} replicas adds all of it, " + _SUMMED + ": it counts {n} times. Add "
        "replicax.scale_regularization_loss(…) of it."
    ),
    Kind.COMMON: (
        "step {step}: this is the same on every replica, which have added it up, and it is in a loss that is "
        "differentiated. Each of the {n} replicas differentiates all of it, " + _SUMMED + ": it counts {n} times. "
        "Differentiate this replica's share (replicax.compute_average_loss), and reduce the loss afterwards, to show "
        "it."
    ),
    Kind.DOUBLE_SCALED: (
        "step {step}: this is a replica's share already, and it is divided by the number of replicas once more: the "
        "gradient that is summed over the {n} replicas, into {variable}, is 1/{n} of what it should be. Leave out one "
        "of the two: sum the gradients of shares, and don't average them."
    ),
    Kind.SUMMED_TWICE: (
        "step {step}: this adds up over the replicas what they have added up already. Each of the {n} replicas has the "
        "whole sum, so the gradient that comes out, into {variable}, is {n} times what it should be. Leave out one of "
        "the two sums."
    ),
    Kind.RAGGED: (
        "step {step}: this is a mean over one replica's own examples, of which replicas have different numbers here. "
        "Its gradient is averaged over the {n} replicas, into {variable}: examples of a replica that has fewer weigh "
        "more than others, and a replica without any counts as much as a full one. Use "
        "replicax.compute_average_loss(per_example_losses) and sum the gradients; or let no batch differ in size "
        '(drop the remainder, or InputOptions(partial_batch="pad") and the mask).'
    ),
    Kind.MEAN_OF_MEANS: (
        "step {step}: this is a mean over one replica's own examples, of which replicas have different numbers here, "
        "and the mean of the {n} replicas' means is taken: examples of a replica that has fewer weigh more, and the "
        "result is NaN if a replica has none. Use replicax.compute_average_loss(values), which is this "
        'replica\'s share of the mean over the whole batch, and add the shares up (all_reduce("sum", share)); or keep '
        "a metric (replicax.Mean)."
    ),
    Kind.NONLINEAR: (
        "step {step}: this is a function of a replica's share that is not linear, such as a root. Such values don't "
        "add up to the function of the whole, " + _SUMMED + ". Apply it to each example's loss, before "
        "replicax.compute_average_loss."
    ),
    Kind.CLIPPED: (
        "step {step}: here each replica clips or normalizes its own gradient before that is summed over the {n} "
        "replicas, into {variable}. So the sum is clipped otherwise than the gradient of the whole batch would be. Sum "
        'first (all_reduce("sum", gradients), and apply_gradients with aggregate=False), or let the optimizer clip '
        "(optax.chain(optax.clip_by_global_norm(…), …)), which does it after the sum."
    ),
}
_IF_MEANT = "If it is meant as it is, say so: replicax.as_share(loss)."
