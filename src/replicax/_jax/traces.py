"""The traces in progress, and concrete values inside them."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util as _source_infos

from replicax._jax.internals import (
    ad_checkpoint as _ad_checkpoint,
    config as _config,
    core as _core,
    mesh as _mesh,
    partial_eval as _pe,
)
from replicax._jax.runtime import local_settings

# The setting that holds the mesh of the program being traced; JAX 0.11 has moved it.
_holder: Any = _mesh if hasattr(_mesh, "abstract_mesh_context_manager") else _config
MESH_SETTING = _holder.abstract_mesh_context_manager

# Line numbers in our messages should be the user's: JAX then skips our frames as it skips its own.
_source_infos.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


current_trace: Callable[[], Any] = functools.partial(getattr, _core.trace_ctx, "trace")
"""The innermost JAX transformation now in progress (an opaque object, compared with ``is``); asked at every call."""


def eval_trace() -> Any:
    """The result of :func:`current_trace` when nothing is being traced."""
    return _core.eval_trace


def staging_trace(trace: Any) -> Any:
    """The innermost trace, at or outside ``trace``, that records a program (``jit``, ``scan``, ``cond``, …)."""
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def as_one_program(fn: Callable[..., Any], of: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, as one program where a step's operations are computed one by one; elsewhere just ``fn``.

    ``of``, a function of a library that ``fn`` calls, decides whether it may be one program.
    """

    def call(*args: Any) -> Any:
        compute = getattr(_core.trace_ctx.trace, "compute_as_one_program", None)
        return fn(*args) if compute is None else compute(fn, of, args)

    return call


def traced_for(trace: Any) -> str:
    """The purpose of a staging trace: ``"jit"``, ``"scan"``, …; empty for a trace that does not stage."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return str(getattr(info, "traced_for", ""))


_TRACES = {
    "JVPTrace": ("jax.jvp", "derivative"),
    "LinearizeTrace": ("jax.grad (or jax.vjp)", "derivative"),
    "BatchTrace": ("jax.vmap", "map"),
    "ShardMapTrace": ("jax.shard_map", "program"),
    "jit": ("jax.jit", "program"),
    "scan": ("jax.lax.scan", "loop"),
    "while_cond": ("jax.lax.while_loop", "loop"),
    "while_body": ("jax.lax.while_loop", "loop"),
    "fori_loop": ("jax.lax.fori_loop", "loop"),
}


def transformation_of(trace: Any) -> tuple[str, str]:
    """The transformation that a trace is part of: its name for messages, and its kind (see ``_TRACES``)."""
    return _TRACES.get(traced_for(trace) or type(trace).__name__, ("a transformation of JAX", "program"))


# JAX keeps what it traced of a function that lives on (the body of a scan, a jitted helper), though it may read a
# variable, whose traced value is another one in the next step, after a write and inside value_and_grad, or ask for the
# sizes and the padding of the step's batch. A number that is part of JAX's cache keys makes it trace the function
# again: each trace borrows one that no other trace has, and takes another one when a kept program may have gone stale.
# A number under which no such program has been kept is used again: each new number means that whatever is compiled
# under it is compiled anew. So single operations are always computed under number 0.
_generation = jax.make_user_context(0)


class _Number(int):
    """A number in the keys of JAX's caches that is found by its identity."""


_numbers = map(_Number, itertools.count(1))
_clean: list[_Number] = []  # those that have been given back, a heap
_clean_lock = threading.Lock()


def _borrow() -> _Number:
    with _clean_lock:
        return heapq.heappop(_clean) if _clean else next(_numbers)  # the same ones for the same calls


def _give_back(number: _Number) -> None:
    with _clean_lock:
        heapq.heappush(_clean, number)


def _forget(stale: Sequence[_Number]) -> None:
    """Drop the programs cached under these numbers, with the values that they hold: nothing can find them again."""
    kept = _pe.trace_to_jaxpr
    for function, settings, *_ in kept.cache_keys():
        fn = function()
        if fn is not None and any(part is number for part in settings for number in stale):
            kept.evict_weakref(fn)
            _ad_checkpoint._trace_to_jaxpr.evict_weakref(fn)


