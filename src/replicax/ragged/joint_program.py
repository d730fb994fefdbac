"""The joint program: the programs that replicas of different sizes run become one program for all of them.

Common parts of the programs (an optimizer's update, a schedule) are in it once, for all replicas. The programs must
have the same collectives in the same order, and so has the joint program. Between two collectives, each replica takes
the branch of its size, which contains no collective. Values that differ in size go from one such branch to a later one,
and in and out of the program, as arrays with room for the largest, each at the start; a branch works on the part that
it really has.

Variables, donation, layouts, loops over several steps and workers are handled as for any other program.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax import _jax
from replicax.devices.arrays import put
from replicax.devices.mesh import mirrored_sharding
from replicax.execution.program.collective_operations import ragged_gather_p, ragged_part_p, replicas_meet
from replicax.execution.program.program import Program, Result, Use, VariableRef
from replicax.execution.replica_values import largest_of
from replicax.execution.tracing.arguments import CantJoinError
from replicax.execution.tracing.capture import traced_inside
from replicax.locality import T
from replicax.pytrees import are_equal
from replicax.ragged.assembly import Assembly, Joint
from replicax.ragged.straight_line import Straight, StraightOperation
from replicax.ragged.value_numbering import ValueNumbering
from replicax.values import Components, PerReplica
from replicax.workers.replicas import Replicas


def joined(programs: Sequence[Program], size_of: Sequence[int], replicas: Replicas) -> Program:
    """One program in which each replica does the same as in the program of its size, whose number is in ``size_of``.

    Raises:
      LocalityError, DeadlockError: see :func:`replicax.execution.program.infer.infer`.
      CantJoinError: they have different collectives, variables or results, or what differs in size can't be kept apart.
    """
    return _Joining(programs, size_of, replicas).program()


_OF_DIFFERENT_SIZES = (
    "{} works on arrays that differ in size between replicas: {}. Of the collectives only all_gather of the replica "
    "context takes any number of rows: replicax.get_replica_context().all_gather(x, axis=0). Otherwise combine each "
    "replica's rows first, as in all_reduce('sum', x.sum(0)), or have small batches padded: "
    "strategy.distribute_dataset(dataset, replicax.InputOptions(partial_batch='pad')), or 'drop'."
)


def _shown(kinds: Sequence[Sequence[tuple[tuple[int, ...], Any]]]) -> str:
    """The first operand that differs, of each size."""
    column = next(column for column in zip(*kinds, strict=True) if len(set(column)) > 1)
    return ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in dict.fromkeys(column))


class _Joining:
    def __init__(self, programs: Sequence[Program], size_of: Sequence[int], replicas: Replicas) -> None:
        self.programs = programs
        self.replicas = replicas
        self.reads: list[Use] = list({use.slot: use for program in programs for use in program.reads}.values())
        self.numbers = ValueNumbering()
        self.inputs: list[int] = []
        self.ragged: dict[int, Joint] = {}
        self._check_alike()
        self._number_inputs()
        lines: dict[int, Straight] = {}
        # Those with rows first: the others have no collective that these lack.
        for k in sorted(range(len(programs)), key=lambda k: any(0 in aval.shape for aval, _ in programs[k].arguments)):
            others = next(iter(lines.values())).collectives if lines else []
            lines[k] = self._straight(k, size_of.index(k), others)
        self.lines = [lines[k] for k in range(len(programs))]
        given = {*self.inputs, *self.numbers.constants}
        self.assembly = Assembly(self.lines, tuple(size_of), self.numbers, given, self.ragged)
        self._check_marks()
        self._check_collectives()

    # --- checks -----------------------------------------------------------------------------------------

    def _check_alike(self) -> None:
        first, *others = self.programs
        for other in others:
            if {use.slot for use in other.writes} != {use.slot for use in first.writes}:
                raise CantJoinError("replicas of different sizes write different variables")
            if other.result_tree != first.result_tree:
                raise CantJoinError(
                    f"replicas of different sizes return different structures: {first.result_tree}, {other.result_tree}"
                )

    def _check_marks(self) -> None:
        for mark in [mark for line in self.lines for mark in line.marks]:
            if not self.assembly.is_own(mark.value):
                mark.obligation.check(mark.found, mark.equation)
            elif mark.found is not T and not mark.obligation.refused.isdisjoint({T, mark.found}):
                raise CantJoinError(
                    f"whether replicas agree on the value at {_jax.source_line(mark.equation)} depends on their sizes"
                )

    def _check_collectives(self) -> None:
        if len({len(line.collectives) for line in self.lines}) > 1:
            raise CantJoinError("replicas of different sizes do not come to the same collectives")
        for operations in zip(*(line.collectives for line in self.lines), strict=True):
            first = operations[0].equation
            inside = [e for program in _jax.sub_jaxprs(first) for e in _jax.equations_of(program) if replicas_meet(e)]
            at = f"the {first.primitive.name} at {_jax.source_line(_jax.located(first, inside))}"
            if len({o.equation.primitive for o in operations}) > 1:
                raise CantJoinError(f"replicas of different sizes do not come to the same collectives: see {at}")
            if first.primitive in (ragged_gather_p, ragged_part_p):
                continue
            kinds = [[(v.aval.shape, v.aval.dtype) for v in o.equation.invars] for o in operations]
            if any(other != kinds[0] for other in kinds):
                if replicas_meet(first):  # no executor could combine them
                    raise ValueError(_OF_DIFFERENT_SIZES.format(at, _shown(kinds)))
                raise CantJoinError(
                    f"{at} has a collective inside, and works on arrays that differ in size between replicas"
                )
            if len({self.numbers.what(o.equation) for o in operations}) > 1:
                raise CantJoinError(f"{at} has a collective inside, and does something else for each size")

    # --- taking apart -----------------------------------------------------------------------------------

    def _number_inputs(self) -> None:
        self.inputs += [self._given(("variable", use.slot), use.aval) for use in self.reads]
        for position, column in enumerate(zip(*(p.arguments for p in self.programs), strict=True)):
            shapes = [aval.shape for aval, _ in column]
            aval = column[0][0]
            if len(set(shapes)) == 1:
                self.inputs.append(self._given(("argument", position), aval))
                continue
            whole = self._given(("argument", position), aval.update(shape=largest_of(shapes)))
            self.inputs.append(whole)
            self.ragged[whole] = tuple(
                self._given(("own argument", k, position), own_aval) for k, (own_aval, _) in enumerate(column)
            )

    def _given(self, key: Any, aval: Any) -> int:
        return self.numbers.of(key, [aval])[0]

    def _straight(self, k: int, replica: int, others: Sequence[StraightOperation]) -> Straight:
        program = self.programs[k]
        inputs = [self._given(("variable", use.slot), use.aval) for use in program.reads]
        for position, (aval, _) in enumerate(program.arguments):
            whole = self._given(("argument", position), aval)
            inputs.append(self.ragged[whole][k] if whole in self.ragged else whole)
        inputs += map(self.numbers.of_constant, program.constants)
        return Straight(program, inputs, self.numbers, replica, others)

    # --- putting together -------------------------------------------------------------------------------

    def program(self) -> Program:
        """The joint program."""
        first = self.programs[0]
        order = [use.slot for use in first.writes]
        outputs, results = [], []
        places = [{use.slot: i for i, use in enumerate(p.writes)} for p in self.programs]
        for slot in order:
            outputs.append(tuple(line.outputs[at[slot]] for line, at in zip(self.lines, places, strict=True)))
        for column in zip(*(p.results for p in self.programs), strict=True):
            if all(r.index is None for r in column):
                results.append(Result(None, self._object([r.value for r in column])))
                continue
            if any(r.index is None for r in column):
                raise CantJoinError("replicas of different sizes return different kinds of objects")
            at = [len(p.writes) + (r.index or 0) for p, r in zip(self.programs, column, strict=True)]
            outputs.append(tuple(line.outputs[i] for line, i in zip(self.lines, at, strict=True)))
            shapes = [self.numbers.avals[v].shape for v in outputs[-1]]
            of_replicas = tuple(shapes[k] for k in self.assembly.size_of) if len(set(shapes)) > 1 else None
            results.append(Result(len(outputs) - 1 - len(order), None, of_replicas))
        constants = dict(self.numbers.constants)
        inputs = [*self.inputs, *constants]
        with _jax.enable_x64_as_in(*(p.jaxpr for p in self.programs)):
            jaxpr, closed_over = traced_inside(
                self.replicas,
                # A copy, as this object must hold no values of the trace when it is over.
                lambda *arrays: copy.copy(self.assembly).run(outputs, dict(zip(inputs, arrays, strict=True))),
                [_jax.shape_of(self.numbers.avals[v]) for v in inputs],
            )
            everywhere = mirrored_sharding(self.replicas.mesh)
            arrays = [put(value, everywhere) for value in (*constants.values(), *closed_over)]
        timeouts = [p.timeout for p in self.programs if p.timeout is not None]
        n = len(self.reads)
        return dataclasses.replace(
            first,
            jaxpr=jaxpr,
            reads=tuple(self.reads),
            arguments=tuple(
                (_jax.shape_of(self.numbers.avals[self.inputs[n + i]]), locality)
                for i, (_, locality) in enumerate(first.arguments)
            ),
            constants=arrays,
            results=tuple(results),
            obligations={},  # they have been answered
            timeout=max(timeouts, default=None),
        )

    def _object(self, column: Sequence[Any]) -> Any:
        """The result of ``run`` for a leaf that is not computed."""
        objects = [value() if isinstance(value, VariableRef) else value for value in column]
        if all(value is objects[0] or are_equal(value, objects[0]) for value in objects):
            return column[0]
        here = self.replicas.local_replicas
        values = tuple(objects[self.assembly.size_of[replica]] for replica in here)
        return PerReplica(Components(values, here, len(self.assembly.size_of)))
