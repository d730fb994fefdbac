"""A check of steps with a padded batch: rows of another batch are not taken for its rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from replicax import _jax
from replicax.checks.locality.warning import warn_at
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.execution.program.marks import asks_p
from replicax.execution.program.program import Program
from replicax.locality import T

_OTHER, _PADDED = 1, 2
"""What a value is computed from: an argument with as many rows that is not padded, a padded one, or both (or none)."""


def warn_of_other_batches(program: Program) -> None:
    """Warn if padding is left out of values that come from no padded argument, but from one with as many rows."""
    if program.example_dims is None:
        return
    *arguments, (mask, _), _ = program.arguments
    facts = [
        _PADDED if dim != () else _OTHER if locality is T and aval.shape[:1] == mask.shape else 0
        for (aval, locality), dim in zip(arguments, program.example_dims, strict=True)
    ]
    if _OTHER in facts:
        _Origins(program.name).run(
            program.jaxpr, [*[0] * len(program.reads), *facts, _PADDED, 0, *[0] * len(program.constants)], final=True
        )


class _Origins(Dataflow[int]):
    def __init__(self, name: str) -> None:
        super().__init__(0)
        self._name = name

    def join(self, facts: Iterable[int]) -> int:
        return functools.reduce(operator.or_, facts, 0)

    def operation(self, equation: _jax.Equation, facts: list[int], control: Control, final: bool) -> Found[int]:
        if final and equation.primitive is asks_p and facts == [_OTHER]:
            question = equation.params["question"]
            if question.otherwise is not None:
                warn_at(
                    f"step {self._name!r}: {question.what} is computed from an argument that is not padded, and "
                    "from no padded one. Row i is taken for row i of the padded batch, so its last rows are left out "
                    "where that has padding. For numbers drawn for each row of the batch, such as noise, that is "
                    "right: pass them as a part of the padded batch, or draw them in the step (random_key), and "
                    "nothing is reported. For rows of another dataset it is wrong: distribute both datasets with "
                    "InputOptions(partial_batch='exact').",
                    *_jax.source_place([equation]),
                )
        joined = self.join(facts)
        return [joined] * len(equation.outvars), [joined] * len(facts)
