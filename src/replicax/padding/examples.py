"""Examples: where are they in each result of a program?

A dataflow pass over a captured program like :mod:`replicax.execution.program.infer`, by the rules of
:mod:`replicax.padding.example_rules`. It also answers the questions that were asked while the step's Python
ran (:mod:`replicax.padding.questions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.errors import LocalityWarning, warn_at
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.execution.program.marks import asks_p
from replicax.execution.program.program import Program
from replicax.locality import Locality, T
from replicax.padding.example_places import PART, UNKNOWN, UNPADDED, OperationShapes, Place, Rows, Untraceable, joined
from replicax.padding.example_rules import result_places
from replicax.padding.questions import dim_of_examples


def where_examples_are(
    program: Program, localities: Sequence[Locality]
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """For each result of a step with padded arguments whether rows may be padding, and the dim of the examples."""
    assert program.example_dims is not None
    rows = program.arguments[-2][0].shape[0]
    inputs: list[Place] = [None] * len(program.reads)
    for (aval, locality), dim in zip(program.arguments, program.example_dims, strict=False):
        # The batches of a single replica come bare, as what replicas share does.
        is_other = dim == () and (locality is T or program.replicas == 1) and aval.shape[:1] == (rows,)
        inputs.append(UNPADDED if is_other else place_of_examples(aval.shape, dim, rows))
    inputs += [Rows(0), None] + [None] * len(program.constants)
    places = ExamplesPass(rows, program.name).run(program.jaxpr, inputs, final=True)[0]
    n = len(program.writes)
    outputs = program.jaxpr.outvars[n:]
    dims = [dim_of_examples(p, shape_of(v), rows) for p, v in zip(places[n:], outputs, strict=True)]
    padded = [
        locality is T and (dim is not None or unclear)
        for locality, (dim, unclear) in zip(localities[n:], dims, strict=True)
    ]
    return tuple(padded), tuple(dim for dim, _ in dims)


class ExamplesPass(Dataflow[Place]):
    """Finds where the examples are in each value of a program, whose replica has so many rows, padding included."""

    def __init__(self, rows: int, step: str = "") -> None:
        super().__init__(None)
        self.rows = rows
        self.step = step

    def join(self, facts: Iterable[Place]) -> Place:
        facts = list(facts)
        return joined(facts) or (UNPADDED if UNPADDED in facts else None)

    def sliced(self, facts: list[Place]) -> list[Place]:
        return [place if place == UNPADDED else sliced_place(place) for place in facts]

    def stacked(self, facts: list[Place], over: list[Place]) -> list[Place]:
        over_examples = Rows(0) in over  # each turn is about one of them
        return [place if place == UNPADDED else stacked_place(place, over_examples) for place in facts]

    def _scan(
        self, inner: _jax.Scan, equation: _jax.Equation, facts: list[Place], control: Control, final: bool
    ) -> Found[Place]:
        found, facts = super()._scan(inner, equation, facts, control, final)
        n, m = inner.constants, inner.constants + inner.carried
        if not inner.reverse or Rows(0) not in facts[m:]:
            return found, facts
        # Padding comes first, so what is carried on from it is in the rows of examples.
        slices = [PART if place == Rows(0) else None for place in facts[m:]]
        before, carried = None, [*facts[n:m]]
        while carried != before:
            before = carried
            results = self.run(inner.body, [*[None] * n, *before, *slices], control, final=False)[0]
            carried = [PART if _is_something(x) else c for c, x in zip(before, results[: m - n], strict=True)]
        results = self.run(inner.body, [*[None] * n, *carried, *[None] * len(slices)], control, final=False)[0]
        for i in range(m - n, len(found)):
            found[i] = UNKNOWN if _is_something(results[i]) else found[i]
        return found, facts

    def operation(self, equation: _jax.Equation, facts: list[Place], control: Control, final: bool) -> Found[Place]:
        if equation.primitive is asks_p and final:
            equation.params["question"].resolve(facts[0], shape_of(equation.invars[0]))
            if facts[0] == UNPADDED and equation.params["question"].error_if_not is not None:
                self._warn_of_other_batch(equation)
        for inner in _jax.sub_jaxprs(equation):  # a question inside must have an answer
            if any(map(_is_something, facts)):
                self.run(inner, [PART for _ in inner.invars], final=final)
        seen = [None if place == UNPADDED else place for place in facts]  # the rules know the padded batch only
        places = result_places(operation_shapes(equation, seen, self.rows))
        if UNPADDED in facts and not any(map(_is_something, facts)):
            places = [UNPADDED if place is None else place for place in places]
        return places, facts

    def _warn_of_other_batch(self, question: _jax.Equation) -> None:
        warn_at(
            f"step {self.step!r}: {question.params['question'].what} is computed from an argument that is not padded, "
            "and has no rows of a padded one. Row i is taken for row i of the padded batch, so its last rows are left "
            "out where that has padding. For numbers drawn for each row of the batch, such as noise, that is right: "
            "pass them as a part of the padded batch, or draw them in the step (random_key), and nothing is reported. "
            "For rows of another dataset it is wrong: distribute both datasets with "
            "InputOptions(partial_batch='exact').",
            LocalityWarning,
            *_jax.source_place([question]),
        )


def operation_shapes(equation: _jax.Equation, places: Iterable[Place], rows: int) -> OperationShapes:
    """An operation as the rules look at it, given where the examples are in its operands."""
    return OperationShapes(
        equation.primitive.name,
        equation.params,
        tuple(places),
        tuple(map(shape_of, equation.invars)),
        tuple(map(shape_of, equation.outvars)),
        rows,
        lambda i: known_number(equation.invars[i]),
    )


def _is_something(place: Place) -> bool:
    return isinstance(place, Rows | Untraceable)


def place_of_examples(shape: tuple[int, ...], dim: Any, rows: int) -> Place:
    """Where the examples are in an argument, along ``dim``; ``None``: that is unknown; ``()``: along none."""
    if dim is None:
        return UNKNOWN
    return Rows(dim) if dim != () and shape[dim : dim + 1] == (rows,) else None


def sliced_place(place: Place) -> Place:
    """An iteration's slice of what a scan goes over."""
    if not isinstance(place, Rows):
        return PART if isinstance(place, Untraceable) else None
    if place.dim > 0:
        return place.moved(place.dim - 1)
    return None if place == Rows(0) else PART


def stacked_place(place: Place, over_examples: bool) -> Place:
    """Where the examples are in what a scan stacks of its iterations' results."""
    if isinstance(place, Rows):
        return UNKNOWN if over_examples else place.moved(place.dim + 1)
    if isinstance(place, Untraceable):
        return Untraceable(place.is_part)
    return Rows(0) if over_examples else None


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value of a program; ``()`` if it has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def known_number(value: Any) -> Any:
    """A number that is known: a literal of a program, or a concrete scalar."""
    value = value.val if isinstance(value, _jax.Literal) else value
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        return None
    return None if np.ndim(value) else np.asarray(value).item()
