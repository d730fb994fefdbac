"""Regions: the parts of a placed program, each of which is one program on one logical device.

Two operations of a device belong to one region if they depend on the same values from other devices, and if the same
values to other devices depend on them. So nothing waits for anything that it does not need: no value is sent later, and
no region begins later, than if each operation were on its own. Of a loop over microbatches each device gets a region
for each microbatch, forward and backward, one that adds up the gradients, and so on; the user says nothing of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from replicax import _jax
from replicax.execution.program.marks import assign_p
from replicax.pipeline.flat_program import Flat
from replicax.pipeline.placement import Placement


@dataclasses.dataclass(eq=False)
class Region:
    """Operations that run as one program on one logical device of each replica."""

    device: int  # the logical device
    operations: list[int]  # their numbers in the flat program, in order
    needs: dict[Any, None]  # the values that must be there before
    makes: dict[Any, None]  # the values that it computes
    cost: float  # how long it takes, in arbitrary units
    sends: set[Any] = dataclasses.field(default_factory=set)  # the values that are sent to other devices
    outputs: list[int] = dataclasses.field(default_factory=list)  # which of the program's outputs come out of it

    def joined(self, later: Region) -> Region:
        """This region and another one after it, as one."""
        return Region(
            self.device,
            sorted({*self.operations, *later.operations}),
            self.needs | {v: None for v in later.needs if v not in self.makes},
            self.makes | later.makes,
            self.cost + later.cost,
            self.sends | later.sends,
            self.outputs + later.outputs,
        )


def cut(flat: Flat, placement: Placement, wanted: Sequence[tuple[Any, int]]) -> list[Region]:
    """The regions of a program, in no particular order.

    ``wanted`` are values, each with the device where it is needed at the end.
    """
    used = set(flat.used())
    computed = [
        (i, placement.devices[i], operation.equation)
        for i, operation in enumerate(flat.operations)
        if operation in used and placement.devices[i] is not None and operation.equation.primitive is not assign_p
    ]
    needs = {i: needed(e.invars, placement) for i, _, e in computed}
    made_on = {v: k for _, k, e in computed for v in e.outvars}

    # Values that cross, each a bit; which of them an operation depends on, and which depend on it.
    bits: dict[tuple[Any, int | None], int] = {}
    received: dict[Any, int] = {}
    before: dict[int, int] = {}
    for i, device, equation in computed:
        mask = 0
        for v in needs[i]:
            mask |= received.get(v, 0)
            if v in made_on and made_on[v] != device:
                mask |= 1 << bits.setdefault((v, device), len(bits))
        before[i] = mask
        received.update(dict.fromkeys(equation.outvars, mask))
    for v, device in wanted:
        if v in made_on and made_on[v] != device:
            bits.setdefault((v, device), len(bits))
    leaving: dict[Any, int] = {}
    for (v, _), bit in bits.items():
        leaving[v] = leaving.get(v, 0) | 1 << bit
    after: dict[int, int] = {}
    for i, _, equation in reversed(computed):
        mask = 0
        for v in equation.outvars:
            mask |= leaving.get(v, 0)
        after[i] = mask
        for v in needs[i]:
            leaving[v] = leaving.get(v, 0) | mask

    keys = {i: (device, before[i], after[i]) for i, device, _ in computed}
    # A value that waits for nothing and is sent nowhere, such as the decay of an optimizer's slots, would be computed
    # at once, and kept until it is needed. It rather belongs to the operation that needs it.
    used_by: dict[Any, set[Any]] = {v: {None} for v, _ in wanted}
    for i, _, equation in reversed(computed):
        users = set().union(*(used_by.get(v, set()) for v in equation.outvars))
        if not before[i] and not after[i] and len(users) == 1 and None not in users:
            [keys[i]] = users
        for v in needs[i]:
            used_by.setdefault(v, set()).add(keys[i])

    sent = {v for v, _ in bits}
    regions: dict[Any, Region] = {}
    for i, device, equation in computed:
        assert device is not None
        region = regions.setdefault(keys[i], Region(device, [], {}, {}, 0.0))
        region.operations.append(i)
        region.needs.update((v, None) for v in needs[i] if v not in region.makes)
        region.makes.update(dict.fromkeys(equation.outvars))
        region.cost += cost_of(equation)
        region.sends.update(sent.intersection(equation.outvars))
    return list(regions.values())


def needed(atoms: Iterable[Any], placement: Placement) -> list[Any]:
    """Return the values that have to be on a device for ``atoms`` to be there."""

    def leaves(atom: Any) -> Iterator[Any]:
        atom = placement.source(atom)
        if isinstance(atom, _jax.Literal):
            return
        if atom not in placement.anew:
            yield atom
        else:
            for leaf in placement.leaves[atom]:
                yield from leaves(leaf)

    return list(dict.fromkeys(leaf for atom in atoms for leaf in leaves(atom)))


def program_of(
    region: Region, flat: Flat, placement: Placement, like: _jax.Jaxpr, outputs: Sequence[Any]
) -> _jax.Jaxpr:
    """The region as a program that takes what it needs, and returns ``outputs``."""
    equations: list[Any] = []
    present: set[Any] = set()

    def made(atom: Any) -> Any:
        """``atom`` under its name in the region, after making it if it is made wherever it is used."""
        atom = placement.source(atom)
        if isinstance(atom, _jax.Literal) or atom in present or atom not in placement.anew:
            return atom
        equation = flat.operations[placement.anew[atom]].equation
        equations.append(equation.replace(invars=[made(v) for v in equation.invars]))
        present.update(equation.outvars)
        return atom

    for group in _siblings(region, flat):
        equation = flat.operations[group[0]].equation
        operands = [made(v) for i in group for v in flat.operations[i].equation.invars]
        results = [v for i in group for v in flat.operations[i].equation.outvars]
        equations.append(equation.replace(invars=operands, outvars=results))
    outputs = [made(v) for v in outputs]
    return _jax.program_of(like, list(region.needs), equations, outputs)


def _siblings(region: Region, flat: Flat) -> Iterator[list[int]]:
    """The operations of a region; those that were one (a sum of many gradients, say) together."""
    group: list[int] = []
    for i in region.operations:
        number = flat.operations[i].sibling_of
        if group and (number is None or number != flat.operations[group[0]].sibling_of):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# --- the cost of an operation -------------------------------------------------------------------------


def cost_of(equation: Any) -> float:
    """The multiplications and additions of one run; if there are none, the number of elements of the results."""

    def of_one(one: _jax.Equation) -> int:
        return _jax.product_flops(one) or sum(math.prod(getattr(v.aval, "shape", ())) for v in one.outvars)

    return float(_jax.executed_sum(equation, of_one))
