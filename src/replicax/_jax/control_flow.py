"""Loops, branches and calls taken apart: what their parameters are called differs from version to version."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as _extend
from jax.interpreters import partial_eval as _pe

from replicax._jax.jaxprs.programs import contains, map_jaxprs, program_of, sub_jaxprs
from replicax._jax.jaxprs.types import ClosedJaxpr, Equation, Jaxpr, Literal, Primitive, shape_of
from replicax._jax.primitive_families import BRANCHES, CONTROL_FLOW, LINEAR_SOLVES, SCANS, WHILE_LOOPS, by_primitive


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """A ``scan``: its operands are constants, carried values, and values to slice, in this order."""

    body: Jaxpr  # the program of one iteration; it takes the scan's operands, but slices of the last ones
    constants: int  # how many operands are constants
    carried: int  # how many are carried
    length: int  # how often it runs
    reverse: bool  # whether it goes from the last slice to the first
    unroll: int  # how many iterations the compiled loop runs as one


@dataclasses.dataclass(frozen=True, slots=True)
class While:
    """A ``while``: its operands are constants of the test, constants of the body, and carried values."""

    test: Jaxpr  # the program that says whether to go on
    body: Jaxpr  # the program of one iteration
    test_constants: int  # how many operands are the test's
    body_constants: int  # how many are the body's


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    """A ``cond``: its operands are the number of one of its programs, and then that program's operands."""

    programs: Sequence[Jaxpr]


def control_flow_of(equation: Equation) -> Scan | While | Branches | None:
    """The loop or branch that an equation is; ``None`` if it is neither."""
    read = _READERS.get(equation.primitive.name)
    return None if read is None else read(equation.params)


def scan_of(params: Mapping[str, Any]) -> Scan:
    """The ``scan`` with these parameters."""
    if "ft_in" in params:  # from JAX 0.11 on
        constants, carried, _ = map(len, params["ft_in"].unpack())
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    body = open_jaxpr(params["jaxpr"])
    return Scan(body, constants, carried, int(params["length"]), params["reverse"], params["unroll"])


def while_of(params: Mapping[str, Any]) -> While:
    """The ``while`` with these parameters."""
    test, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    return While(test, body, params["cond_nconsts"], params["body_nconsts"])


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scan | While | Branches]] = by_primitive(
    {SCANS: scan_of, WHILE_LOOPS: while_of, BRANCHES: lambda params: Branches([*map(open_jaxpr, params["branches"])])}
)


def executed_sum(equation: Equation, each: Callable[[Equation], int]) -> int:
    """The sum of ``each`` over the operations that an equation runs: itself, or those of its programs.

    A loop counts as often as it runs, a branch as the dearest one, and a ``while`` loop once, as it is not known how
    often it runs.
    """
    inside = [sum(executed_sum(inner, each) for inner in program.eqns) for program in sub_jaxprs(equation)]
    match control_flow_of(equation):
        case Scan() as loop:
            return loop.length * sum(inside)
        case Branches():
            return max(inside, default=0)
    return sum(inside) or each(equation)


def called_program(equation: Equation) -> Jaxpr | None:
    """The one program that an equation simply applies to its operands (jit, checkpoint, custom_vjp, …)."""
    params = equation.params
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if name in params and equation.primitive.name not in CONTROL_FLOW:
            inner = open_jaxpr(params[name])
            if hasattr(inner, "eqns") and _fit(inner.invars, equation.invars) and _fit(inner.outvars, equation.outvars):
                return inner
    return None


