"""Local replicas: run a program on devices that have several replicas each.

The program is that of one replica. Values that are the same on all replicas (M) are computed once for each device. Of
values that may differ (T) a device has one for each of its replicas: an array ``[k, *shape]``. What computes them
between two collectives is a *stretch*: a loop runs it for one replica after the other. In a collective the replicas of
a device come together first, and then the devices. So a device needs memory for the temporaries of one replica at a
time, and keeps for all of its replicas only what goes from one stretch to a later one. Sums over the replicas of which
nothing else is needed are added up in the loop.

Loops, branches and calls with collectives inside are entered; the others belong to a stretch as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.contractions import bind_in_branch
from replicax.collectives import all_reduce_p, sums_of_blocks
from replicax.devices.mesh import REPLICA_AXIS
from replicax.devices.summation_order import Blocks, added_in_pairs
from replicax.execution.compiled.local_collectives import (
    LOCAL_REDUCTIONS,
    check_all_take_part,
    everyones,
    exchanged,
    reduced_in_groups,
    widened,
)
from replicax.execution.compiled.local_values import Each
from replicax.execution.compiled.replica_stages import (
    ReplicaStage,
    asks_for_position,
    is_sum,
    stages_of,
    used_by,
)
from replicax.execution.compiled.replicas_together import ReplicaTerm, can_be_together, terms_of
from replicax.execution.program.collective_operations import over_replicas
from replicax.execution.program.marks import turn_p
from replicax.locality import Locality, M, T


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Total:
    """The sum of a value over this device's replicas, of which nothing else is needed.

    In a fixed order that is ``[blocks, *shape]``: the sums of blocks of these replicas.
    """

    array: Any


class LocalReplicas:
    """The pass over one program.

    Args:
      count: how many replicas there are.
      per_device: how many of them each device has.
      localities: those of the values in the program.
      on_cpu: whether it is for CPUs.
      at_once: how many of a device's replicas run at the same time, where they can; it divides ``per_device``.
      in_order: whether sums are taken in a fixed order, as they would be on any other number of devices.
    """

    def __init__(
        self,
        count: int,
        per_device: int,
        localities: Mapping[Any, Locality],
        on_cpu: bool,
        at_once: int = 1,
        in_order: bool = False,
    ) -> None:
        self.count = count
        self.per_device = per_device
        self.localities = localities
        self.at_once = at_once
        self.on_cpu = on_cpu
        self.blocks = Blocks.of(per_device) if in_order else None
        self.bind_alone: Callable[..., list[Any]] = bind_in_branch if on_cpu else _jax.bind
        first = lax.axis_index(REPLICA_AXIS) * per_device if per_device < count else jnp.int32(0)
        self.numbers = first + jnp.arange(per_device, dtype=jnp.int32)

    # --- values -----------------------------------------------------------------------------------------

    def differs(self, atom: Any) -> bool:
        """Whether replicas may differ in a value."""
        return not isinstance(atom, _jax.Literal) and self.localities.get(atom, M) is T

    def each(self, value: Any, atom: Any) -> Each:
        """A value, for each replica."""
        if isinstance(value, Each):
            return value
        value = value if isinstance(value, jax.Array) else jnp.asarray(value, atom.aval.dtype)
        return Each(jnp.broadcast_to(value, (self.per_device, *value.shape)))

    def one(self, value: Any) -> Any:
        """A value that is the same on all replicas."""
        return lax.index_in_dim(value.array, 0, keepdims=False) if isinstance(value, Each) else value

    def as_wanted(self, value: Any, atom: Any, differs: bool) -> Any:
        return self.each(value, atom) if differs else self.one(value)

    # --- programs ---------------------------------------------------------------------------------------

    def run(
        self, jaxpr: _jax.Jaxpr, values: Sequence[Any], differ: Sequence[bool], constants: Sequence[Any] = ()
    ) -> list[Any]:
        """Apply ``jaxpr`` to bare values and :class:`Each`; return such.

        Args:
          jaxpr: the program.
          values: its operands.
          differ: for each result whether it is to be an :class:`Each`, and otherwise bare.
          constants: what it has closed over.
        """
        stages = stages_of(jaxpr, [isinstance(v, Each) for v in values], self.differs)
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *values], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else env[atom]

        for stage in stages:
            for equation in stage.common:
                operands = [self.one(read(v)) for v in equation.invars]
                env.update(zip(equation.outvars, _jax.bind(equation, operands), strict=True))
            self.stretch(stage, env)
            for equation in stage.meetings:
                env.update(
                    zip(equation.outvars, self.meeting(equation, [read(v) for v in equation.invars]), strict=True)
                )
        return [self.as_wanted(read(v), v, d) for v, d in zip(jaxpr.outvars, differ, strict=True)]

    def stretch(self, stage: ReplicaStage, env: dict[Any, Any]) -> None:
        """What replicas do by themselves between two collectives, one replica after the other."""
        if not stage.alone:
            return
        used = used_by(stage.alone)
        given = [v for v in used if isinstance(env.get(v), Each)]
        shared = {v: env[v] for v in used if v in env and v not in given}
        together = self.at_once > 1 and can_be_together(stage, self.differs)
        terms = terms_of(stage, self.differs) if together else [ReplicaTerm(v) for v in stage.summed]

        def replica(mine: Any) -> tuple[list[list[Any]], list[Any], list[Any]]:
            number, arrays = mine
            [number] = turn_p.bind(number)
            local = {**shared, **dict(zip(given, arrays, strict=True))}
            _Alone(self, number).go(stage.alone, local)
            return (
                [[local[v] for v in t.parts] for t in terms],
                [local[v] for v in stage.alike],
                [local[v] for v in stage.kept],
            )

        if self.per_device == 1:
            parts, alike, kept = replica((self.numbers[0], [env[v].array[0] for v in given]))
            env.update((v, Each(array[None])) for v, array in zip(stage.kept, kept, strict=True))
            env.update(zip(stage.alike, alike, strict=True))
            env.update((v, _Total(_wide(x)[None])) for v, [x] in zip(stage.summed, parts, strict=True))
            return

        def turn(state: tuple[list[Any], list[Any]], mine: Any) -> tuple[Any, list[Any]]:
            if together:
                parts, alike, kept = jax.vmap(replica)(mine)
                new = [term.total(arrays, self.on_cpu) for term, arrays in zip(terms, parts, strict=True)]
                alike = [x[0] for x in alike]
            else:
                parts, alike, kept = replica(mine)
                new = [_wide(x) for [x] in parts]
            if self.blocks is not None:
                return (self.blocks.with_term(state[0], new, mine[0] % self.per_device), alike), kept
            return ([lax.add(a, b) for a, b in zip(state[0], new, strict=True)], alike), kept

        no_terms = jnp.zeros if self.blocks is None else self.blocks.no_terms
        zeros = [no_terms(v.aval.shape, widened(v.aval.dtype)) for v in stage.summed]
        nothing_yet = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in stage.alike]
        mine = self.numbers, [env[v].array for v in given]
        if together:
            mine = jax.tree.map(lambda x: x.reshape(-1, self.at_once, *x.shape[1:]), mine)
        (totals, alike), kept = lax.scan(turn, (zeros, nothing_yet), mine)
        if together:
            kept = [x.reshape(self.per_device, *x.shape[2:]) for x in kept]
        env.update((v, Each(array)) for v, array in zip(stage.kept, kept, strict=True))
        env.update(zip(stage.alike, alike, strict=True))
        if self.blocks is None:
            totals = [t.astype(v.aval.dtype) for v, t in zip(stage.summed, totals, strict=True)]
        else:
            totals = list(map(self.blocks.sums, totals))
        env.update(zip(stage.summed, map(_Total, totals), strict=True))

    # --- where replicas meet ----------------------------------------------------------------------------

    def meeting(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        """A collective, or what has one inside."""
        if not over_replicas(equation.params):
            return enter(self, equation, operands)
        if equation.primitive is all_reduce_p:
            return self.all_reduce(equation, operands)
        reduce = LOCAL_REDUCTIONS.get(equation.primitive.name)
        in_groups = reduce is not None and _jax.has_groups(equation.params)
        if not in_groups:
            check_all_take_part(equation)
        if reduce is not None and not in_groups:
            if self.blocks is not None and is_sum(equation):
                return self.sums_in_order(operands, equation.outvars, self.blocks, None)
            return _jax.bind(equation, [self.together(v, reduce, is_sum(equation)) for v in operands])
        stacks = [self.each(v, atom).array for v, atom in zip(operands, equation.invars, strict=True)]
        if reduce is not None:
            wholes = [everyones(stack, self.count) for stack in stacks]
            return [Each(x) for x in reduced_in_groups(equation, wholes, self.numbers, self.in_group(reduce))]
        results = [exchanged(equation, stack, self.numbers, self.count, self.blocks) for stack in stacks]
        return [Each(r) if self.differs(v) else r for r, v in zip(results, equation.outvars, strict=True)]

    def all_reduce(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if self.blocks is not None:
            return self.sums_in_order(operands, equation.outvars, self.blocks, equation.params["options"])
        local = [self.together(v, jnp.sum, is_sum=True) for v in operands]
        if self.per_device == self.count:
            return local
        return list(all_reduce_p.bind(*local, **{**equation.params, "per_device": self.per_device}))

    def sums_in_order(self, operands: list[Any], results: Sequence[Any], blocks: Blocks, options: Any) -> list[Any]:
        """The sums over all replicas, in their fixed order."""
        of_blocks = [self.in_blocks(v, blocks) for v in operands]
        if blocks.count == 1:  # as one sum, of which devices may need pieces only
            params = {"axes": (REPLICA_AXIS,), "options": options, "per_device": self.per_device, "in_order": True}
            sums = all_reduce_p.bind(*(x[0] for x in of_blocks), **params)
        else:
            sums = sums_of_blocks(of_blocks, options, self.per_device)
        return [total.astype(v.aval.dtype) for total, v in zip(sums, results, strict=True)]

    def in_blocks(self, value: Any, blocks: Blocks) -> Any:
        """``[blocks, *shape]``: the sums of a value over the blocks of this device's replicas."""
        if isinstance(value, _Total):
            return value.array
        if not isinstance(value, Each):
            value = jnp.asarray(value)
            value = Each(jnp.broadcast_to(value, (self.per_device, *value.shape)))
        array = _wide(value.array)
        return added_in_pairs(jnp.moveaxis(array.reshape(blocks.count, -1, *array.shape[1:]), 1, 0))

    def in_group(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """What reduces the values of a group of replicas, along a dim."""
        if self.blocks is None or reduce is not jnp.sum:
            return reduce
        return lambda array, dim: added_in_pairs(jnp.moveaxis(_wide(array), dim, 0))

    def together(self, value: Any, reduce: Callable[..., Any], is_sum: bool) -> Any:
        """What the replicas of this device make of a value, before the devices meet."""
        if isinstance(value, _Total):
            return value.array
        if isinstance(value, Each):
            return reduce(value.array, 0).astype(value.array.dtype)
        value = jnp.asarray(value)
        return value * jnp.asarray(self.per_device, value.dtype) if is_sum else value


def _wide(term: Any) -> Any:
    """A term of a sum, in the dtype in which it is added up."""
    return term.astype(widened(term.dtype))


class _Alone:
    """Does what one replica does by itself; all that differs between replicas is in the values."""

    def __init__(self, replicas: LocalReplicas, number: Any) -> None:
        self.replicas = replicas
        self.number = number

    def differs(self, atom: Any) -> bool:
        return False

    def one(self, value: Any) -> Any:
        return value

    def as_wanted(self, value: Any, atom: Any, differs: bool) -> Any:
        return value

    def go(self, equations: Sequence[_jax.Equation], env: dict[Any, Any]) -> None:
        for equation in equations:
            operands = [v.val if isinstance(v, _jax.Literal) else env[v] for v in equation.invars]
            env.update(zip(equation.outvars, self.results(equation, operands), strict=True))

    def run(
        self, jaxpr: _jax.Jaxpr, values: Sequence[Any], differ: Sequence[bool], constants: Sequence[Any] = ()
    ) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *values], strict=True))
        self.go(jaxpr.eqns, env)
        return [v.val if isinstance(v, _jax.Literal) else env[v] for v in jaxpr.outvars]

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if asks_for_position(equation):
            return [self.number]
        if any(_jax.contains(inner, asks_for_position) for inner in _jax.sub_jaxprs(equation)):
            return enter(self, equation, operands)
        return self.replicas.bind_alone(equation, operands)


