"""The only file that touches JAX internals or branches on its version.

Everything here is a few lines around something that ``jax`` has, but does not yet promise. When a new JAX
release moves one of them, this file changes and no other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.ad_util import Zero as _Zero
from jax._src.clusters import cloud_tpu_cluster as _clusters
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.literals import TypedNdArray as _TypedNdArray
from jax.extend import core as _extend
from jaxlib import _jax as _jaxlib

Jaxpr = _extend.Jaxpr
ClosedJaxpr = _extend.ClosedJaxpr
Equation = _extend.JaxprEqn
Literal = _extend.Literal
Primitive = _extend.Primitive
ShapedArray = jax.core.ShapedArray

# Line numbers in our messages should be the user's: JAX then skips our frames as it skips its own.
_source_info.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)


# --- traces ---------------------------------------------------------------------------------------------


def current_trace() -> Any:
    """The innermost JAX transformation now in progress (an opaque object, compared with ``is``)."""
    return _core.trace_ctx.trace


def eval_trace() -> Any:
    """What :func:`current_trace` returns when nothing is being traced."""
    return _core.eval_trace


def staging_trace(trace: Any) -> Any:
    """The innermost trace, at or outside ``trace``, that records a program (``jit``, ``scan``, ``cond``, …)."""
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def traced_for(trace: Any) -> str:
    """What a staging trace is for: ``"jit"``, ``"scan"``, …; empty for a trace that does not stage."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(info, "traced_for", ""))


# JAX keeps what it traced of a function that lives on (the body of a scan, a jitted helper), and does not know
# that such a function may read a variable, whose traced value is another one in the next step, after a write
# and inside value_and_grad. A number that is part of JAX's cache keys, and changes whenever a kept program may
# have gone stale, makes it trace the function again. Threads have numbers of their own: what one keeps, another
# must not find.
_generation = jax.make_user_context(0)
_numbers = itertools.count(1)


class _StagedReads(threading.local):
    def __init__(self) -> None:
        self.happened = False
        self.depth = 0
        self.generation = next(_numbers)


_staged = _StagedReads()


def note_staged_read() -> None:
    """A variable's traced value has gone into a program that JAX may keep."""
    _staged.happened = True


def renew_kept_programs() -> None:
    """From here on variables have other values: don't reuse kept programs that hold the old ones."""
    if _staged.happened and _staged.depth:
        _staged.happened = False
        _staged.generation = next(_numbers)
        _generation(_staged.generation).__enter__()  # the enclosing kept_programs() restores it


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Trace, reusing only such programs as JAX has kept that hold no variable's old value."""
    if _staged.depth:
        yield
        return
    _staged.depth += 1
    try:
        with _generation(_staged.generation):
            renew_kept_programs()
            yield
    finally:
        _staged.depth -= 1


def set_current_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Record operations in ``trace`` (an outer one), whatever transformation is innermost."""
    manager: contextlib.AbstractContextManager[Any] = _core.set_current_trace(trace)
    return manager


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute concrete values in the middle of a trace, as if nothing were being traced."""
    axis_env = _core.trace_ctx.axis_env
    with _core.set_current_trace(_core.eval_trace), _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(axis_env)