def solving(params: Mapping[str, Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The solving program of a linear solve (``custom_linear_solve``), and its operands."""
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return params["jaxprs"].solve, [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def with_calls_for_solves(
    jaxpr: Jaxpr, meets: Callable[[Equation], bool], axis_env: Sequence[tuple[str, int]]
) -> Jaxpr:
    """``jaxpr``, which is differentiated no more, with each linear solve replaced by a call of its solving program.

    A primitive of another library that has a collective inside, such as lineax' ``linear_solve``, becomes a call, too:
    only its library knows what it does with the programs among its parameters.

    ``meets`` tells whether an equation is a collective, and ``axis_env`` has the axes around the program.
    """
    done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_program(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in done:
            new = jaxpr.replace(eqns=list(map(of_equation, jaxpr.eqns)))
            done[id(jaxpr)] = jaxpr, new  # where it is called again, it is the same again, so JAX lowers it once
        return done[id(jaxpr)][1]

    def of_closed(program: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(of_program(program.jaxpr), program.consts)

    def of_equation(equation: Equation) -> Equation:
        if hides(equation.primitive, equation.params, meets):
            return _called(equation, of_closed(_written_out(equation, axis_env)), equation.invars)
        if not any(map(solves, sub_jaxprs(equation))) and equation.primitive.name not in LINEAR_SOLVES:
            return equation
        equation = equation.replace(params=map_jaxprs(equation.params, of_program))
        if equation.primitive.name not in LINEAR_SOLVES:
            return equation
        return _called(equation, *solving(equation.params, equation.invars))

    def solves(jaxpr: Jaxpr) -> bool:
        return contains(jaxpr, lambda e: e.primitive.name in LINEAR_SOLVES or hides(e.primitive, e.params, meets))

    return of_program(jaxpr) if solves(jaxpr) else jaxpr


def hides(primitive: Primitive, params: Mapping[str, Any], meets: Callable[[Equation], bool]) -> bool:
    """Return whether it is a primitive of another library, among whose parameters are programs with a collective."""
    return _is_of_a_library(primitive) and any(contains(program, meets) for program in _programs_in(params))


@functools.cache
def _is_of_a_library(primitive: Primitive) -> bool:
    """Return whether Python of another library than JAX computes it."""
    module = str(getattr(primitive.impl, "__module__", "jax"))
    return module.partition(".")[0] not in ("functools", "jax", "jaxlib", "replicax")


def _programs_in(value: Any) -> Iterator[Jaxpr]:
    """The programs in parameters, also in tuples of tuples."""
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield open_jaxpr(value)
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _programs_in(part)


def _written_out(equation: Equation, axis_env: Sequence[tuple[str, int]]) -> Any:
    """The program of a primitive of another library."""
    avals = [shape_of(v.aval) for v in equation.invars]
    compute = functools.partial(equation.primitive.impl, **equation.params)
    return jax.make_jaxpr(compute, axis_env=list(axis_env))(*avals)


def _called(equation: Equation, program: Any, operands: list[Any]) -> Equation:
    """A call of ``program`` that replaces ``equation``."""
    call = _a_call(len(operands), len(equation.outvars))
    return equation.replace(primitive=call.primitive, invars=operands, params={**call.params, "jaxpr": program})


@functools.cache
def _a_call(operands: int, results: int) -> Equation:
    """A call of a jitted function, with so many operands and results."""
    [call] = jax.make_jaxpr(jax.jit(lambda *_: [jax.numpy.zeros(())] * results))(*[0.0] * operands).jaxpr.eqns
    return call


def has_rules(call: Equation) -> bool:
    """Return whether a call has rules of its own (``jax.custom_jvp``, …), which are functions among its parameters."""
    return call.primitive.name.startswith("custom_")


def is_rule(value: Any) -> bool:
    """Return whether a parameter of a call that has rules of its own is one of them."""
    return callable(value) or hasattr(value, "call_wrapped")  # as functions have in which JAX wraps others


def _fit(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Return whether a program's operands or results have the shapes of the equation's; a loop's elements have not."""
    return len(inner) == len(outer) and all(
        getattr(a.aval, "shape", None) == getattr(b.aval, "shape", None) for a, b in zip(inner, outer, strict=True)
    )


def closed_over(equation: Equation, inner: Jaxpr) -> Sequence[Any]:
    """The values of the constants that a program inside an equation has closed over."""
    for value in equation.params.values():
        for program in value if isinstance(value, tuple | list) else (value,):
            if isinstance(program, ClosedJaxpr) and program.jaxpr is inner:
                return program.consts
    return ()


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """A jaxpr without the constants that may be closed over it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


# --- what a part of the results needs -------------------------------------------------------------------


def pruned(equation: Equation, wanted: Sequence[bool], *, thoroughly: bool = False) -> Equation:
    """``equation`` with only what its ``wanted`` results need, operands included, as far as JAX can tell.

    The equation is a loop, a branch, or a call that does nothing but compute its results. At least one is wanted; what
    it needs may be a result, too. With ``thoroughly`` something may be computed twice in order to need less.
    """
    if not _PRUNES_WHILE:
        if thoroughly:
            equation = equation.replace(params=map_jaxprs(equation.params, _apart))
        if equation.primitive is lax.while_p:
            return _pruned_while(equation, wanted)
    operands = list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))
    results = [v for v, is_wanted in zip(equation.outvars, wanted, strict=True) if is_wanted]
    alone = program_of(_no_program(), operands, [equation], results)
    [kept] = _pe.dce_jaxpr(alone, True)[0].eqns
    return kept


_PRUNES_WHILE = lax.while_p in _pe.dce_rules  # from JAX 0.12 on


@functools.cache
def _no_program() -> Jaxpr:
    return open_jaxpr(jax.make_jaxpr(lambda: ())())


def _pruned_while(equation: Equation, wanted: Sequence[bool]) -> Equation:
    loop = while_of(equation.params)
    n, m = loop.test_constants, loop.body_constants
    carried = _carried_for(loop, wanted)
    test, tested = _pe.dce_jaxpr(loop.test, True, [False] * n + carried)
    body, used = _pe.dce_jaxpr(loop.body, carried, [False] * m + carried)
    kept = [*tested[:n], *used]
    params = {
        **equation.params,
        "cond_jaxpr": ClosedJaxpr(test, equation.params["cond_jaxpr"].consts),
        "body_jaxpr": ClosedJaxpr(body, equation.params["body_jaxpr"].consts),
        "cond_nconsts": sum(tested[:n]),
        "body_nconsts": sum(used[:m]),
    }
    return equation.replace(
        invars=[v for v, is_kept in zip(equation.invars, kept, strict=True) if is_kept],
        outvars=[v for v, is_kept in zip(equation.outvars, carried, strict=True) if is_kept],
        params=params,
    )


def _carried_for(loop: While, wanted: Sequence[bool]) -> list[bool]:
    """For each carried value whether a loop needs it for the ``wanted`` results."""
    tested = _pe.dce_jaxpr(loop.test, True)[1][loop.test_constants :]
    carried = [a or b for a, b in zip(wanted, tested, strict=True)]
    while True:
        used = _pe.dce_jaxpr(loop.body, carried)[1][loop.body_constants :]
        more = [a or b for a, b in zip(carried, used, strict=True)]
        if more == carried:
            return carried
        carried = more


def _apart(jaxpr: Jaxpr) -> Jaxpr:
    """A program with several loops for each ``while``: one for all results that need the same."""
    equations: list[Equation] = []
    for equation in jaxpr.eqns:
        equation = equation.replace(params=map_jaxprs(equation.params, _apart))
        equations += _parts_of_while(equation) if equation.primitive is lax.while_p else [equation]
    return jaxpr.replace(eqns=equations)


def _parts_of_while(equation: Equation) -> list[Equation]:
    loop, count = while_of(equation.params), len(equation.outvars)
    parts: dict[tuple[bool, ...], set[Any]] = {}
    for i, result in enumerate(equation.outvars):
        parts.setdefault(tuple(_carried_for(loop, [j == i for j in range(count)])), set()).add(result)
    loops = []
    for carried, results in parts.items():
        part = _pruned_while(equation, carried)
        loops.append(part.replace(outvars=[v if v in results else _extend.Var(v.aval) for v in part.outvars]))
    return loops
