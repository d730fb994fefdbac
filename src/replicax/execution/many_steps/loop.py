"""The loop: many steps in one dispatch.

The captured program of one step runs in a loop on the devices, over a group of elements (see
:func:`replicax.execution.compiled.replicate.replicate`). So it means what the steps mean one at a time, its Python
runs once for all lengths of groups, and an element whose replicas differ in size is a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from replicax import _jax
from replicax.devices.host_values import is_key
from replicax.execution.cache import ProgramCache
from replicax.execution.compiled.replicate import Executable
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.execution.many_steps.step_outputs import MultiStepContext
from replicax.execution.program.program import Program
from replicax.execution.run import Dispatch, default_options, prepare, run
from replicax.execution.step_agreement import check_same_step
from replicax.execution.tracing.function_key import Wrapper
from replicax.execution.tracing.stateful_arguments import stateful_call
from replicax.pytrees import registered
from replicax.user_functions import checked_result, function_name, signature_of, why_not_taken


class Taken(NamedTuple):
    """The elements of one call of :func:`run_steps`."""

    groups: list[ElementGroup | Single]
    error: Exception | None = None
    """The error in place of the element after them, if there is one."""
    give_back: Callable[[int], None] = lambda count: None
    """Takes back the last ``count`` elements, which have not been used."""


StepSource = Callable[[int, bool], Taken]
"""Returns the next elements: at most so many, and at least one; raises if there is none. The flag says whether the step
can take them in groups."""


class Step(Wrapper):
    """``fn(ctx, *inputs)`` as a function of an element that returns the outputs set in ``ctx``.

    Outputs are compared with ``initial_loop_values``, a dict or ``None``, where the Python of the step runs: a step
    that raises has changed nothing, on either executor. ``distinction`` tells it from other steps around ``fn``.
    """

    argument = "element"

    def __init__(self, fn: Callable[..., Any], initial_loop_values: Any = None, *distinction: Hashable) -> None:
        self._expected: dict[str, str] | None = None
        if initial_loop_values is not None:
            if not isinstance(initial_loop_values, dict):
                raise ValueError(
                    f"initial_loop_values must be a dict with a value for each output, got {initial_loop_values!r}"
                )
            self._expected = _output_types(initial_loop_values)
        super().__init__(fn, *(self._expected or {}).items(), *distinction)

    def __call__(self, element: Any) -> Any:
        ctx = MultiStepContext()
        inputs = element if isinstance(element, tuple) else (element,)
        _check_takes(self.fn, ctx, inputs)
        result = self.fn(ctx, *inputs)
        checked_result(result, self.fn, "strategy.run_steps")
        if self._expected is not None and (found := _output_types(ctx.last_step_outputs)) != self._expected:
            raise ValueError(_difference(self.__name__, self._expected, "initial_loop_values", found, "the step"))
        return ctx._closed_outputs()


def _check_takes(fn: Callable[..., Any], ctx: MultiStepContext, inputs: Sequence[Any]) -> None:
    """Raise a TypeError unless ``fn`` takes a context and these parts of an element."""
    if why := why_not_taken(fn, ctx, *inputs):
        name = function_name(fn)
        parts = "the element" if len(inputs) == 1 else f"the {len(inputs)} parts of the element, which is a tuple"
        raise TypeError(
            f"strategy.run_steps calls the step as {name}(ctx, *inputs), with a MultiStepContext and {parts}, but it "
            f"is {name}{signature_of(fn)}: {why}. Write def {name}(ctx, {'batch' if len(inputs) == 1 else '*inputs'})"
        )


def run_steps(
    programs: ProgramCache, fn: Callable[..., Any], source: StepSource, steps: int, initial_loop_values: Any
) -> MultiStepContext:
    """Run ``fn`` for the next elements of ``source``; see :meth:`replicax.Strategy.run_steps`."""
    call = stateful_call(programs.replicas, fn, (), None)
    if call is not None:
        fn = call.fn
    per_replica = default_options().executor == "per_replica"
    groups, error, give_back = source(steps, not per_replica)
    launches: list[list[Any]] = []
    returned: Any = None
    try:
        if per_replica:
            groups = [Single(element) for group in groups for element in group.elements()]
        step = fn if isinstance(fn, Step) else Step(fn, initial_loop_values)
        prepared = [prepare(programs, step, g.arguments, True) if isinstance(g, ElementGroup) else None for g in groups]
        if len(groups) > 1:
            _check_outputs(step.__name__, prepared, groups)
        pairs: list[tuple[ElementGroup | Single, Executable | None]] = []
        for group, program in zip(groups, prepared, strict=True):
            # A pipeline over logical devices is many programs, which keep the devices busy by themselves.
            # And a NaN is looked for step by step.
            stays = program is None or (program.loops and not _jax.looks_for_nans())
            pairs += [(group, program)] if stays else [(Single(element), None) for element in group.elements()]
        groups, launches = [group for group, _ in pairs], [[] for _ in pairs]
        for (group, program), launched in zip(pairs, launches, strict=True):
            if isinstance(group, Single):
                returned = run(programs, step, (group.element,), None, launched=launched)
            else:
                returned = _run_group(programs, step, group, program, launched)
    except BaseException:
        give_back(sum(group.count for group in groups[sum(map(bool, launches)) :]))
        raise
    count = sum(group.count for group in groups)
    if error is not None:
        error.add_note(f"{count} of the {steps} steps of this run_steps have been run, on the elements before.")
        raise error
    return MultiStepContext._of(returned, count)


def _run_group(
    programs: ProgramCache, step: Step, group: ElementGroup, program: Executable | None, launched: list[Any]
) -> Any:
    """Run a group, and return the result of its last step; ``launched`` gets an item when its variables are written."""
    assert program is not None
    replicas = programs.replicas
    is_new = group.count not in program.repetitions
    repeated = program.repeated(group.count)
    if replicas.lockstep.several and replicas.lockstep.is_to_compare() | is_new:
        how = f"{group.count} times in one compiled program"
        check_same_step(replicas.lockstep, step, (group.described,), None, how, program.program)
    with _jax.compiling():
        return Dispatch(programs, repeated, group.arrays, group.mask if repeated.padded else None).launch(launched)


# --- outputs --------------------------------------------------------------------------------------------


def _check_outputs(name: str, programs: Sequence[Executable | None], groups: Sequence[ElementGroup | Single]) -> None:
    """Raise a ValueError that names the first output that differs, unless all steps have the same outputs."""
    expected, whose = None, ""
    start = 0
    for group, program in zip(groups, programs, strict=True):
        if program is not None:
            types = _output_types(_outputs(program.program))
            if expected is not None and types != expected:
                last = start + group.count - 1
                where = f"step {start}" if last == start else f"steps {start} to {last}"
                raise ValueError(_difference(name, expected, whose, types, where))
            expected, whose = types, f"step {start} of these"
        start += group.count


def _outputs(program: Program) -> Any:
    """One replica's outputs, with ``jax.ShapeDtypeStruct`` in the place of arrays."""
    avals: list[Any] = [v.aval for v in program.jaxpr.outvars[len(program.writes) :]]
    leaves = [
        r.value if r.index is None else jax.ShapeDtypeStruct(avals[r.index].shape, avals[r.index].dtype)
        for r in program.results
    ]
    return jax.tree_util.tree_unflatten(program.result_tree, leaves)["last"]


def _output_types(outputs: Any) -> dict[str, str]:
    """The dtype and shape of each output, by its path."""
    types = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(registered(outputs))[0]:
        array = leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)
        dtype = array.dtype if is_key(array.dtype) else jax.dtypes.canonicalize_dtype(array.dtype)
        types[jax.tree_util.keystr(path)] = f"{dtype}{list(array.shape)}"
    return types


def _difference(name: str, expected: dict[str, str], whose: str, found: dict[str, str], where: str) -> str:
    path = next(p for p in [*expected, *found] if expected.get(p) != found.get(p))
    was, now = (types.get(path, "missing") for types in (expected, found))
    cure = (
        "Leave initial_loop_values out, or give for each output a value of its dtype and shape."
        if whose == "initial_loop_values"
        else "Set outputs whose shapes don't depend on the size of the batch (reduce them first), or have batches of "
        "one size: drop_remainder, or InputOptions(partial_batch='pad')."
    )
    return (
        f"{name}: all steps must have the same outputs, but output{path} is {was} in {whose}, and {now} in {where}. "
        f"{cure}"
    )
