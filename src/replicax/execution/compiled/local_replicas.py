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
from replicax._jax.convolutions import bind_in_branch
from replicax._jax.primitive_families import AXIS_POSITION, AXIS_SUMS
from replicax.collectives import all_reduce_p, sums_of
from replicax.devices.host_values import is_key
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.compiled.local_collectives import (
    LOCAL_REDUCTIONS,
    check_all_take_part,
    everyones,
    exchanged,
    reduced_in_groups,
    widened,
)
from replicax.execution.program.collective_operations import is_collective, over_replicas
from replicax.locality import Locality, M, T

_SUMS = AXIS_SUMS | {all_reduce_p.name}


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Each:
    """A value of each of this device's replicas.

    Attributes:
      array: ``[k, *shape]``.
    """

    array: Any


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Total:
    """The sum of a value over this device's replicas, of which nothing else is needed."""

    array: Any


class LocalReplicas:
    """The pass over one program.

    Args:
      count: how many replicas there are.
      per_device: how many of them each device has.
      localities: those of the values in the program.
      on_cpu: whether it is for CPUs.
    """

    def __init__(self, count: int, per_device: int, localities: Mapping[Any, Locality], on_cpu: bool) -> None:
        self.count = count
        self.per_device = per_device
        self.localities = localities
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
        stages = _stages(jaxpr, [isinstance(v, Each) for v in values], self)
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

    def stretch(self, stage: _Stage, env: dict[Any, Any]) -> None:
        """What replicas do by themselves between two collectives, one replica after the other."""
        if not stage.alone:
            return
        used = _used_by(stage.alone)
        given = [v for v in used if isinstance(env.get(v), Each)]
        shared = {v: env[v] for v in used if v in env and v not in given}

        def turn(state: tuple[list[Any], list[Any]], mine: Any) -> tuple[Any, list[Any]]:
            number, arrays = mine
            local = {**shared, **dict(zip(given, arrays, strict=True))}
            _Alone(self, number).go(stage.alone, local)
            terms = [local[v].astype(total.dtype) for v, total in zip(stage.summed, state[0], strict=True)]
            totals = [lax.add(a, b) for a, b in zip(state[0], terms, strict=True)]
            return (totals, [local[v] for v in stage.alike]), [local[v] for v in stage.kept]

        zeros = [jnp.zeros(v.aval.shape, widened(v.aval.dtype)) for v in stage.summed]
        nothing_yet = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in stage.alike]
        (totals, alike), kept = lax.scan(turn, (zeros, nothing_yet), (self.numbers, [env[v].array for v in given]))
        env.update((v, Each(array)) for v, array in zip(stage.kept, kept, strict=True))
        env.update(zip(stage.alike, alike, strict=True))
        env.update((v, _Total(t.astype(v.aval.dtype))) for v, t in zip(stage.summed, totals, strict=True))

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
            return _jax.bind(equation, [self.together(v, reduce, _is_sum(equation)) for v in operands])
        stacks = [self.each(v, atom).array for v, atom in zip(operands, equation.invars, strict=True)]
        if reduce is not None:
            wholes = [everyones(stack, self.count) for stack in stacks]
            return [Each(x) for x in reduced_in_groups(equation, wholes, self.numbers, reduce)]
        results = [exchanged(equation, stack, self.numbers, self.count) for stack in stacks]
        return [Each(r) if self.differs(v) else r for r, v in zip(results, equation.outvars, strict=True)]

    def all_reduce(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        local = [self.together(v, jnp.sum, is_sum=True) for v in operands]
        if self.per_device == self.count:
            return local
        return sums_of(*local, **equation.params, replicas=self.numbers)

    def together(self, value: Any, reduce: Callable[..., Any], is_sum: bool) -> Any:
        """What the replicas of this device make of a value, before the devices meet."""
        if isinstance(value, _Total):
            return value.array
        if isinstance(value, Each):
            return reduce(value.array, 0).astype(value.array.dtype)
        value = jnp.asarray(value)
        return value * jnp.asarray(self.per_device, value.dtype) if is_sum else value


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
        if _asks_for_position(equation):
            return [self.number]
        if any(_jax.contains(inner, _asks_for_position) for inner in _jax.sub_jaxprs(equation)):
            return enter(self, equation, operands)
        return self.replicas.bind_alone(equation, operands)


def _asks_for_position(equation: _jax.Equation) -> bool:
    return equation.primitive.name in AXIS_POSITION and over_replicas(equation.params)


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


# --- what is computed when ------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Stage:
    """What is done after some collectives, and before the next.

    Attributes:
      common: operations on values that all replicas have alike, in their order.
      alone: what each replica does by itself, in its order.
      meetings: the collectives at the end.
      kept: what ``alone`` computes and is needed outside of it.
      alike: the same, of which all replicas compute the same.
      summed: what it computes of which only the sum over all replicas is needed.
    """

    common: list[_jax.Equation] = dataclasses.field(default_factory=list)
    alone: list[_jax.Equation] = dataclasses.field(default_factory=list)
    meetings: list[_jax.Equation] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)
    alike: list[Any] = dataclasses.field(default_factory=list)
    summed: list[Any] = dataclasses.field(default_factory=list)