class _StagedReads(threading.local):
    happened = False
    depth = 0
    number: _Number
    stale: list[_Number]


_staged = _StagedReads()


def note_read(own: Any) -> None:
    """Note that a program traced inside of ``own``, a step's trace, uses a value of the step: JAX may keep it."""
    if staging_trace(current_trace()) is not staging_trace(own):
        _staged.happened = True


def renew_kept_programs() -> None:
    """Stop reusing kept programs that hold old values of variables, which now have others."""
    if _staged.happened and _staged.depth:
        _staged.happened = False
        _staged.stale.append(_staged.number)
        _staged.number = _borrow()
        _generation(_staged.number).__enter__()  # the enclosing kept_programs() restores it


@functools.cache
def check_caches() -> None:
    """Raise if this JAX keeps what it has traced under one number for another: a step would have old values.

    Called once, before the first step is traced; takes some milliseconds.
    """
    traced: list[str] = []

    def note(place: str, x: Any) -> Any:
        traced.append(place)
        return x

    called = jax.jit(functools.partial(note, "jit"))
    remembered = jax.checkpoint(functools.partial(note, "checkpoint"))

    def body(x: Any, _: Any) -> Any:
        return note("scan", x), None

    def program(x: Any) -> Any:
        return jax.lax.scan(body, remembered(called(x)), length=1)[0]

    with outside_tracing(), jax.disable_jit(False):
        for number in (next(_numbers), next(_numbers)):
            with _generation(number):
                jax.make_jaxpr(program)(0.0)
    missing = [place for place in ("jit", "checkpoint", "scan") if traced.count(place) < 2]
    if missing:
        raise RuntimeError(
            f"JAX {jax.__version__} reuses what it has traced for {', '.join(missing)} although a user context "
            "(jax.make_user_context) has changed, so steps could read old values of variables. Use a release of JAX "
            "that Replicax is tested with, and report this release."
        )


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Trace, and reuse only those of JAX's cached programs that hold no old value of a variable."""
    if _staged.depth:
        yield
        return
    check_caches()
    _staged.depth, _staged.happened, _staged.number, _staged.stale = 1, False, _borrow(), []
    try:
        with _generation(_staged.number):
            yield
    finally:
        _staged.depth = 0
        if _staged.happened:
            _staged.stale.append(_staged.number)
        else:
            _give_back(_staged.number)
        if _staged.stale:
            _forget(_staged.stale)


def trace_of_this_thread() -> Callable[[], None]:
    """A function that restores the present trace of this thread."""
    trace, axis_env = _core.trace_ctx.trace, _core.trace_ctx.axis_env
    depth, number = _staged.depth, _generation.value
    local = [(MESH_SETTING, MESH_SETTING.get_local()), *local_settings()]

    def put_back() -> None:
        _core.trace_ctx.set_trace(trace)
        _core.trace_ctx.set_axis_env(axis_env)
        _staged.depth = depth
        _generation(number).__enter__()
        for holder, value in local:
            holder.set_local(value)

    return put_back


of_no_generation: Callable[[], contextlib.AbstractContextManager[Any]] = functools.partial(_generation, 0)
"""Computes single operations: they hold no variable's value, and are compiled once, whatever else is kept."""

set_current_trace: Callable[[Any], contextlib.AbstractContextManager[Any]] = _core.set_current_trace
"""Records operations in a trace (an outer one), whatever transformation is innermost."""


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute concrete values in the middle of a trace, as if nothing were being traced."""
    axis_env = _core.trace_ctx.axis_env
    eval_trace, no_mesh = _core.eval_trace, _mesh.empty_abstract_mesh
    with _generation(0), _core.set_current_trace(eval_trace), jax.sharding.use_abstract_mesh(no_mesh):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(axis_env)
