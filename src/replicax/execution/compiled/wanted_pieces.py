"""Which values of a program are needed in pieces only, found by going through it from its results backwards."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.operation_params import wanted_sharding
from replicax._jax.primitive_families import CHECKPOINTS, ELEMENTWISE, SPLITS
from replicax.collectives import all_reduce_p, alone_p, gathered_p, share_p
from replicax.communication import CommunicationOptions
from replicax.devices.logical_axes import spec_of
from replicax.execution.program.marks import mark_p
from replicax.variables.layout import Split

PASSED_ON = frozenset({mark_p, share_p, alone_p, gathered_p})
"""The primitives whose results are their operands, as far as pieces are concerned."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoopSum:
    """How a loop sums its slices of a value over the replicas, each as soon as it has it.

    Attributes:
      split: which pieces of the stack of all slices are needed.
      before: the operations, each of one value and element by element, that are between the loop and the sum: they
        are applied to each slice instead. So a gradient that is cast to a wider dtype is summed in that one.
    """

    split: Split
    before: tuple[Any, ...] = ()

    def slice(self, array: Any) -> Any:
        """One slice, as it is to be summed."""
        for equation in self.before:
            operands = [v.val if isinstance(v, _jax.Literal) else array for v in equation.invars]
            [array] = _jax.bind(equation, operands)
        return array


def wanted_pieces(jaxpr: _jax.Jaxpr, wanted: Sequence[Split | None]) -> dict[Any, Split]:
    """In which pieces values are needed, as they go element by element into what is wanted in pieces."""
    hints: dict[Any, Split] = {}

    def want(atom: Any, split: Split | None) -> None:
        if split is not None and not isinstance(atom, _jax.Literal):
            hints.setdefault(atom, split)

    for atom, split in zip(jaxpr.outvars, wanted, strict=False):
        want(atom, split)
    for equation in reversed(jaxpr.eqns):
        found = [hints.get(v) for v in equation.outvars]
        if not any(found):
            continue
        if equation.primitive in PASSED_ON:
            for atom, split in zip(equation.invars, found, strict=True):
                want(atom, split)
        elif equation.primitive.name in ELEMENTWISE:
            for atom in equation.invars:
                if _shape(atom) == _shape(equation.outvars[0]):
                    want(atom, found[0])
        elif (called := inlined(equation)) is not None:
            inner = wanted_pieces(called, found)
            for atom, v in zip(equation.invars, called.invars, strict=True):
                want(atom, inner.get(v))
    return hints


def sums_in_loops(jaxpr: _jax.Jaxpr, hints: Mapping[Any, Split]) -> dict[Any, LoopSum]:
    """What a loop may sum and scatter slice by slice, as no other value is needed before it is summed."""
    uses = collections.Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, _jax.Literal))
    uses.update(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
    sunk: dict[Any, LoopSum] = {}
    for equation in reversed(jaxpr.eqns):
        found: list[LoopSum | None]
        if equation.primitive is all_reduce_p and may_scatter(equation):
            found = [LoopSum(hints[v]) if v in hints else None for v in equation.outvars]
        elif equation.primitive is mark_p or any(
            v in sunk and says_nothing_new(equation, sunk[v].split) for v in equation.outvars
        ):
            found = [sunk.get(v) for v in equation.outvars]
        elif _is_of_one_value(equation) and (later := sunk.get(equation.outvars[0])) is not None:
            found = [dataclasses.replace(later, before=(equation, *later.before))] * len(equation.invars)
        else:
            continue
        for v, total in zip(equation.invars, found, strict=True):
            if total is not None and not isinstance(v, _jax.Literal) and uses[v] == 1 and total.split.dim > 0:
                sunk[v] = total
    return sunk


def inlined(equation: Any) -> Any:
    """The program that an equation applies, if it may as well stand in its place."""
    called = _jax.called_program(equation)
    # What jax.checkpoint wraps is there to be computed twice: it gets what it needs whole, both times.
    stays = equation.primitive.name in CHECKPOINTS or called is None or called.constvars
    return None if stays else called


def may_scatter(equation: Any) -> bool:
    """Whether a sum may be carried out in another way than as an all-reduce."""
    return equation.params["options"] in (None, CommunicationOptions())


def says_nothing_new(equation: Any, split: Split) -> bool:
    """Whether an equation only says that a value is in the same parts on the logical devices as its pieces."""
    if equation.primitive.name not in SPLITS or not any(split.axes):
        return False
    return bool(wanted_sharding(equation.params) == spec_of(split.axes))


def _is_of_one_value(equation: Any) -> bool:
    """Whether an operation computes each element from the one in its place of a single value, and from numbers."""
    values = [v for v in equation.invars if not isinstance(v, _jax.Literal)]
    return (
        equation.primitive.name in ELEMENTWISE
        and len(values) == 1
        and _shape(values[0]) == _shape(equation.outvars[0])
        and all(v is values[0] or not _shape(v) for v in equation.invars)
    )


def _shape(atom: Any) -> Any:
    return atom.aval.shape