def _stages(jaxpr: _jax.Jaxpr, differ: Sequence[bool], walk: LocalReplicas) -> list[_Stage]:
    """The stages of a program: each operation is in the first one for which its operands are there.

    What uses mutable arrays is in one stage, and so in one stretch, in its order.

    Args:
      jaxpr: the program.
      differ: for each of its inputs, whether replicas have values of their own.
      walk: knows in which values replicas may differ.

    Raises:
      ValueError: a mutable array is used both before and after a collective.
    """
    stages, of_mutable, _ = _staged(jaxpr, differ, walk, 0)
    if of_mutable:
        stages, latest, line = _staged(jaxpr, differ, walk, of_mutable)
        if latest > of_mutable:
            raise ValueError(
                f"a mutable array (jax.new_ref) is used both before a collective and after it, at {line}: with several "
                "replicas on a device that can't be; hand its value on (ref[...]) and begin a new one"
            )
    _note_uses(jaxpr, stages, walk)
    return stages


def _staged(
    jaxpr: _jax.Jaxpr, differ: Sequence[bool], walk: LocalReplicas, of_mutable: int
) -> tuple[list[_Stage], int, str]:
    """The stages, if uses of mutable arrays are in stage ``of_mutable`` or later; the last of these, and its line."""
    stages: list[_Stage] = []
    made: dict[Any, tuple[int, bool]] = {v: (0, d) for v, d in zip(jaxpr.invars, differ, strict=True)}
    made.update((v, (0, False)) for v in jaxpr.constvars)
    acted, latest, line = 0, of_mutable, ""
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if not isinstance(v, _jax.Literal)]
        acts, meets = _acts(equation), is_collective(equation)
        mutates = any(map(_jax.is_mutable, [*operands, *equation.outvars]))
        number = max([made[v][0] for v in operands], default=0)
        if acts:
            number = max(number, acted)
            acted = number + meets
        if mutates:
            number = max(number, of_mutable)
            if number + meets > latest:
                latest, line = number + meets, _jax.source_line(equation)
        # What a stretch has computed of values that all replicas have alike is anyone's when the stretch is over.
        alone = not meets and (
            acts
            or mutates
            or _asks_for_position(equation)
            or any(map(walk.differs, equation.outvars))
            or any(made[v][1] and (walk.differs(v) or made[v][0] == number) for v in operands)
        )
        while len(stages) <= number:
            stages.append(_Stage())
        stage = stages[number]
        (stage.meetings if meets else stage.alone if alone else stage.common).append(equation)
        made.update((v, (number + meets, alone or (meets and walk.differs(v)))) for v in equation.outvars)
    return stages, latest, line


def _acts(equation: _jax.Equation) -> bool:
    """Whether an operation does something besides computing its results, so that it is to be done for each replica."""
    return _jax.acts_outside_program(equation) or not _jax.is_function(equation.primitive.name, equation.params)


def _is_sum(equation: _jax.Equation) -> bool:
    return equation.primitive.name in _SUMS and not _jax.has_groups(equation.params)


def _used_by(equations: Sequence[_jax.Equation]) -> dict[Any, None]:
    """The operands, in their order."""
    return dict.fromkeys(v for e in equations for v in e.invars if not isinstance(v, _jax.Literal))


def _note_uses(jaxpr: _jax.Jaxpr, stages: Sequence[_Stage], walk: LocalReplicas) -> None:
    """Find out what stretches have to keep."""
    sums: set[Any] = set()
    needed = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    for stage in stages:
        own = {v for e in stage.alone for v in e.outvars}
        needed.update(v for v in _used_by(stage.alone) if v not in own)
        needed.update(_used_by(stage.common))
        for equation in stage.meetings:
            (sums if _is_sum(equation) else needed).update(_used_by([equation]))
    for stage in stages:
        results: list[Any] = [v for e in stage.alone for v in e.outvars if not _jax.is_mutable(v)]
        outside = [v for v in results if v in needed]
        stage.alike = [v for v in outside if not walk.differs(v) and not is_key(v.aval.dtype)]
        stage.kept = [v for v in outside if v not in set(stage.alike)]
        stage.summed = [v for v in results if v in sums and v not in needed]
