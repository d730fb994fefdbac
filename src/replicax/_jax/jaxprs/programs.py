"""Programs: taken apart, put together, and applied."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as _extend, source_info_util as _source_infos
from jax.interpreters import partial_eval as _pe

from replicax._jax.internals import core as _core
from replicax._jax.jaxprs.keys import program_digest
from replicax._jax.jaxprs.source_lines import source_line
from replicax._jax.jaxprs.types import ClosedJaxpr, Equation, Jaxpr, Literal, ShapedArray, shape_of
from replicax._jax.primitive_families import HOST_CALLS, PRINTS, UNRELIABLE, USERS_HOST_CALLS, WHILE_LOOPS
from replicax._jax.traces import current_trace, staging_trace
from replicax.errors import UNKNOWN_LINE


def program_of(like: Jaxpr, invars: Sequence[Any], equations: Sequence[Equation], outvars: Sequence[Any]) -> Jaxpr:
    """A program of these equations, with the name of another one."""
    effects = frozenset().union(*(e.effects for e in equations))
    return replace_inputs(like, invars, equations, outvars).replace(effects=effects)


def interpret(
    jaxpr: Jaxpr,
    values: Sequence[Any],
    equation: Callable[[Equation, list[Any]], Sequence[Any]],
    literal: Callable[[Literal], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Evaluate a program, which has no constants, with another meaning of its operations.

    ``values`` stand for its inputs. ``equation`` returns the results of an equation, given its operands, and
    ``literal`` what stands for a number in the program.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for e in jaxpr.eqns:
        env.update(zip(e.outvars, equation(e, list(map(read, e.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def contains(jaxpr: Jaxpr, wanted: Callable[[Equation], bool]) -> bool:
    """Return whether an equation of a program, or of one inside it, is ``wanted``."""
    return any(map(wanted, equations_of(jaxpr)))


def is_or_contains(equation: Equation, wanted: Callable[[Equation], bool]) -> bool:
    """Return whether an equation, or one in the programs inside it, is ``wanted``."""
    return wanted(equation) or any(contains(inner, wanted) for inner in sub_jaxprs(equation))


def equations_of(jaxpr: Jaxpr) -> Sequence[Equation]:
    """The equations of a program, and of all inside it. A step has thousands, and a dozen passes ask for them."""
    equations = _all_equations.get(jaxpr)
    if equations is None:
        nested = ((outer, *itertools.chain(*map(equations_of, sub_jaxprs(outer)))) for outer in jaxpr.eqns)
        equations = _all_equations[jaxpr] = list(itertools.chain(*nested))
    return equations


_all_equations: weakref.WeakKeyDictionary[Jaxpr, Sequence[Equation]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def enable_x64_as_in(*programs: Jaxpr) -> Iterator[None]:
    """Evaluate programs again that may have been traced inside ``jax.enable_x64(True)``, with the dtypes they have."""
    atoms = ([v for e in equations_of(p) for v in (*e.invars, *e.outvars)] for p in programs)
    with enable_x64_for(v.aval for v in itertools.chain(*atoms, *(p.invars for p in programs))):
        yield


def enable_x64_for(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Compute with 64-bit numbers inside if some of these are; if JAX's are off, it would cut them to 32 bits."""
    dtypes = {a.dtype for a in avals if hasattr(a, "dtype")}
    are_kept = all(d == jax.dtypes.canonicalize_dtype(d, allow_extended_dtype=True) for d in dtypes)
    return contextlib.nullcontext() if are_kept else jax.enable_x64(True)


def calls_back(jaxpr: Jaxpr) -> bool:
    """Return whether a program calls Python functions of the user's on the host."""
    return contains(jaxpr, lambda e: e.primitive.name in USERS_HOST_CALLS)


def calls_back_in_loops(jaxpr: Jaxpr) -> bool:
    """Return whether a ``while`` loop of a program calls Python functions on the host."""
    return contains(jaxpr, lambda e: e.primitive.name in WHILE_LOOPS and any(map(calls_back, sub_jaxprs(e))))