class WatchingTrace(_core.EvalTrace):
    """Computes as if nothing were being traced, and tells ``watch`` of each operation and its results."""

    def __init__(self, watch: Callable[[Primitive, Sequence[Any], Any, Sequence[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        evaluate = _STEP_BY_STEP.get(primitive.name)
        if evaluate is not None:
            with _core.set_current_trace(self):
                return evaluate(list(args), params)
        results = super().process_primitive(primitive, args, params)  # type: ignore[no-untyped-call]
        self._watch(primitive, args, params, results if primitive.multiple_results else [results])
        return results

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)


EVALUATED_INSIDE = {"checkpoint", "remat", "remat2"}
"""What ``jax.checkpoint`` makes: a program, even where nothing is compiled."""


# Such a program may hold branches and loops, which JAX would compile. (Scans and calls it has written out.)


def _call(program: Any, args: Sequence[Any]) -> list[Any]:
    return list(_core.eval_jaxpr(getattr(program, "jaxpr", program), getattr(program, "consts", ()), *args))


def _branch(args: list[Any], params: Any) -> list[Any]:
    branches = params["branches"]
    return _call(branches[min(max(int(args[0]), 0), len(branches) - 1)], args[1:])


def _while(args: list[Any], params: Any) -> list[Any]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test, body, state = args[:n_test], args[n_test : n_test + n_body], args[n_test + n_body :]
    while bool(_call(params["cond_jaxpr"], [*test, *state])[0]):
        state = _call(params["body_jaxpr"], [*body, *state])
    return state


_STEP_BY_STEP: dict[str, Callable[[list[Any], Any], list[Any]]] = {
    **dict.fromkeys(EVALUATED_INSIDE, lambda args, params: _call(params["jaxpr"], args)),
    "cond": _branch,
    "while": _while,
}


def linear_primitive(
    name: str,
    compute: Callable[..., Any],
    shape: Callable[..., Any],
    transpose: Callable[..., Any],
    move: Callable[..., Any],
) -> Primitive:
    """A linear one-operand primitive that is computed by Python and is never compiled.

    Args:
      name: its name.
      compute: ``compute(x, **params)``, its value.
      shape: ``shape(aval, **params)``, its abstract value.
      transpose: ``transpose(cotangent, aval, **params)``, its transpose.
      move: ``move(params)``, its params when a batch dim has been put first.
    """
    primitive = Primitive(name)

    def computed(x: Any, **params: Any) -> Any:
        with outside_tracing():
            return compute(x, **params)

    primitive.def_impl(computed)
    primitive.def_abstract_eval(shape)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), primitive.bind(_ad.instantiate_zeros(tangents[0]), **params)

    def transposed(cotangent: Any, x: Any, **params: Any) -> tuple[Any]:
        return (transpose(_ad.instantiate_zeros(cotangent), x.aval, **params),)

    def batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
        x = jax.numpy.moveaxis(args[0], dims[0], 0)
        return primitive.bind(x, **move(params)), 0

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = transposed
    _batching.primitive_batchers[primitive] = batched
    return primitive


def settings_of_this_thread() -> Callable[[], None]:
    """A function that gives another thread the JAX settings that a ``with`` block has changed in this one."""
    holders: list[Any] = [h for h in jax.config._value_holders.values() if hasattr(h, "get_local")]
    local = [(h, h.get_local()) for h in holders]

    def adopt() -> None:
        for holder, value in local:
            if value is not _config.config_ext.unset:
                holder.set_local(value)

    return adopt


def trace_settings() -> Any:
    """A hashable digest of every JAX setting that changes what is traced (x64, precision, …)."""
    return _config.trace_context()


def without_compilation_cache() -> contextlib.AbstractContextManager[None]:
    """Compile what is compiled inside anew, even if JAX's persistent cache has it."""
    manager: contextlib.AbstractContextManager[None] = _config.enable_compilation_cache(False)
    return manager


def is_absent(device: jax.Device) -> bool:
    """Whether ``device`` is one that programs can be compiled for, but that is not there to run them."""
    return isinstance(device.client, _jaxlib.CompileOnlyPyClient)


def backends_are_initialized() -> bool:
    """Whether JAX has made its devices already, so that their number can't change any more."""
    return bool(_xla_bridge.backends_are_initialized())


# --- processes ------------------------------------------------------------------------------------------


def coordination_client() -> Any:
    """The client of the service that ``jax.distributed.initialize`` has started; ``None`` if nobody has."""
    return _distributed.global_state.client


def process_index_and_count() -> tuple[int, int]:
    """This process's number, and how many there are, without making devices."""
    return _distributed.global_state.process_id, _distributed.global_state.num_processes


def wait_for_key(client: Any, key: str, seconds: float) -> bytes | None:
    """What the coordination service has, or gets within that time, as ``key``; ``None`` if nothing comes."""
    try:
        value: bytes = client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
    return value


def set_unless_set(client: Any, key: str, value: bytes) -> bytes:
    """Set ``key`` in the coordination service, unless it has a value already; which it has."""
    try:
        client.key_value_set_bytes(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        value = client.key_value_try_get_bytes(key)
    return value


# --- primitives -----------------------------------------------------------------------------------------


def identity_primitive(name: str) -> Primitive:
    """A primitive that returns its operands as they are, and survives every transformation.

    Differentiation and batching keep it on the primal values; in compiled code it is nothing at all.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **_: list(xs))
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    _mlir.register_lowering(primitive, lambda _ctx, *xs, **_: xs)
    _batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), list(tangents)

    _ad.primitive_jvps[primitive] = jvp
    return primitive


def collective_primitive(name: str, compute: Callable[..., list[Any]]) -> Primitive:
    """A linear primitive that is its own transpose, operand by operand, such as a sum over replicas.

    Args:
      name: its name.
      compute: ``compute(*arrays, **params)``, a list of its values; in compiled code it stands for the primitive.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(compute)
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    lowering = _mlir.lower_fun(compute, multiple_results=True)
    _mlir.register_lowering(primitive, lowering)
    _batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims)

    def of_nonzero(values: Sequence[Any], params: Any) -> list[Any]:
        present = [i for i, v in enumerate(values) if not isinstance(v, _Zero)]
        results = list(values)
        for i, result in zip(present, primitive.bind(*(values[i] for i in present), **params), strict=True):
            results[i] = result
        return results

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), of_nonzero(tangents, params)

    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = lambda cotangents, *_, **params: of_nonzero(cotangents, params)
    return primitive


def asking_primitive(name: str, answer: Callable[..., Any]) -> Primitive:
    """A primitive of one operand, whose result is a bool that is known before the program is compiled.

    Args:
      name: its name.
      answer: ``answer(x, **params)``; in compiled code it is a constant.
    """
    primitive = Primitive(name)
    primitive.def_impl(answer)
    primitive.def_abstract_eval(lambda x, **_: ShapedArray((), jax.numpy.bool_))
    _mlir.register_lowering(primitive, _mlir.lower_fun(answer, multiple_results=False))

    def batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        # Last, so that the other dims keep their numbers.
        return primitive.bind(jax.numpy.moveaxis(args[0], dims[0], -1), **params), None

    _batching.primitive_batchers[primitive] = batched
    return primitive


def two_way_primitive(name: str) -> Primitive:
    """An identity on one array whose transpose is itself with ``back`` turned round; other params stay as they are."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    _mlir.register_lowering(primitive, lambda _ctx, x, **_: [x])
    _batching.defvectorized(primitive)

    def transpose(cotangent: Any, _x: Any, *, back: bool, **params: Any) -> list[Any]:
        return [primitive.bind(cotangent, back=not back, **params)]

    _ad.deflinear2(primitive, transpose)
    return primitive


def input_primitive(name: str) -> Primitive:
    """A primitive without operands that stands for an input of the program that is still being traced."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *, aval, **_: aval)
    return primitive


# --- programs -------------------------------------------------------------------------------------------


def shard_map_body(traced: Any) -> tuple[Jaxpr, list[Any]]:
    """The body of the one ``shard_map`` in ``traced``, and what it is applied to.

    The second result has an entry for each input of the body: an ``int``, the position among the traced
    function's arguments, or a concrete array that the function closed over.
    """
    closed = traced.jaxpr
    equations = closed.jaxpr.eqns
    if len(equations) != 1 or equations[0].primitive.name != "shard_map":
        raise AssertionError(f"expected one shard_map, got {[e.primitive.name for e in equations]}")
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    positions = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    operands = [
        v.val if isinstance(v, Literal) else constants[v] if v in constants else positions[v]
        for v in equations[0].invars
    ]
    body = equations[0].params["jaxpr"]
    return getattr(body, "jaxpr", body), operands


def program_of(like: Jaxpr, invars: Sequence[Any], equations: Sequence[Equation], outvars: Sequence[Any]) -> Jaxpr:
    """A program of these equations, with the name of another one."""
    effects = frozenset().union(*(e.effects for e in equations))
    return replace_inputs(like, invars, equations, outvars).replace(effects=effects)


def calls_back(jaxpr: Jaxpr) -> bool:
    """Whether a program calls Python functions on the host."""
    return any("callback" in e.primitive.name or any(map(calls_back, sub_jaxprs(e))) for e in jaxpr.eqns)


def acts_outside(equation: Equation) -> bool:
    """Whether an equation does something besides computing its results (prints, calls back, …)."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def constants_of(equation: Equation) -> Sequence[Any]:
    """What the one program that an equation applies has closed over."""
    programs = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr)]
    return programs[0].consts if programs else ()


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
    program = _extend.jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    if staging_trace(current_trace()) is not current_trace():
        # Inlined, so it changes nothing that is compiled, but for the lines that operations come from. Where JAX falls
        # back to running operation by operation, as it does to find a NaN, a bare jaxpr sends it round in circles.
        program = jax.jit(program, inline=True)
    results: list[Any] = program(*args)
    return results


def traced_once(fn: Callable[[], Any]) -> tuple[Callable[[], Any], ShapedArray]:
    """What ``fn``, which returns an array, does: a function that does it without its Python, and the result's kind."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)()
    program = jax.jit(_extend.jaxpr_as_fun(closed), inline=True)
    return lambda: program()[0], shape


def partly(fn: Callable[..., Sequence[Any]], avals: Sequence[Any], outputs: Sequence[int]) -> tuple[Any, list[int]]:
    """A function that computes some results of ``fn`` from what they depend on.

    Returns:
      The function, and the positions of the arguments that it takes.
    """
    closed = jax.make_jaxpr(fn)(*avals)
    wanted = [i in set(outputs) for i in range(len(closed.out_avals))]
    jaxpr, used = _pe.dce_jaxpr(closed.jaxpr, wanted)
    return _extend.jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), [i for i, u in enumerate(used) if u]


