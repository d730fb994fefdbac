"""Local replicas: run a program on devices that have several replicas each.

The program is that of one replica. Values that are the same on all replicas are computed once for each device. Of
values that may differ a device has one for each of its replicas: an array ``[k, *shape]``. What computes them
between two collectives is a *segment*: a loop runs it for one replica after the other. In a collective the replicas of
a device come together first, and then the devices. So a device needs memory for the temporaries of one replica at a
time, and keeps for all of its replicas only what goes from one segment to a later one. Sums over the replicas of which
nothing else is needed are added up in the loop.

Loops, branches and calls with collectives inside are entered; the others belong to a segment as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.operation_params import dims_along
from replicax._jax.primitive_families import SUMS
from replicax.collectives import all_reduce_p
from replicax.devices.mesh import REPLICA_AXIS
from replicax.devices.summation_order import elements_in_order
from replicax.execution.compiled.local_values import Each
from replicax.execution.program.collective_operations import over_replicas
from replicax.execution.program.marks import replica_number_p
from replicax.locality import Locality, M, T
from replicax.shared_devices.entered_programs import Walk, enter
from replicax.shared_devices.local_collectives import (
    LOCAL_REDUCTIONS,
    check_all_take_part,
    everyones,
    exchanged,
    reduced_in_groups,
)
from replicax.shared_devices.local_sums import LocalSums, wide
from replicax.shared_devices.replica_stages import ReplicaStage, asks_for_position, stages_of, used_by
from replicax.shared_devices.replicas_together import ReplicaTerm, can_be_together, dtype_of, terms_of


class LocalReplicas(Walk):
    """The pass over one program."""

    def __init__(
        self,
        count: int,  # how many replicas there are
        per_device: int,  # how many of them each device has
        localities: Mapping[Any, Locality],  # of the values in the program
        # How many of a device's replicas run at the same time, where they can; it divides ``per_device``.
        at_once: int = 1,
        # Whether sums are taken in a fixed order, as they would be on any other number of devices.
        in_order: bool = False,
    ) -> None:
        self.count = count
        self.per_device = per_device
        self.localities = localities
        self.at_once = at_once
        self.sums = LocalSums(count, per_device, in_order)
        self.once = OnceForAll(in_order)
        first = lax.axis_index(REPLICA_AXIS) * per_device if per_device < count else jnp.int32(0)
        self.numbers = first + jnp.arange(per_device, dtype=jnp.int32)

    # --- values -----------------------------------------------------------------------------------------

    def differs(self, atom: Any) -> bool:
        return not isinstance(atom, _jax.Literal) and self.localities.get(atom, M) is T

    def each(self, value: Any, atom: Any) -> Each:
        """A value, for each replica."""
        if isinstance(value, Each):
            return value
        value = value if isinstance(value, jax.Array) else jnp.asarray(value, atom.aval.dtype)
        return Each(jnp.broadcast_to(value, (self.per_device, *value.shape)))

    def as_wanted(self, value: Any, atom: Any, differs: bool) -> Any:
        return self.each(value, atom) if differs else _one(value)

    # --- programs ---------------------------------------------------------------------------------------

    def run(
        self, jaxpr: _jax.Jaxpr, values: Sequence[Any], differ: Sequence[bool], constants: Sequence[Any] = ()
    ) -> list[Any]:
        stages = stages_of(jaxpr, [isinstance(v, Each) for v in values], self.differs)
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *values], strict=True))
        for stage in stages:
            self.once.go(stage.common, env)
            self.segment(stage, env)
            self.go(stage.collectives, env)
        results = [v.val if isinstance(v, _jax.Literal) else env[v] for v in jaxpr.outvars]
        return [self.as_wanted(r, v, d) for r, v, d in zip(results, jaxpr.outvars, differ, strict=True)]

    def segment(self, stage: ReplicaStage, env: dict[Any, Any]) -> None:
        """Run what replicas do by themselves between two collectives, one replica after the other."""
        if not stage.alone:
            return
        used = used_by(stage.alone)
        per_replica = [v for v in used if isinstance(env.get(v), Each)]
        shared = {v: env[v] for v in used if v in env and v not in per_replica}
        together = self.at_once > 1 and can_be_together(stage, self.differs)
        terms = terms_of(stage, self.differs) if together else [ReplicaTerm(v) for v in stage.summed]

        def replica(inputs: Any) -> tuple[list[list[Any]], list[Any], list[Any]]:
            number, arrays = inputs
            [number] = replica_number_p.bind(number)
            local = {**shared, **dict(zip(per_replica, arrays, strict=True))}
            OneReplica(number).go(stage.alone, local)
            return (
                [[local[v] for v in t.parts] for t in terms],
                [local[v] for v in stage.alike],
                [local[v] for v in stage.kept],
            )

        if self.per_device == 1:
            parts, alike, kept = replica((self.numbers[0], [env[v].array[0] for v in per_replica]))
            env.update((v, Each(array[None])) for v, array in zip(stage.kept, kept, strict=True))
            env.update(zip(stage.alike, alike, strict=True))
            env.update((v, self.sums.of_one(x)) for v, [x] in zip(stage.summed, parts, strict=True))
            return

        def iteration(state: tuple[list[Any], list[Any]], inputs: Any) -> tuple[Any, list[Any]]:
            if together:
                parts, alike, kept = jax.vmap(replica)(inputs)
                new = [term.total(arrays) for term, arrays in zip(terms, parts, strict=True)]
                alike = [x[0] for x in alike]
            else:
                parts, alike, kept = replica(inputs)
                new = [wide(x) for [x] in parts]
            return (self.sums.with_terms(state[0], new, inputs[0]), alike), kept

        nothing_yet = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in stage.alike]
        inputs = self.numbers, [env[v].array for v in per_replica]
        if together:
            n = self.per_device // self.at_once
            inputs = jax.tree.map(lambda x: x.reshape(n, self.at_once, *x.shape[1:]), inputs)
        (totals, alike), kept = lax.scan(iteration, (self.sums.no_terms(stage.summed), nothing_yet), inputs)
        if together:
            kept = [x.reshape(self.per_device, *x.shape[2:]) for x in kept]
        env.update((v, Each(array)) for v, array in zip(stage.kept, kept, strict=True))
        env.update(zip(stage.alike, alike, strict=True))
        env.update(zip(stage.summed, self.sums.finished(totals, stage.summed), strict=True))

    # --- collectives ------------------------------------------------------------------------------------

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        """The results of a collective, or of an operation that has one inside."""
        if not over_replicas(equation.params):
            return enter(self, equation, operands)
        if equation.primitive is all_reduce_p:
            return self.sums.all_reduce(equation, operands)
        reduce = LOCAL_REDUCTIONS.get(equation.primitive.name)
        in_groups = reduce is not None and _jax.has_groups(equation.params)
        if not in_groups:
            check_all_take_part(equation)
        if reduce is not None and not in_groups:
            return self.sums.reduced(equation, operands, reduce)
        stacks = [self.each(v, atom).array for v, atom in zip(operands, equation.invars, strict=True)]
        if reduce is not None:
            wholes = [everyones(stack, self.count) for stack in stacks]
            reduce = self.sums.in_group(reduce)
            return [Each(x) for x in reduced_in_groups(equation, wholes, self.numbers, reduce)]
        in_order = self.sums.blocks is not None
        results = [exchanged(equation, stack, self.numbers, self.count, in_order) for stack in stacks]
        return [Each(r) if self.differs(v) else r for r, v in zip(results, equation.outvars, strict=True)]


def _one(value: Any) -> Any:
    """A value that is the same on all replicas."""
    return lax.index_in_dim(value.array, 0, keepdims=False) if isinstance(value, Each) else value


class OneReplica(Walk):
    """Computes what one replica does by itself; all that differs between replicas is in the values."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if asks_for_position(equation):
            return [self.number]
        if _jax.is_or_contains(equation, asks_for_position):
            return enter(self, equation, operands)
        return _jax.bind(equation, operands)


class OnceForAll(Walk):
    """Computes once what all replicas would do alike.

    If ``in_order``, elements are added up in an order that does not depend on how an array lies in memory: a norm then
    has the same bits where its operand is in pieces between steps, and where it is not.
    """

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        operands = list(map(_one, operands))
        if not self.in_order:
            return _jax.bind(equation, operands)
        if _adds_up(equation):
            array = jnp.asarray(operands[0])
            total = elements_in_order(wide(array), dims_along(equation.params, array.ndim))
            return [total.astype(array.dtype)]
        is_entered = _jax.control_flow_of(equation) is not None or _jax.called_program(equation) is not None
        if is_entered and _jax.is_or_contains(equation, _adds_up):
            return enter(self, equation, operands)
        return _jax.bind(equation, operands)


def _adds_up(equation: _jax.Equation) -> bool:
    """Whether it adds up elements of an array, and rounds."""
    return equation.primitive.name in SUMS and jnp.issubdtype(dtype_of(equation.invars[0]), jnp.inexact)