def prints(jaxpr: Jaxpr, devices: int = 1) -> bool:
    """Return whether a program prints (``jax.debug.print``).

    Raises an error if a format does not fit what it prints, or if it prints in order on several devices.
    """
    calls = [e for e in equations_of(jaxpr) if e.primitive.name in HOST_CALLS]
    for call in calls:
        if devices > 1 and any(type(effect).__name__ == "OrderedDebugEffect" for effect in call.effects):
            raise ValueError(
                f"jax.debug.print, or jax.debug.callback, with ordered=True at {source_line(call)}: JAX can't do that "
                "on several devices. Leave ordered=True out, or call jax.experimental.io_callback(…, ordered=True). "
                "Inside replicax.debug() the order is that of the program."
            )
    found = [e for e in calls if e.primitive.name in PRINTS]
    for equation in found:
        _try_format(equation)
    return bool(found)


def _try_format(equation: Equation) -> None:
    avals: list[Any] = [v.aval for v in equation.invars]
    zeros = (np.zeros(a.shape, a.dtype) if isinstance(a.dtype, np.dtype) else a for a in avals)
    tree, fixed = equation.params["in_tree"], dict(equation.params["static_args"])
    args, kwargs = tree.unflatten([fixed[i] if i in fixed else next(zeros) for i in range(tree.num_leaves)])
    try:
        with contextlib.suppress(AttributeError, LookupError):  # a NumPy array has less
            equation.params["fmt"].format(*args, **kwargs)
    except (ValueError, TypeError) as error:
        error.add_note(f"It is the format of the jax.debug.print at {source_line(equation)}.")
        raise


def has_side_effects(equation: Equation) -> bool:
    """Return whether an equation does something besides computing its results (prints, calls back, …)."""
    return any(type(effect).__name__ != _OF_AXES for effect in equation.effects)


def has_outer_effects(equation: Equation) -> bool:
    """Return whether an equation acts outside otherwise than on mutable arrays, which are the program's own."""
    return any(map(is_outer_action, equation.effects))


def is_outer_action(effect: Any) -> bool:
    """Return whether an effect is an action, such as a print, and no use of an axis' name or of a mutable array."""
    return type(effect).__name__ not in (_OF_AXES, *_OF_REFERENCES)


_OF_AXES = "NamedAxisEffect"
_OF_REFERENCES = ("ReadEffect", "WriteEffect", "AccumEffect", "InternalMutableArrayEffect")