def bind(equation: Equation, operands: Sequence[Any], params: Any = None) -> list[Any]:
    """The results of one operation of a program, perhaps with other ``params``, as part of what is traced now."""
    params = equation.primitive.get_bind_params(equation.params if params is None else params)
    names = _source_info.current_name_stack() + equation.source_info.name_stack
    with _source_info.user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def sub_jaxprs(equation: Equation) -> list[Jaxpr]:
    """The programs inside an equation (a loop's body, a branch, a called function)."""
    return [getattr(j, "jaxpr", j) for j in _extend.jaxprs_in_params(equation.params)]


def map_jaxprs(params: Any, fn: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """The params of an equation, with ``fn`` applied to the programs in them; it keeps inputs and outputs."""

    def of_value(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            assert not value.consts
            return ClosedJaxpr(fn(value.jaxpr), ())
        if isinstance(value, Jaxpr):
            return fn(value)
        return tuple(map(of_value, value)) if type(value) is tuple else value

    return {name: of_value(value) for name, value in params.items()}


def host_function(equation: Equation) -> Any:
    """The Python function that a ``pure_callback`` calls."""
    return getattr(equation.params["callback"], "callback_func", None)


def abstract_mesh(mesh: Any) -> Any:
    """What programs inside ``shard_map(mesh=mesh)`` over all of its axes know of the mesh."""
    kinds = (jax.sharding.AxisType.Manual,) * len(mesh.axis_names)
    return mesh.abstract_mesh.update(axis_types=kinds)


def fresh(atom: Any, mesh: Any) -> Any:
    """A new variable of the kind of ``atom`` (or the same literal), for a program inside another mesh."""
    aval = _aval_on(atom.aval, mesh)
    if not isinstance(atom, Literal):
        return _core.Var(aval)
    value = atom.val
    if isinstance(value, _TypedNdArray):  # which has an abstract value of its own
        value = _TypedNdArray(np.asarray(value), aval)
    return _core.Literal(value, aval)


def _aval_on(aval: Any, mesh: Any) -> Any:
    if not isinstance(aval, ShapedArray):
        return aval
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * aval.ndim))
    return aval.update(sharding=sharding)


