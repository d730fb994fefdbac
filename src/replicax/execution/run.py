"""Run: find or make the program of a step, and call it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax import _jax, context
from replicax.errors import ContextError
from replicax.execution.compiled.replicate import Executable, replicate
from replicax.execution.launch import launch
from replicax.execution.pipeline.placed_program import is_placed, replicate_placed
from replicax.execution.program.program import Program
from replicax.execution.step_agreement import check_same_step
from replicax.execution.thread_state import state_of_this_thread
from replicax.execution.tracing.arguments import Arguments, not_one_program
from replicax.execution.tracing.capture import capture
from replicax.execution.tracing.function_key import function_key, key_after_tracing
from replicax.execution.uneven.sizes import capture_uneven
from replicax.execution.uneven.straight_line import CantJoinError
from replicax.locality import T
from replicax.user_functions import checked_args, checked_function, checked_kwargs
from replicax.values import ExampleMask, PerReplica, Stacked, Uneven
from replicax.variables.store import Creations

if TYPE_CHECKING:
    from replicax.strategy import Strategy


_no_trace = _jax.eval_trace()
_no_arguments = Arguments((), {})


NEW: Any = object()
"""What :func:`run_known` returns for a call that it leaves to :func:`run`."""


def run_known(strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """What :func:`run` does for almost every call: ``fn`` has a program, and nothing is the matter.

    Such a call mostly comes right after a program that has emptied the processor's caches, where each Python function
    that is entered costs a microsecond. So all that has to be looked at is looked at here, and whatever is not as usual
    makes it a :data:`NEW` call, with its checks and messages. (A mesh that is set is one of JAX's settings.)
    """
    extended = strategy.extended
    if (
        extended.is_absent
        or extended.lockstep.several
        or type(args) is not tuple
        or (kwargs is not None and type(kwargs) is not dict)
        or _jax.current_trace() is not _no_trace
        or not context.is_right_across(strategy)
    ):
        return NEW
    arguments = _no_arguments
    if args or kwargs:
        try:
            arguments = Arguments(args, kwargs or {})
        except Exception:
            return NEW
    executable = extended.programs.find((function_key(fn), arguments.key, _jax.trace_settings()))
    if executable is None:
        return NEW
    computed = launch(strategy, executable, executable.placed(arguments) if arguments.arrays else [])
    return results(executable, computed, extended.num_replicas, arguments.mask)


def run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    launched: list[Any] | None = None,
) -> Any:
    """Run ``fn`` once on each replica; see :meth:`replicax.Strategy.run`, and :func:`launch` for ``launched``."""
    arguments = arguments_of(strategy, fn, args, kwargs)
    executable = prepare(strategy, fn, arguments, together=True)
    extended = strategy.extended
    # Count first: the number of a call must be the same on all workers, whatever else is true of it.
    if extended.lockstep.several and extended.calls.is_to_compare() | extended.programs.is_first_call(executable):
        check_same_step(strategy, fn, args, kwargs, "as one compiled program")
    computed = launch(strategy, executable, executable.placed(arguments), launched)
    return results(executable, computed, strategy.num_replicas_in_sync, arguments.mask)


def arguments_of(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    method: str = "strategy.run",
) -> Arguments:
    """The arguments of a call of ``fn`` that ``strategy`` may run.

    Raises:
      ContextError, TypeError: see :func:`check_call`.
    """
    check_call(strategy, fn, args, kwargs, method)
    return Arguments(tuple(args), dict(kwargs or {})) if args or kwargs else _no_arguments


def prepare(strategy: Strategy, fn: Callable[..., Any], arguments: Arguments, together: bool = False) -> Executable:
    """The executable of ``fn`` for these arguments, traced now if it is new.

    Args:
      strategy: whose replicas run it.
      fn: the step.
      arguments: of the step.
      together: whether all workers do this, so that they are told if this one fails.
    """
    key = (function_key(fn), arguments.key, _jax.trace_settings())
    cache = strategy.extended.programs
    executable = cache.find(key)
    if executable is None:
        if arguments.is_uneven:
            why_not = cache.why_refused(key)
            if why_not is not None:
                raise not_one_program(getattr(fn, "__name__", "the step"), why_not)
        creations = Creations(strategy, cache.created_by(key[0]))
        put_back = state_of_this_thread()
        name = getattr(fn, "__name__", "the step")
        try:
            program = _captured(strategy, fn, arguments, creations)
            if is_placed(program):
                executable = replicate_placed(program, strategy.extended.mesh)
            else:
                executable = replicate(program, strategy.extended.mesh)
        except CantJoinError as why:
            put_back()
            creations.undo()
            cache.refuse(key, str(why))
            raise not_one_program(name, str(why)) from None
        except BaseException as error:
            put_back()
            creations.undo()
            if together:
                strategy.extended.lockstep.fail(error, f"{name}, while it was traced")
            raise
        after = key_after_tracing(fn, key[0])
        cache.share_created(key[0], after)
        cache.add((after, *key[1:]), executable, program.name)
    return executable


def _captured(strategy: Strategy, fn: Callable[..., Any], arguments: Arguments, creations: Creations) -> Program:
    if arguments.is_uneven:
        return capture_uneven(strategy, fn, arguments, creations)
    traced = arguments.traced(strategy.num_replicas_in_sync)
    dims = arguments.example_dims()
    return capture(strategy, fn, traced, arguments.rebuild(), creations, dims, arguments.paths)


def check_call(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    method: str = "strategy.run",
) -> None:
    """Raise unless ``strategy`` may run ``fn`` from here, with ``method``.

    Raises:
      ContextError: called inside a step, in another strategy's scope, or while JAX traces.
      TypeError: ``fn`` is not callable, ``args`` no tuple, or ``kwargs`` no dict.
    """
    context.check_cross_replica(strategy, method, "A step can't run another: call the function itself.")
    if context.in_step():
        raise ContextError(f"{method} was called in a merge_fn, inside a step that is still running")
    if _jax.current_trace() is not _no_trace:
        raise ContextError(f"{method} compiles the step itself: call it outside jax.jit, jax.grad and the like")
    if not callable(fn):
        checked_function(fn, f"{method}(fn, …)")
    if not isinstance(args, (tuple, list)):
        checked_args(args, f"{method}(fn, args)")
    if kwargs is not None:
        checked_kwargs(kwargs, f"{method}(fn, args, kwargs)")


def results(executable: Executable, computed: Sequence[jax.Array], num_replicas: int, mask: ExampleMask | None) -> Any:
    """What the step returned, from what its program has computed."""
    leaves = []
    padded = executable.padded
    for result in executable.program.results:
        if result.index is None:
            value = result.value
            leaves.append(value() if isinstance(value, weakref.ref) else value)
        else:
            array = computed[result.index]
            if padded is not None and padded[result.index]:
                leaves.append(PerReplica(Stacked(array), mask, executable.example_dims[result.index]))
                continue
            if result.shapes is not None:
                leaves.append(PerReplica(Uneven(array, result.shapes)))
                continue
            stacked = num_replicas > 1 and executable.localities[result.index] is T
            leaves.append(PerReplica(Stacked(array)) if stacked else array)
    return jax.tree_util.tree_unflatten(executable.program.result_tree, leaves)