def is_deterministic(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether the results of an operation are functions of its operands."""
    return name not in UNRELIABLE and not params.get("has_side_effect")


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` with its constants as its first inputs."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return replace_inputs(jaxpr.replace(constvars=[]), inputs, jaxpr.eqns, jaxpr.outvars)


def replace_inputs(jaxpr: Jaxpr, invars: Sequence[Any], equations: Sequence[Equation], outvars: Sequence[Any]) -> Jaxpr:
    """``jaxpr`` with other inputs, equations and outputs."""
    return jaxpr.replace(
        invars=list(invars),
        eqns=list(equations),
        outvars=list(outvars),
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )


def evaluate(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Apply a closed ``jaxpr`` to ``args``, as part of whatever is being traced now."""
    return staged(_extend.jaxpr_as_fun(ClosedJaxpr(jaxpr, ())))(*args)


def staged(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which applies operations of a program, as part of the present trace, if there is one.

    Inlined, so it changes nothing that is compiled, but for the lines that operations come from. Where JAX falls back
    to running operation by operation, as it does to find a NaN, a bare program sends it round in circles.
    """
    return fn if staging_trace(current_trace()) is current_trace() else jax.jit(fn, inline=True)


def called(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Apply a closed ``jaxpr`` to ``args`` as one call in what is being traced now, without tracing it again.

    The compiler makes what is called part of the program. A step has thousands of operations, and to trace each of
    them once more takes as long as lowering it.
    """
    if staging_trace(current_trace()) is not current_trace():
        return evaluate(jaxpr, args)
    params: dict[str, Any] = {}
    for name, value in _call_params().items():
        times = len(jaxpr.invars) if name.startswith(("in_", "donated_")) else len(jaxpr.outvars)
        params[name] = value * times if isinstance(value, tuple) and name in _FOR_EACH else value
    params.update(name=jaxpr.debug_info.func_name, jaxpr=ClosedJaxpr(jaxpr, ()))
    return _extend.primitives.jit_p.bind(*args, **params)


_FOR_EACH = ("in_shardings", "in_layouts", "donated_invars", "out_shardings", "out_layouts")
"""Params of a call that say something of each operand, or of each result."""


def _call_params() -> Mapping[str, Any]:
    """The params of a call of a jitted function with one operand and one result."""
    with jax.disable_jit(False):
        [equation] = jax.make_jaxpr(jax.jit(jax.numpy.negative))(0.0).jaxpr.eqns
    return dict(equation.params)


def spliced(jaxpr: Jaxpr, replacement: Callable[[Equation], Callable[..., Sequence[Any]] | None]) -> Jaxpr:
    """``jaxpr``, without constants, with other operations in the place of some. The others are not traced again.

    ``replacement`` returns the function of an equation's operands that takes its place, or ``None`` if it stays.
    """
    now: dict[Any, Any] = {}
    equations: list[Equation] = []

    def renamed(equation: Equation) -> Equation:
        if any(not isinstance(v, Literal) and v in now for v in equation.invars):
            return equation.replace(invars=list(map(atom, equation.invars)))
        return equation

    def atom(old: Any) -> Any:
        return old if isinstance(old, Literal) else now.get(old, old)

    for equation in jaxpr.eqns:
        fn = replacement(equation)
        if fn is None:
            equations.append(renamed(equation))
            continue
        variables = [v for v in equation.invars if not isinstance(v, Literal)]
        program = _program_of_operands(fn, equation, variables)
        now.update(zip(program.invars, map(atom, variables), strict=True))
        equations += [renamed(e) for e in program.eqns]
        now.update(zip(equation.outvars, map(atom, program.outvars), strict=True))
    return program_of(jaxpr, jaxpr.invars, equations, list(map(atom, jaxpr.outvars)))


def _program_of_operands(fn: Callable[..., Sequence[Any]], equation: Equation, variables: Sequence[Any]) -> Jaxpr:
    """``fn`` of the operands of an equation, as a program of those that are no literals."""

    def of_variables(*values: Any) -> Sequence[Any]:
        rest = iter(values)
        return fn(*(v.val if isinstance(v, Literal) else next(rest) for v in equation.invars))

    names = _source_infos.current_name_stack() + equation.source_info.name_stack
    with _source_infos.user_context(equation.source_info.traceback, name_stack=names):
        return traced(of_variables, variables)


def traced(fn: Callable[..., Any], like: Sequence[Any]) -> Jaxpr:
    """The program of ``fn``, of values like these of another program."""
    closed = jax.make_jaxpr(fn)(*(shape_of(v.aval) for v in like))
    assert not closed.consts
    return closed.jaxpr


def traced_once(fn: Callable[[], Any]) -> tuple[Callable[[], Any], ShapedArray, Callable[[], bytes]]:
    """Trace ``fn``, which returns an array, into a function that runs without its Python.

    Returns that function, the kind of the array, and a function that makes the program's
    :func:`~replicax._jax.jaxprs.keys.program_digest`.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)()
    program = jax.jit(_extend.jaxpr_as_fun(closed), inline=True)
    return lambda: program()[0], shape, lambda: program_digest(closed)


def pruned_fn(fn: Callable[..., Sequence[Any]], avals: Sequence[Any], outputs: Sequence[int]) -> tuple[Any, list[int]]:
    """A function that computes some results of ``fn``, and the positions of the arguments of ``fn`` that it takes."""
    closed = jax.make_jaxpr(fn)(*avals)
    wanted = [i in set(outputs) for i in range(len(closed.out_avals))]
    jaxpr, used = _pe.dce_jaxpr(closed.jaxpr, wanted)
    return _extend.jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), [i for i, u in enumerate(used) if u]


def bind(equation: Equation, operands: Sequence[Any], params: Any = None) -> list[Any]:
    """The results of one operation of a program, perhaps with other ``params``, as part of what is traced now."""
    params = equation.primitive.get_bind_params(equation.params if params is None else params)
    names = _source_infos.current_name_stack() + equation.source_info.name_stack
    with _source_infos.user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def sub_jaxprs(equation: Equation) -> list[Jaxpr]:
    """The programs inside an equation (a loop's body, a branch, a called function)."""
    params = equation.params
    return [getattr(j, "jaxpr", j) for j in _core.jaxprs_in_params(params)] if params else []


def constants(jaxpr: Jaxpr, consts: Iterable[Any]) -> Iterator[Any]:
    """The arrays that a program closes over, its own ``consts`` and those of programs inside."""
    yield from consts
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from constants(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))


def computing(value: Any, equations: Mapping[int, Equation]) -> Iterator[Equation]:
    """The equation that computes a value, found in ``equations`` by the value's id, and then those inside of it."""
    if (equation := equations.get(id(value))) is not None:
        yield equation
        for inner in sub_jaxprs(equation):
            if len(inner.outvars) == len(equation.outvars):
                [result] = [w for v, w in zip(equation.outvars, inner.outvars, strict=True) if v is value]
                yield from computing(result, {id(v): e for e in inner.eqns for v in e.outvars})


def map_jaxprs(params: Any, fn: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """The params of an equation, with ``fn`` applied to the programs in them; it keeps what goes in and out."""

    def of_value(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(fn(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            return fn(value)
        if not isinstance(value, tuple):
            return value
        new = list(map(of_value, value))
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return getattr(type(value), "_make", tuple)(new)  # some are named

    return {name: of_value(value) for name, value in params.items()}


def callback_of(equation: Equation) -> Any:
    """The function that a call of the host calls, with flat arguments and results; ``None`` if it prints."""
    return equation.params.get("callback")


def with_callback(equation: Equation, callback: Any) -> Equation:
    """A call of the host that calls ``callback`` instead."""
    return equation.replace(params=equation.params | {"callback": callback})


def host_function(equation: Equation) -> Any:
    """The user's function that a call of the host calls."""
    return getattr(callback_of(equation), "callback_func", None)


def leaked_tracer(jaxpr: Jaxpr, closed_over: Sequence[Any]) -> tuple[Any, str] | None:
    """A value of another program that ``jaxpr`` uses, and the user's line that uses it; ``None`` if there is none."""
    inputs = jaxpr.invars[len(jaxpr.invars) - len(closed_over) :]
    lost = next((v for v, value in zip(inputs, closed_over, strict=True) if isinstance(value, jax.core.Tracer)), None)
    if lost is None:
        return None
    use = next((e for e in jaxpr.eqns if any(atom is lost for atom in e.invars)), None)
    return lost.aval, UNKNOWN_LINE if use is None else source_line(use)


# --- mutable arrays (jax.new_ref) ------------------------------------------------------------------------


def check_freed_once(jaxpr: Jaxpr) -> None:
    """Raise if a program uses a freed mutable array: JAX has a bare ``KeyError``, or no error at all."""
    freed: set[Any] = set()
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom in freed:
                use = "freed twice" if equation.primitive.name == "free_ref" else "used after it was freed"
                raise ValueError(
                    f"a mutable array (jax.new_ref) was {use} (jax.free_ref): free it once, when all is done"
                )
        if equation.primitive.name == "free_ref":
            freed.update(equation.invars)
        for inner in sub_jaxprs(equation):
            check_freed_once(inner)


def is_mutable(atom: Any) -> bool:
    """Return whether a variable of a program is a mutable array (``jax.new_ref``)."""
    return type(getattr(atom, "aval", None)).__name__ == "AbstractRef"