def on_mesh(equation: Equation, invars: Sequence[Any], outvars: Sequence[Any], mesh: Any) -> Equation:
    """``equation`` with other operands and results, in a program inside another mesh (an :func:`abstract_mesh`)."""
    with equation.ctx.manager:  # which puts back at its end what is changed here
        _config.abstract_mesh_context_manager.set_local(mesh)
        ctx = _core.JaxprEqnContext()
    params = {name: _param_on(value, mesh) for name, value in equation.params.items()}
    return equation.replace(invars=list(invars), outvars=list(outvars), params=params, ctx=ctx)


def _param_on(value: Any, mesh: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(_program_on(value.jaxpr, mesh), value.consts)
    if isinstance(value, Jaxpr):
        return _program_on(value, mesh)
    if isinstance(value, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(mesh, value.spec)
    if isinstance(value, (tuple, list)) and any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value):
        return type(value)(_param_on(v, mesh) for v in value)
    return value


def _program_on(jaxpr: Jaxpr, mesh: Any) -> Jaxpr:
    env: dict[Any, Any] = {}

    def moved(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return fresh(atom, mesh)
        if atom not in env:
            env[atom] = atom if isinstance(atom, _core.DropVar) else fresh(atom, mesh)
        return env[atom]

    return jaxpr.replace(
        constvars=[moved(v) for v in jaxpr.constvars],
        invars=[moved(v) for v in jaxpr.invars],
        eqns=[on_mesh(e, [moved(v) for v in e.invars], [moved(v) for v in e.outvars], mesh) for e in jaxpr.eqns],
        outvars=[moved(v) for v in jaxpr.outvars],
    )


def is_mutable(atom: Any) -> bool:
    """Whether a variable of a program is a mutable array (``jax.new_ref``)."""
    return type(getattr(atom, "aval", None)).__name__ == "AbstractRef"


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """A jaxpr without the constants that may be closed over it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def source_line(equation: Equation) -> str:
    """``file.py:12 (function)``: the user's line that an equation comes from."""
    frame = _source_info.user_frame(equation.source_info.traceback)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def tpu_cluster() -> tuple[str, list[str]] | None:
    """Which cloud the TPUs of this machine belong to, and the addresses of the hosts of the slice; if any."""
    for name, cluster in (("gke", _clusters.GkeTpuCluster), ("google_cloud", _clusters.GceTpuCluster)):
        if cluster.is_env_present():
            return name, cluster._get_worker_list_in_slice()
    return None
