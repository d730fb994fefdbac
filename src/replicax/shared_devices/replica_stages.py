"""Stages of a program for devices with several replicas: what all compute alike, what each does, the collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import AXIS_POSITION, AXIS_SUMS
from replicax.collectives import all_reduce_p
from replicax.devices.host_values import is_key
from replicax.execution.program.collective_operations import is_collective, over_replicas

_SUMS = AXIS_SUMS | {all_reduce_p.name}


@dataclasses.dataclass(slots=True)
class ReplicaStage:
    """The operations after some collectives and before the next ones."""

    # Operations on values that all replicas have alike, in their order.
    common: list[_jax.Equation] = dataclasses.field(default_factory=list)
    # What each replica does by itself, in its order.
    alone: list[_jax.Equation] = dataclasses.field(default_factory=list)
    collectives: list[_jax.Equation] = dataclasses.field(default_factory=list)  # the collectives at the end
    kept: list[Any] = dataclasses.field(default_factory=list)  # results of ``alone`` that are needed outside of it
    # Those results of which all replicas compute the same; ``kept`` has the others.
    alike: list[Any] = dataclasses.field(default_factory=list)
    # Results of ``alone`` of which only the sum over all replicas is needed.
    summed: list[Any] = dataclasses.field(default_factory=list)


def stages_of(jaxpr: _jax.Jaxpr, differ: Sequence[bool], may_differ: Callable[[Any], bool]) -> list[ReplicaStage]:
    """The stages of a program: each operation is in the first one for which its operands are there.

    What uses mutable arrays is in one stage, and so in one segment, in its order. ``differ`` has for each of the inputs
    whether replicas have values of their own; ``may_differ`` tells it of any value.
    """
    stages, of_mutable, _ = _stages_from(jaxpr, differ, may_differ, 0)
    if of_mutable:
        stages, latest, line = _stages_from(jaxpr, differ, may_differ, of_mutable)
        if latest > of_mutable:
            raise ValueError(
                f"a mutable array (jax.new_ref) is used both before a collective and after it, at {line}: with several "
                "replicas on a device that can't be; hand its value on (ref[...]) and begin a new one"
            )
    _note_uses(jaxpr, stages, may_differ)
    return stages


def _stages_from(
    jaxpr: _jax.Jaxpr, differ: Sequence[bool], may_differ: Callable[[Any], bool], of_mutable: int
) -> tuple[list[ReplicaStage], int, str]:
    """The stages, if uses of mutable arrays are in stage ``of_mutable`` or later; the last of these, and its line."""
    stages: list[ReplicaStage] = []
    sources: dict[Any, tuple[int, bool]] = {v: (0, d) for v, d in zip(jaxpr.invars, differ, strict=True)}
    sources.update((v, (0, False)) for v in jaxpr.constvars)
    acted, latest, line = 0, of_mutable, ""
    for equation in jaxpr.eqns:
        operands = _jax.without_literals(equation.invars)
        acts, communicates = is_action(equation), is_collective(equation)
        mutates = any(map(_jax.is_mutable, [*operands, *equation.outvars]))
        number = max([sources[v][0] for v in operands], default=0)
        if acts:
            number = max(number, acted)
            acted = number + communicates
        if mutates:
            number = max(number, of_mutable)
            if number + communicates > latest:
                latest, line = number + communicates, _jax.source_line(equation)
        # When a segment is over, all may use what it has computed of values that all replicas have alike.
        alone = not communicates and (
            acts
            or mutates
            or asks_for_position(equation)
            or any(map(may_differ, equation.outvars))
            or any(sources[v][1] and (may_differ(v) or sources[v][0] == number) for v in operands)
        )
        while len(stages) <= number:
            stages.append(ReplicaStage())
        stage = stages[number]
        (stage.collectives if communicates else stage.alone if alone else stage.common).append(equation)
        sources.update(
            (v, (number + communicates, alone or (communicates and may_differ(v)))) for v in equation.outvars
        )
    return stages, latest, line


def _note_uses(jaxpr: _jax.Jaxpr, stages: Sequence[ReplicaStage], may_differ: Callable[[Any], bool]) -> None:
    """Find out which results segments have to keep."""
    sums: set[Any] = set()
    needed = set(_jax.without_literals(jaxpr.outvars))
    for stage in stages:
        computed = {v for e in stage.alone for v in e.outvars}
        needed.update(v for v in used_by(stage.alone) if v not in computed)
        needed.update(used_by(stage.common))
        for equation in stage.collectives:
            (sums if is_sum(equation) else needed).update(used_by([equation]))
    for stage in stages:
        results: list[Any] = [v for e in stage.alone for v in e.outvars if not _jax.is_mutable(v)]
        outside = [v for v in results if v in needed]
        stage.alike = [v for v in outside if not may_differ(v) and not is_key(v.aval.dtype)]
        stage.kept = [v for v in outside if v not in set(stage.alike)]
        stage.summed = [v for v in results if v in sums and v not in needed]


def used_by(equations: Sequence[_jax.Equation]) -> dict[Any, None]:
    """The operands of the equations, in their order."""
    return dict.fromkeys(v for e in equations for v in _jax.without_literals(e.invars))


def is_action(equation: _jax.Equation) -> bool:
    """Whether an operation does something besides computing its results, so that it is to be done for each replica."""
    return _jax.has_outer_effects(equation) or not _jax.is_deterministic(equation.primitive.name, equation.params)


def is_sum(equation: _jax.Equation) -> bool:
    """Whether it is a sum over all replicas."""
    return equation.primitive.name in _SUMS and not _jax.has_groups(equation.params)


def asks_for_position(equation: _jax.Equation) -> bool:
    """Whether it asks for the replica's number."""
    return equation.primitive.name in AXIS_POSITION and over_replicas(equation.params)
