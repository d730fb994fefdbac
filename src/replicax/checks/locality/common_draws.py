"""Finds random numbers for each example that are the same on every replica: masks and noise from a common key.

On one device each example of the global batch would get its own numbers. So it is a mistake to combine numbers drawn
for each row, row by row, with the examples of a replica. Numbers for parameters, for features or for a shuffle should
be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from replicax import _jax
from replicax._jax import primitive_families as families
from replicax.errors import LocalityWarning, warn_at
from replicax.execution.program.collective_operations import all_get_the_same, over_replicas, replicas_meet
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.execution.program.locality_rules import join, result_localities
from replicax.execution.program.program import Program
from replicax.locality import Locality, M, R, T
from replicax.padding.example_places import UNKNOWN, Place, Rows
from replicax.padding.example_rules import result_places
from replicax.padding.examples import (
    operation_shapes,
    place_of_examples,
    shape_of,
    sliced_place,
    stacked_place,
)

_KEPT = (
    families.ELEMENTWISE
    | families.BITCASTS
    | families.DIM_MOVES
    | families.RESHAPES
    | families.SQUEEZES
    | families.IDENTITIES
)
"""Operations that keep random numbers in their places, or move them all together."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """The known facts of a value."""

    locality: Locality = M  # whether it may differ between replicas
    place: Place = None  # where the examples are; of random numbers, the dim along which each row has its own number
    draw: int = 0  # the number of the operation that drew it; 0 if it was not drawn from a key that all replicas have


def warn_of_common_draws(program: Program) -> None:
    """Warn if examples of different replicas certainly get the same random numbers."""
    if not _jax.contains(program.jaxpr, lambda e: e.primitive.name in families.DRAWS):
        return
    lines: dict[tuple[str, int], tuple[str, int]] = {}
    for rows in program.numbers_of_examples:
        check = _DrawsPass(program, rows)
        check.run(program.jaxpr, check.inputs(), final=True)
        lines.update(check.places())
    for (file, line), (user, number_of_line) in lines.items():
        warn_at(
            f"step {program.name!r}: the numbers drawn here come from a random key that is the same on all "
            f"{program.replicas} replicas, and are combined with each replica's own examples "
            f"(at {user}:{number_of_line}): example i of every replica gets the same numbers. Draw them with "
            "this replica's key: replicax.get_replica_context().random_key(key), "
            "which is jax.random.fold_in(key, replica_id).",
            LocalityWarning,
            file,
            line,
        )


class _DrawsPass(Dataflow[_Drawn]):
    def __init__(self, program: Program, rows: int) -> None:
        super().__init__(_Drawn())
        self.program = program
        self.rows = rows
        self._combined: dict[int, int] = {}

    def inputs(self) -> list[_Drawn]:
        """The facts of the program's inputs."""
        program = self.program
        dims = program.dims_of_examples
        arguments = [
            _Drawn(locality, place_of_examples(aval.shape, dim, self.rows) if locality is T else None)
            for (aval, locality), dim in zip(program.arguments, dims, strict=True)
        ]
        variables = [_Drawn(use.layout.locality) for use in program.reads]
        return [*variables, *arguments, *[self.constant] * len(program.constants)]

    def places(self) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        """The user's lines that draw numbers, each with a line that combines these with examples."""
        for draw, combination in self._combined.items():
            yield self.place(draw), self.place(combination)

    def join(self, facts: Iterable[_Drawn]) -> _Drawn:
        first, *others = dict.fromkeys(facts)
        if not others:
            return first
        return _Drawn(join(f.locality for f in (first, *others)), UNKNOWN)

    def decided(self, fact: _Drawn, decision: _Drawn) -> _Drawn:
        return fact if decision.locality is not T else _Drawn(T, UNKNOWN)

    def sliced(self, facts: list[_Drawn]) -> list[_Drawn]:
        return [dataclasses.replace(f, place=sliced_place(f.place)) for f in facts]

    def stacked(self, facts: list[_Drawn], over: list[_Drawn]) -> list[_Drawn]:
        return [dataclasses.replace(f, place=stacked_place(f.place, False)) for f in facts]

    def equation(self, equation: _jax.Equation, facts: list[_Drawn], control: Control, final: bool) -> Found[_Drawn]:
        name, count = equation.primitive.name, len(equation.outvars)
        if replicas_meet(equation):
            return [_Drawn(R if all_get_the_same(equation) else T, UNKNOWN)] * count, facts
        if name in families.AXIS_POSITION and over_replicas(equation.params):
            return [_Drawn(T)] * count, facts
        return super().equation(equation, facts, control, final)

    def operation(self, equation: _jax.Equation, facts: list[_Drawn], control: Control, final: bool) -> Found[_Drawn]:
        name, count = equation.primitive.name, len(equation.outvars)
        localities = result_localities(name, equation.params, [f.locality for f in facts], count)
        if name in families.REFERENCES or any(True for _ in _jax.sub_jaxprs(equation)):
            return [_Drawn(T, UNKNOWN)] * count, [_Drawn(T, UNKNOWN)] * len(facts)
        if not count:  # a print, for example
            return [], facts
        if name in families.DRAWS and localities[0] is not T:
            shape = shape_of(equation.outvars[0])
            place = Rows(shape.index(self.rows)) if self.rows in shape else None
            return [_Drawn(M, place, self.note(equation))], facts
        differ = [f for f in facts if f.locality is T]
        drawn = [f for f in facts if f.draw and isinstance(f.place, Rows)]
        if name in families.ELEMENTWISE and differ and drawn:
            for f in drawn:
                if any(f.place == other.place for other in differ):
                    self._combined.setdefault(f.draw, self.note(equation))
        elif not differ and not drawn:
            return [_Drawn(locality) for locality in localities], facts
        kept = localities[0] is T or name in _KEPT
        kept_places = [f.place if f in differ or (f in drawn and not differ) else None for f in facts]
        places = result_places(operation_shapes(equation, kept_places, self.rows))
        draw = drawn[0].draw if drawn and not differ else 0
        return [_Drawn(loc, p if kept else None, draw) for loc, p in zip(localities, places, strict=True)], facts
