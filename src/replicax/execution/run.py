"""Run: a call of a step whose program is known is launched; any other is prepared, and then launched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from replicax import _jax, context
from replicax.devices import forks
from replicax.errors import ContextError
from replicax.execution.cache import ProgramCache
from replicax.execution.compiled.replicate import Executable, replicate
from replicax.execution.launch import launch
from replicax.execution.program.program import Program, VariableRef
from replicax.execution.step_agreement import check_same_step
from replicax.execution.tracing.arguments import Arguments, CantJoinError, NotOneProgramError, not_one_program
from replicax.execution.tracing.capture import capture, checked_programs, state_of_this_thread
from replicax.execution.tracing.function_key import captured_by, function_key, key_after_tracing, module_of
from replicax.execution.tracing.object_attributes import recording_reads
from replicax.execution.tracing.step_errors import where
from replicax.locality import T
from replicax.name_hints import with_hints
from replicax.system import registry
from replicax.user_functions import checked_args, checked_function, checked_kwargs
from replicax.values import ExampleMask, PerReplica, Ragged, Stacked, rebuilt
from replicax.variables.store import Creations
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase
from replicax.workers.replicas import Replicas

_no_trace = _jax.eval_trace()
_no_arguments = Arguments((), {})


@dataclasses.dataclass(slots=True, eq=False)
class Dispatch:
    """One call of a step: its program, and the ``inputs``, the arrays of its arguments, on the devices or the host.

    Every call is one. ``Strategy.run`` launches a :func:`cached_dispatch`, or else calls :func:`run_compiled`;
    ``run_steps`` launches the program in a loop over several elements; Keras' loop keeps the dispatch of its step.
    """

    programs: ProgramCache
    executable: Executable
    inputs: Sequence[Any]
    mask: ExampleMask | None
    settings: Any = None  # JAX's, for which the program was traced

    def launch(self, launched: list[Any] | None = None) -> Any:
        """Run the program, and return what the step returns; see :func:`launch` for ``launched``."""
        executable, replicas = self.executable, self.programs.replicas
        remote = replicas.remote_variables
        if remote is not None:
            remote.bring((*executable.donated, *executable.kept))
        computed = launch(replicas, executable, self.inputs, launched)
        if remote is not None:
            remote.send(executable.written)
        program = executable.program
        padded, scales = executable.padded, program.scales
        leaves = []
        for result in program.results:
            index = result.index
            if index is None:
                value = result.value() if isinstance(result.value, VariableRef) else result.value
                leaves.append(value.copy() if isinstance(value, np.ndarray) else value)
                continue
            array = computed[index]
            if padded is not None and padded[index]:
                leaves.append(PerReplica(Stacked(array), self.mask, executable.example_dims[index]))
            elif result.shapes is not None:
                leaves.append(PerReplica(Ragged(array, result.shapes)))
            elif replicas.num_replicas > 1 and executable.localities[index] is T:
                leaves.append(PerReplica(Stacked(array), scale=scales[index] if scales else None))
            else:
                leaves.append(array)
        return rebuilt(program.result_tree, leaves)

    @property
    def is_current(self) -> bool:
        """Whether it can be launched now, as it is."""
        return _is_plain(self.programs.replicas) and self.settings == _jax.trace_settings()

    def with_inputs(self, inputs: Sequence[Any]) -> Dispatch:
        """This call with other inputs of the same kinds."""
        return Dispatch(self.programs, self.executable, inputs, None, self.settings)


def cached_dispatch(
    programs: ProgramCache, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Dispatch | None:
    """The call of a step that has a program already; ``None`` if there is none, or if anything is unusual.

    Such a call mostly comes right after a program that has emptied the processor's caches, where each Python function
    that is entered costs a microsecond. So this function checks only whether all is as usual; :func:`run_compiled`
    handles the other cases, with checks and messages. (A mesh that is set is one of JAX's settings.)
    """
    if not _is_plain(programs.replicas) or type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
        return None
    settings = _jax.trace_settings()
    arguments = _no_arguments
    if args or kwargs:
        try:
            arguments = Arguments(args, kwargs or {})
        except Exception:
            return None
    executable = programs.find((function_key(fn), arguments.key, settings))
    if executable is None:
        return None
    inputs = executable.placed(arguments) if arguments.arrays else []
    return Dispatch(programs, executable, inputs, arguments.mask, settings)


def _is_plain(replicas: Replicas) -> bool:
    """Return whether a call from here needs no checks: there is one worker, and no step or trace is in progress."""
    return not (
        replicas.is_absent
        or replicas.lockstep.several
        or _jax.current_trace() is not _no_trace
        or not context.may_run_here(replicas)
        or forks.is_stranded
        or _jax.looks_for_nans()
    )


def run_compiled(
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    launched: list[Any] | None = None,
) -> Any:
    """Run any step as one compiled program, also inside ``jax.disable_jit()``; it is traced if it is new."""
    replicas = programs.replicas
    check_call(replicas, fn, args, kwargs)
    arguments = Arguments(tuple(args), dict(kwargs or {})) if args or kwargs else _no_arguments
    with _jax.compiling():
        executable = prepare(programs, fn, arguments, together=True)
        # Count first: the number of a call must be the same on all workers, whatever else is true of it.
        if replicas.lockstep.several and replicas.lockstep.is_to_compare() | executable.policy.is_new:
            executable.policy.is_new = False
            check_same_step(replicas.lockstep, fn, args, kwargs, "as one compiled program", executable.program)
        return Dispatch(programs, executable, executable.placed(arguments), arguments.mask).launch(launched)


def run(
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: RunOptions | None = None,
    launched: list[Any] | None = None,
) -> Any:
    """Run ``fn`` once on each replica; see :meth:`replicax.Strategy.run`, and :func:`launch` for ``launched``."""
    if (options or default_options()).executor == "per_replica":
        check_call(programs.replicas, fn, args, kwargs)
        return registry.run_per_replica()(programs, fn, args, kwargs, launched=launched)
    try:
        return run_compiled(programs, fn, args, kwargs, launched)
    except NotOneProgramError as why:
        if options is not None:
            raise
        return registry.run_per_replica()(programs, fn, args, kwargs, why, launched=launched)
    except FloatingPointError as error:
        _find_operation(error, programs, fn, args, kwargs)
        raise


def _find_operation(
    error: FloatingPointError,
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> None:
    """Let ``error`` come from the operation that has computed a NaN, if plain Python on this one worker meets it."""
    if programs.replicas.lockstep.several or not _jax.looks_for_nans():
        return
    try:
        registry.run_per_replica()(programs, fn, args, kwargs, stores=False)
    except FloatingPointError as found:
        error.args, error.__traceback__ = (f"{found}: {where(found, fn)}",), found.__traceback__
    except Exception:  # of what only compiled steps can do
        error.add_note("(Its operation is looked for in plain Python, but this step runs compiled only.)")


def prepare(programs: ProgramCache, fn: Callable[..., Any], arguments: Arguments, together: bool = False) -> Executable:
    """The executable of ``fn`` for these arguments, traced now if it is new.

    If all workers do this ``together``, and this one fails, it tells the others.
    """
    step = function_key(fn)
    key = (step, arguments.key, _jax.trace_settings())
    replicas = programs.replicas
    executable = programs.find(key)
    if executable is None:
        name = getattr(fn, "__name__", "the step")
        if (why_not := programs.why_refused(key)) is not None:
            raise not_one_program(name, why_not)
        created = programs.created_by(fn, step)
        creations = Creations(replicas, created)
        put_back = state_of_this_thread()
        try:
            with recording_reads((step.captured, arguments.key), step.code, module_of(fn), captured_by(fn)):
                program = _captured(replicas, fn, arguments, creations)
            if program.is_placed:
                executable = registry.replicate_placed()(program, replicas.mesh)
            else:
                executable = replicate(program, replicas.mesh)
                if arguments.is_ragged and replicas.num_logical_devices > 1:
                    registry.check_ragged_text()(executable.compiled_text())
        except CantJoinError as why:
            put_back()
            creations.undo()
            programs.refuse(key, str(why))
            raise not_one_program(name, str(why)) from None
        except BaseException as error:
            put_back()
            creations.undo()
            if together:
                replicas.lockstep.fail(error, f"{name}, while it was traced")
            raise
        finally:
            programs.keep_created(created, fn, step)
        if created and programs.created_by(fn, step) is not created:  # those of a thread that traced it meanwhile
            return prepare(programs, fn, arguments, together)
        after = key_after_tracing(fn, step)
        programs.keep_created(created, fn, after)
        programs.add((after, arguments.key, key[2]), executable, fn)
    return executable


@heartbeat.phase(Phase.COMPILE)
@_jax.compiling()
def _captured(replicas: Replicas, fn: Callable[..., Any], arguments: Arguments, creations: Creations) -> Program:
    if arguments.is_ragged:
        captured: Program = registry.capture_ragged()(replicas, fn, arguments, creations)
        return captured
    traced, dims = arguments.traced(replicas.num_replicas), arguments.example_dims()
    program = capture(replicas, fn, traced, arguments.rebuild(), creations, arguments.paths, dims)
    [program] = checked_programs([program], replicas, fn, arguments.paths)
    return program


def check_call(
    replicas: Replicas,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    method: str = "strategy.run",
) -> None:
    """Raise unless ``replicas`` may run ``fn`` with these arguments from here, with ``method``."""
    forks.check_not_stranded(method)
    context.check_cross_replica(replicas, method, "A step can't run another: call the function itself.")
    if context.in_step():
        raise ContextError(f"{method} was called in a merge_fn, inside a step that is still running")
    if _jax.current_trace() is not _no_trace:
        name, kind = _jax.transformation_of(_jax.current_trace())
        raise ContextError(
            f"{method} was called inside {name}, but runs a program of its own, which JAX can't trace through: call it "
            f"outside jax.jit, jax.grad and the like. {_INSTEAD[kind]}"
        )
    checked_function(fn, f"{method}(fn, …)")
    checked_args(args, f"{method}(fn, args)")
    checked_kwargs(kwargs, f"{method}(fn, args, kwargs)")


_INSTEAD = {
    "derivative": (
        "Differentiate inside the step: strategy.run(step), where step calls jax.grad or replicax.value_and_grad and "
        "reduces the gradients over the replicas."
    ),
    "map": "Map inside the step: strategy.run(step), where step calls jax.vmap.",
    "loop": "For many steps in one program use strategy.run_steps, or let the step itself loop.",
    "program": "The step is compiled as it is: leave the transformation out, or use it inside the step.",
}
"""What to write instead of running a step inside a transformation of JAX's, by its kind."""


# --- options --------------------------------------------------------------------------------------------


Executor = Literal["compiled", "per_replica"]


@with_hints
@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of ``Strategy.run``.

    Attributes:
      executor: ``"compiled"``, one compiled program for all replicas; or ``"per_replica"``, the step as plain
        Python, one replica at a time, on concrete values.

    Raises:
      ValueError: there is no such executor.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     print("replica", replicax.get_replica_context().replica_id_in_sync_group)
    >>> strategy.run(step, options=replicax.RunOptions(executor="per_replica"))
    replica 0
    replica 1
    """

    executor: Executor = "compiled"

    def __post_init__(self) -> None:
        if self.executor not in ("compiled", "per_replica"):
            raise ValueError(f"RunOptions: executor must be 'compiled' or 'per_replica', got {self.executor!r}")


COMPILED, _PER_REPLICA = RunOptions("compiled"), RunOptions("per_replica")


def debug() -> contextlib.AbstractContextManager[None]:
    """Run steps as plain Python: one replica at a time, with ``print``, ``breakpoint()`` and real values.

    Inside this context ``strategy.run`` uses the executor ``"per_replica"`` unless its options say otherwise. The
    results are those of the compiled program; it is slower. Tracebacks have all frames, also those of Replicax and JAX.
    Steps run this way inside ``jax.disable_jit()``, too.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> x = strategy.distribute_values_from_function(lambda ctx: 10.0 * ctx.replica_id_in_sync_group)
    >>> def step(x):
    ...     if x > 5:  # a compiled step could not do this
    ...         print("large:", x)
    ...     return replicax.get_replica_context().all_reduce("sum", x)
    >>> with replicax.debug():
    ...     strategy.run(step, args=(x,))
    large: 10.0
    Array(10., dtype=float32)
    """
    return _Debug()


class _Debug(contextlib.ContextDecorator):
    """The context manager of :func:`debug`; it holds until it is left, as :class:`replicax.context.Scope` does."""

    def __enter__(self) -> None:
        _jax.debugging.set(_jax.debugging.get() + 1)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _jax.debugging.set(_jax.debugging.get() - 1)


def default_options() -> RunOptions:
    """The options of a ``run`` that names none."""
    is_apart = _jax.debugging.get() or jax.config.jax_disable_jit  # type: ignore[attr-defined, unused-ignore]
    return _PER_REPLICA if is_apart else COMPILED
