"""Warns of the commonest mistake: replicas add up gradients of losses that are not their shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax.checks.loss_scale.scale_pass import LossScalePass
from replicax.checks.loss_scale.terms import Kind, Level, ScaleFact, Term, effective_kind, elements_of
from replicax.errors import ShareWarning, warn_at
from replicax.execution.program.program import Program
from replicax.locality import T
from replicax.values import Scale

_Mistake = tuple[str, int, Kind]
"""The file and the line of a mistake, and its kind."""

_OF_DIFFERENT_COUNTS = (Kind.RAGGED, Kind.MEAN_OF_MEANS)
"""Kinds that are mistakes only if the replicas' means go over different numbers of elements."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Findings:
    """The certain findings about the program of one size."""

    rows: int  # the number of examples of a replica
    # The mistakes, each with what it changes, and the numbers of elements of the means at its line.
    mistakes: dict[_Mistake, tuple[str, set[int]]]
    scales: list[tuple[Scale | None, int]]  # for each result its scale, and the number of elements of its mean

    @property
    def is_clear(self) -> bool:
        """Return whether a mean differs from a sum, and is a number."""
        return self.rows > 1


def check_loss_scale(programs: Sequence[Program]) -> tuple[Scale | None, ...]:
    """Warn if gradients that are summed over the replicas are certainly not those of shares.

    ``programs`` are the captured program; if replicas differ in size, that of each size. Returns the scale of each
    computed result (see :attr:`replicax.PerReplica.scale`); ``None`` if it is not certain.
    """
    first, is_ragged = programs[0], len(programs) > 1
    variables: dict[_Mistake, str] = {}
    scales: list[set[Scale | None]] = [set() for _ in first.jaxpr.outvars[len(first.writes) :]]
    for numbers in _numbers_of_examples(programs):
        sizes = [_findings(program, rows, is_ragged) for program, rows in zip(programs, numbers, strict=True)]
        for size in sizes:
            for mistake, (variable, _) in size.mistakes.items():
                if mistake[-1] not in _OF_DIFFERENT_COUNTS or _counts_differ(sizes, mistake):
                    variables.setdefault(mistake, variable)
        # Programs of which one has more results than another are refused later, where they are joined.
        for scales_of_result, column in zip(scales, zip(*(size.scales for size in sizes), strict=False), strict=False):
            scales_of_result.update(_common_scale(sizes, column))
    for (file, line, kind), variable in variables.items():
        if kind is Kind.MEAN_OF_MEANS and (file, line, Kind.RAGGED) in variables:
            continue
        text = _TEXTS[kind].format(n=first.replicas, variable=variable, step=repr(first.name))
        warn_at(f"{text} {_IF_MEANT}", ShareWarning, file, line)
    return tuple(scale.pop() if len(scale) == 1 else None for scale in scales)


def _numbers_of_examples(programs: Sequence[Program]) -> list[tuple[int, ...]]:
    """Return the numbers of examples that a replica of each size may have."""
    if len(programs) == 1:
        return [(rows,) for rows in programs[0].numbers_of_examples or [0]]
    columns = zip(*(program.arguments for program in programs), strict=True)
    shapes = [[aval.shape for aval, _ in column] for column in columns if column[0][1] is T]
    return list(dict.fromkeys(tuple(shape[0] for shape in sizes) for sizes in shapes if sizes[0]))


def _counts_differ(sizes: Sequence[_Findings], mistake: _Mistake) -> bool:
    """Return whether replicas of all sizes take a mean at a line, over different numbers of elements."""
    each = [size.mistakes.get(mistake, ("", set()))[1] for size in sizes]
    return all(counts or not size.is_clear for counts, size in zip(each, sizes, strict=True)) and any(
        counts != each[0] for counts in each
    )


def _common_scale(sizes: Sequence[_Findings], column: Sequence[tuple[Scale | None, int]]) -> set[Scale | None]:
    """The scale that a result has for all sizes, if it is certain."""
    scales = {scale for (scale, _), size in zip(column, sizes, strict=True) if scale is not None or size.is_clear}
    if scales == {"mean"} and len(set(column)) > 1:
        return {"ragged mean"}
    return set() if None in scales else scales


def _findings(program: Program, rows: int, is_ragged: bool) -> _Findings:
    """Return the certain findings about a program whose replica has so many examples."""
    findings: dict[_Mistake, tuple[str, set[int]]] = {}
    check = LossScalePass(program, rows, is_ragged)
    facts = check.output_facts()
    changed = [(use.describe(), fact) for use, fact in zip(program.writes, facts, strict=False)]
    returned = facts[len(changed) :]
    # A pure step returns its arguments, changed by gradients. Its other results may still be scaled outside.
    changed += [("what it returns", m) for m in returned if m.outside and m.locality is not T]
    mistakes = [(term, kind, what) for what, m in changed for term, kind in _mistakes(m, program.replicas, is_ragged)]
    mistakes += [(term, term.kind, "") for term in check.wrong_means]
    for term, kind, what in mistakes:
        findings.setdefault((*check.place(term.line), kind), (what, set()))[1].add(term.count)
    return _Findings(rows, findings, [_scale(fact, program.replicas) for fact in returned])


def _scale(fact: ScaleFact, replicas: int) -> tuple[Scale | None, int]:
    """The scale of a result, ``None`` if it is not certain, and the number of elements of a mean."""
    if (
        fact.locality is T
        and not fact.has_unknown
        and not fact.has_examples
        and {t.level for t in fact.terms} == {Level.LOSS}
    ):
        kinds = {effective_kind(t, replicas) for t in fact.terms}
        if kinds == {Kind.MEAN}:
            return "mean", elements_of(fact.terms, replicas)
        if kinds == {Kind.SHARE}:
            return "share", 0
    return None, 0


def _mistakes(fact: ScaleFact, replicas: int, is_ragged: bool) -> list[tuple[Term, Kind]]:
    """The mistakes in the new value of a variable: the term and the kind of each."""
    totals = [(t, effective_kind(t, replicas)) for t in fact.terms if t.level is Level.TOTAL]
    # An average of parameters that each replica has changed alone is not a gradient.
    averaged = any(t.kind is Kind.REPEATED and kind is Kind.SHARE for t, kind in totals)
    found = [(t, kind) for t, kind in totals if kind in _TEXTS and not (averaged and kind is Kind.DOUBLE_SCALED)]
    if is_ragged:
        found += [(t, Kind.RAGGED) for t, kind in totals if t.kind is Kind.MEAN and kind is Kind.SHARE]
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
    Kind.MEAN_OF_SHARES: (
        "step {step}: this gives a metric a replica's share of a mean. The {n} shares add up to the mean, and the "
        "metric takes their mean: that is 1/{n} of what it should be. Update it with the values of the examples: "
        "mean.update(per_example_losses)."
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
_IF_MEANT = "If the warning is wrong, or you meant it, wrap the loss in replicax.as_share(loss)."
