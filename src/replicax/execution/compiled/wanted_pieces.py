"""Finds the values of a program that are needed in pieces only, from its results backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax import _jax
from replicax._jax.operation_params import wanted_sharding
from replicax._jax.primitive_families import CHECKPOINTS, ELEMENTWISE, SPLITS
from replicax.collectives import alone_p, gathered_p, share_back_p, share_p
from replicax.communication import CommunicationOptions
from replicax.devices.logical_axes import spec_of
from replicax.execution.program.marks import mark_p
from replicax.variables.layout import Split

PASSED_ON = frozenset({mark_p, share_p, share_back_p, alone_p, gathered_p})
"""The primitives whose results are their operands, as far as pieces are concerned."""


def wanted_pieces(jaxpr: _jax.Jaxpr, wanted: Sequence[Split | None]) -> dict[Any, Split]:
    """The splits of values that go element by element into results wanted in pieces."""
    hints: dict[Any, Split] = {}

    def want(atom: Any, split: Split | None) -> None:
        if split is not None:  # then it has dims, and is no literal
            hints.setdefault(atom, split)

    for atom, split in zip(jaxpr.outvars, wanted, strict=False):
        want(atom, split)
    equations: Sequence[Any] = jaxpr.eqns
    for equation in reversed(equations):
        splits = [hints.get(v) for v in equation.outvars]
        if not any(splits):
            continue
        if equation.primitive in PASSED_ON:
            for atom, split in zip(equation.invars, splits, strict=True):
                want(atom, split)
        elif equation.primitive.name in ELEMENTWISE:
            for atom in equation.invars:
                if atom.aval.shape == equation.outvars[0].aval.shape:
                    want(atom, splits[0])
        elif (called := inlined(equation)) is not None:
            inner = wanted_pieces(called, splits)
            for atom, v in zip(equation.invars, called.invars, strict=True):
                want(atom, inner.get(v))
    return hints


def inlined(equation: Any) -> Any:
    """The program that an equation calls, if it may be inlined; else ``None``."""
    called = _jax.called_program(equation)
    # A jax.checkpoint is computed twice, and gets whole operands both times.
    stays = equation.primitive.name in CHECKPOINTS or called is None or called.constvars
    return None if stays else called


def may_scatter(equation: Any) -> bool:
    """Whether a sum may be carried out in another way than as an all-reduce."""
    return equation.params["options"] in (None, CommunicationOptions())


def says_nothing_new(equation: Any, split: Split) -> bool:
    """Whether an equation only asks for the parts on logical devices that the pieces of a value have already."""
    if equation.primitive.name not in SPLITS or not any(split.axes):
        return False
    return bool(wanted_sharding(equation.params) == spec_of(split.axes))
