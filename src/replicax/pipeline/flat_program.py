"""Flat programs: a captured program as one list of operations, so that each can be given a place of its own.

A call of a jitted helper is inlined; an operation that goes operand by operand, such as one all-reduce of many
gradients, becomes an operation for each. Marks are gone (they have been answered), and so is what has no use.
The list is rewritten for the mesh of one logical device, as the program was captured in that of all of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from replicax import _jax
from replicax._jax.primitive_families import COTANGENT_SUMS, JITTED, SPLITS
from replicax.collectives import gathered_p
from replicax.errors import PlacementError
from replicax.execution.program.collective_operations import AGREEING, ONE_BY_ONE
from replicax.execution.program.inlining import Inlining, needed
from replicax.execution.program.marks import assign_p, assigns
from replicax.execution.program.program import Program


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlatOperation:
    """One operation of a flat program."""

    equation: Any
    sibling_of: int | None = None
    """Operations with the same number came from one that took all their operands at once."""

    @property
    def operands(self) -> list[Any]:
        """The values that it needs."""
        return _jax.without_literals(self.equation.invars)

    @property
    def results(self) -> list[Any]:
        """The values that it computes."""
        return list(self.equation.outvars)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A program as one list of operations over one replica's values."""

    inputs: list[Any]  # the variables that it reads, its arguments, and its constants, in this order
    # In an order in which they can run. Some only tell where values were whose gradients go back there.
    operations: list[FlatOperation]
    outputs: list[Any]  # the new values of the variables that it writes, and its results; some may be literals
    closed_over: list[Any]  # those of the inputs that are constants
    constants: list[Any]  # their values

    def jaxpr(self, like: _jax.Jaxpr) -> _jax.Jaxpr:
        """The flat program as a jaxpr."""
        return _jax.program_of(like, self.inputs, [o.equation for o in self.operations], self.outputs)

    def used(self) -> list[FlatOperation]:
        """The operations that have to run, in order."""
        return _used_operations(self.operations, self.outputs)


def flatten(program: Program, mesh: Mesh) -> Flat:
    """The operations of ``program``, for the mesh of one logical device of each replica."""
    run = _Flattening(_jax.abstract_mesh(mesh, mesh.axis_names))
    inputs = [_jax.fresh(v, run.mesh) for v in program.jaxpr.invars]
    outputs = run.inline(program.jaxpr, inputs)
    assignments = [o.equation for o in _used_operations(run.operations, outputs) if o.equation.primitive is assign_p]
    sent_back = {equation.params["number"] for equation in assignments if equation.params["back"]}
    operations = _sums_in_order(_used_operations(run.operations, outputs, sent_back), outputs)
    closed_over = [*inputs[len(program.reads) + len(program.arguments) :], *run.constants]
    constants = [*program.constants, *run.constants.values()]
    return Flat([*inputs, *run.constants], operations, outputs, closed_over, constants)


class _Flattening(Inlining[Any]):
    one_by_one = ONE_BY_ONE | AGREEING | {gathered_p.name}  # sums over replicas are one operation for each, too

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.operations: list[FlatOperation] = []
        self.constants: dict[Any, Any] = {}

    def literal(self, literal: _jax.Literal) -> Any:
        return _jax.fresh(literal, self.mesh)

    def constant(self, variable: Any, array: Any) -> Any:
        own = _jax.fresh(variable, self.mesh)
        self.constants[own] = array
        return own

    def is_inlined(self, call: _jax.Equation, called: _jax.Jaxpr) -> bool:
        return call.primitive.name in JITTED or assigns(called)

    def add(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name in SPLITS:
            raise PlacementError(
                f"the value at {_jax.source_line(equation)} is split over (or replicated to) the logical devices, in a "
                "step that assigns others to one device each: a step does the one or the other"
            )
        if any(map(assigns, _jax.sub_jaxprs(equation))):
            raise PlacementError(
                f"a value is assigned to a logical device inside the {name} at {_jax.source_line(equation)}: a loop or "
                "branch runs on one device. Assign what goes into it, or write the loop (over the microbatches, say) "
                "in Python"
            )
        results = [_jax.fresh(v, self.mesh) for v in equation.outvars]
        self.operations.append(FlatOperation(_jax.on_mesh(equation, operands, results, self.mesh)))
        return results

    def add_each(self, equation: _jax.Equation, operands: list[Any]) -> Sequence[Any]:
        number = len(self.operations)
        results = super().add_each(equation, operands)
        siblings = [dataclasses.replace(o, sibling_of=number) for o in self.operations[number:]]
        self.operations[number:] = siblings
        return results

    def refused(self, line: str) -> PlacementError:
        return PlacementError(
            f"the mutable array at {line} can't be placed: a step that assigns values to logical devices may have none "
            "(jax.new_ref)"
        )


def _used_operations(
    operations: Sequence[FlatOperation], outputs: Sequence[Any], assignments: Container[int] = ()
) -> list[FlatOperation]:
    """The operations that act, or on which one of the ``outputs`` or ``assignments`` depends."""

    def stays(operation: FlatOperation) -> bool:
        equation = operation.equation
        is_assignment = equation.primitive is assign_p and equation.params["number"] in assignments
        return is_assignment or _jax.has_side_effects(equation)

    return needed(operations, _jax.without_literals(outputs), stays)


def _sums_in_order(operations: Sequence[FlatOperation], outputs: Sequence[Any]) -> list[FlatOperation]:
    """The operations, with the parts of a gradient added up in the order of their uses forward.

    JAX adds up the contributions of a value's uses from the last to the first. The first microbatch is through first,
    however, and its contribution would have to be kept until the end.
    """
    uses = collections.Counter([*_jax.without_literals(outputs), *(v for o in operations for v in o.operands)])
    sums = {o.results[0]: o.equation for o in operations if o.equation.primitive.name in COTANGENT_SUMS}
    maker = {v: i for i, o in enumerate(operations) for v in o.results}
    inner = {v for e in sums.values() for v in e.invars if v in sums and uses[v] == 1}

    def parts(atom: Any, root: bool = False) -> list[Any]:
        if isinstance(atom, _jax.Literal) or not (root or atom in inner):
            return [atom]
        return [part for v in sums[atom].invars for part in parts(v)]

    result = []
    for operation in operations:
        equation = operation.equation
        total: Any = equation.outvars[0] if equation.outvars else None
        if total in inner:
            continue  # as part of a sum
        if total not in sums or not inner.intersection(equation.invars):
            result.append(operation)
            continue
        first, *rest = sorted(parts(total, root=True), key=lambda v: -maker.get(v, -1))
        for i, part in enumerate(rest):
            so_far = total if i == len(rest) - 1 else _jax.fresh(total, total.aval.sharding.mesh)
            result.append(FlatOperation(equation.replace(invars=[first, part], outvars=[so_far])))
            first = so_far
    return result


def bytes_of(value: Any) -> int:
    """The size of an array, of which only shape and dtype are known; of dtypes below 8 bits a byte holds several."""
    is_extended = jnp.issubdtype(value.dtype, jax.dtypes.extended)  # such as random keys
    bits = 8 * value.dtype.itemsize if is_extended else jax.dtypes.itemsize_bits(value.dtype)
    return -(-math.prod(value.shape) * int(bits) // 8)