# --- loops, branches and calls --------------------------------------------------------------------------


def enter(walk: LocalReplicas | _Alone, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
    """A loop, a branch or a call whose program is gone through by ``walk``.

    Raises:
      ValueError: it is none of these.
    """
    inner = _jax.control_flow_of(equation)
    differ = [walk.differs(v) for v in equation.outvars]
    if isinstance(inner, _jax.Scan):
        return _scan(walk, equation, inner, operands)
    if isinstance(inner, _jax.While):
        return _while(walk, equation, inner, operands)
    if isinstance(inner, _jax.Branches):
        return _branches(walk, equation, inner, operands, differ)
    called = _jax.called_program(equation)
    if called is None:
        raise ValueError(
            f"{equation.primitive.name} at {_jax.source_line(equation)} has a collective inside, or asks there for the "
            "replica's number: with several replicas on a device do that outside of it"
        )
    return walk.run(called, operands, differ, _jax.closed_over(equation, called))


def _bare(value: Any) -> Any:
    return value.array if isinstance(value, Each) else value


def _wrapped(array: Any, like: bool) -> Any:
    return Each(array) if like else array


def _scan(walk: LocalReplicas | _Alone, equation: _jax.Equation, loop: _jax.Scan, operands: list[Any]) -> list[Any]:
    n, m = loop.constants, loop.constants + loop.carried
    carried = [walk.differs(v) for v in loop.body.invars[n:m]]
    start = [walk.as_wanted(v, a, d) for v, a, d in zip(operands[n:m], equation.invars[n:m], carried, strict=True)]
    sliced = [isinstance(v, Each) for v in operands[m:]]
    made = [walk.differs(v) for v in equation.outvars[loop.carried :]]
    constants = _jax.closed_over(equation, loop.body)

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [
            *operands[:n],
            *map(_wrapped, carry, carried),
            *map(_wrapped, slices, sliced),
        ]
        results = [_bare(v) for v in walk.run(loop.body, values, [*carried, *made], constants)]
        return results[: m - n], results[m - n :]

    with _jax.from_line_of(equation):
        last, stacked = lax.scan(
            turn,
            [_bare(v) for v in start],
            [jnp.moveaxis(v.array, 1, 0) if isinstance(v, Each) else v for v in operands[m:]],
            length=loop.length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )
    results = [Each(jnp.moveaxis(x, 0, 1)) if d else x for x, d in zip(stacked, made, strict=True)]
    return [*map(_wrapped, last, carried), *results]


def _while(walk: LocalReplicas | _Alone, equation: _jax.Equation, loop: _jax.While, operands: list[Any]) -> list[Any]:
    n, m = loop.test_constants, loop.test_constants + loop.body_constants
    carried = [walk.differs(v) for v in loop.body.invars[m - n :]]
    start = [walk.as_wanted(v, a, d) for v, a, d in zip(operands[m:], equation.invars[m:], carried, strict=True)]

    def test(carry: list[Any]) -> Any:
        values = [*operands[:n], *map(_wrapped, carry, carried)]
        return walk.run(loop.test, values, [False], _jax.closed_over(equation, loop.test))[0]

    def turn(carry: list[Any]) -> list[Any]:
        values = [*operands[n:m], *map(_wrapped, carry, carried)]
        return [_bare(v) for v in walk.run(loop.body, values, carried, _jax.closed_over(equation, loop.body))]

    last = lax.while_loop(test, turn, [_bare(v) for v in start])
    return list(map(_wrapped, last, carried))


def _branches(
    walk: LocalReplicas | _Alone,
    equation: _jax.Equation,
    branches: _jax.Branches,
    operands: list[Any],
    differ: list[bool],
) -> list[Any]:
    def branch(program: _jax.Jaxpr) -> Callable[[], list[Any]]:
        constants = _jax.closed_over(equation, program)
        return lambda: [_bare(v) for v in walk.run(program, operands[1:], differ, constants)]

    results = lax.switch(walk.one(operands[0]), [branch(program) for program in branches.programs])
    return list(map(_wrapped, results, differ))
