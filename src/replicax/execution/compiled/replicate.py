"""Replicate: one program for one replica becomes one compiled program for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

from replicax import _jax
from replicax.devices.logical_axes import over_replicas
from replicax.devices.mesh import REPLICA_AXIS, sharding_on
from replicax.execution.compiled.automatic_axes import AutomaticAxes
from replicax.execution.compiled.backend import Target, backend_of
from replicax.execution.compiled.host_calls import HostCalls, HostErrors
from replicax.execution.compiled.local_values import (
    Each,
    array_of,
    as_local_value,
    as_stored_array,
    of_replicas_here,
    stored_here,
    value_layout,
    wrapped,
    zeros_like,
)
from replicax.execution.compiled.program_rewriting import Rewriting, Rule
from replicax.execution.compiled.split_variables import evaluated
from replicax.execution.program.infer import infer
from replicax.execution.program.program import Program, first_of
from replicax.execution.tracing.arguments import Arguments
from replicax.hlo.collective_instructions import Collective, collectives_in
from replicax.locality import Locality, M, T
from replicax.system import registry
from replicax.variables.layout import Layout, Mirrored, Split
from replicax.variables.slots import Slot
from replicax.workers.launch_log import Label


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HomeTransfer:
    """The shardings of variables' arrays inside the program, and between calls."""

    donated: list[NamedSharding]
    kept: list[NamedSharding]
    homes: list[Sharding]
    """The shardings of the written ones between calls."""


@dataclasses.dataclass(slots=True, eq=False)
class LaunchPolicy:
    """How a program is launched, so that its variables outlive a call that fails."""

    # Whether the memory of variables is given to the new values. Not if the program may fail while it runs, as it calls
    # the user's Python on the host, looks for NaNs or has collectives with a deadline.
    donates: bool
    waits: bool  # whether a call is over when the program is
    # Whether it may fail on one worker, and not on others: so they tell each other how it has ended.
    ends_together: bool
    # The number of kinds of calls that JAX can make without Python in between, as of a call that was not the first of
    # its kind; ``None`` until there is one. See :mod:`replicax.execution.launch`.
    cached_calls: int | None = None
    errors: HostErrors = dataclasses.field(default_factory=HostErrors)  # of the user's Python that it calls on the host
    is_new: bool = True  # whether several workers have yet to compare what they run


def policy_for(program: Program, devices: int) -> LaunchPolicy:
    """The launch policy of ``program`` for so many devices; raises if a ``jax.debug.print`` is wrong.

    Such a print calls nothing of the user's, so it costs no memory. But each call waits for it.
    """
    fails_alone = _jax.calls_back(program.jaxpr) or _jax.looks_for_nans()
    may_fail = fails_alone or program.timeout is not None
    waits = _jax.prints(program.jaxpr, devices) or may_fail
    return LaunchPolicy(donates=not may_fail, waits=waits, ends_together=fails_alone)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A program ready to run on a mesh; get one with ``strategy.extended.trace``.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> program = strategy.extended.trace(lambda x: x * 2, args=(1.0,))
    >>> program.localities
    (<Locality.MIRRORED: 'M'>,)

    ``call(donated, kept, arguments, constants)`` takes the arrays of the variables that are read and written,
    of those that are only read, and the rest; it returns the arrays of the written variables and the results.
    """

    program: Program
    localities: tuple[Locality, ...]
    """The localities of the step's computed results."""
    call: Any
    donated: tuple[Slot, ...]
    kept: tuple[Slot, ...]
    written: tuple[Slot, ...]
    """The donated ones first, in the same order."""
    mesh: Mesh
    home_transfer: HomeTransfer | None
    """Set if arrays of variables lie elsewhere between calls than in the program."""
    policy: LaunchPolicy
    """How it is launched."""
    padded: tuple[bool, ...] | None
    """Which of the step's computed results have rows that may be padding; ``None`` if no argument has."""
    example_dims: tuple[int | None, ...]
    """The dim of these rows in each result; ``None`` if that can't be told."""
    steps: int | None = None
    """How often it runs the program, each time on another element of its arguments; ``None``: once, on all of them."""
    label: Label = dataclasses.field(default_factory=Label)
    """Tells it from other programs, on all workers."""
    repetitions: dict[int, Executable] = dataclasses.field(default_factory=dict)
    """The results of :meth:`repeated`, by the number of steps."""

    def __repr__(self) -> str:
        found = first_of([locality.name.lower() for locality in self.localities])
        return (
            f"Executable of {self.program!r}\n  localities of the results: {found or 'none'}\n"
            "All operations: program.jaxpr; what each device runs: compiled_text(), collectives()"
        )

    @property
    def loops(self) -> bool:
        """Whether :meth:`repeated` can run it several times in one call."""
        return True

    def ready(self) -> Any:
        """A function that calls it, after all preparations that need no arrays."""
        return self.call

    def repeated(self, steps: int) -> Executable:
        """The same program, ``steps`` times in one call."""
        if steps not in self.repetitions:
            self.repetitions[steps] = replicate(self.program, self.mesh, steps)
        return self.repetitions[steps]

    def placement(self) -> Any:
        """The place of each operation and byte of a step that assigns values to logical devices.

        Returns:
          A ``PlacementReport`` (see ``replicax.pipeline``).

        Raises:
          ValueError: this step assigns nothing to any: it is one program, in which all devices do the same.
        """
        raise ValueError(
            "placement() is of steps that assign values to logical devices (strategy.assign_to_logical_device), and "
            f"{self.program.name!r} assigns none: all its devices run one program; see compiled_text(), collectives()"
        )

    def compiled(self, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """The program as JAX's compiled object, which has analyses of its memory and cost.

        Args:
          options: for the compiler, as ``jax.stages.Lowered.compile`` takes them.
        """
        return self.lowered().compile(options)

    @_jax.public_call
    def lowered(self) -> jax.stages.Lowered:
        """The program as JAX's lowered object, before it is compiled."""
        with _jax.compiling():
            lowered: jax.stages.Lowered = self.call.lower(*self.inputs())
        return lowered

    def inputs(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The inputs of ``call``, as shapes, dtypes and shardings."""
        uses = self.program.uses
        donated, kept = (
            [self._stored_aval(uses[slot].aval, uses[slot].layout) for slot in slots]
            for slots in (self.donated, self.kept)
        )
        several = () if self.steps is None else (self.steps,)
        arguments = [
            self._stored_aval(aval.update(shape=(*several, *aval.shape)), value_layout(locality, self.program.replicas))
            for aval, locality in self.program.arguments
        ]
        return donated, kept, arguments, self.program.constants

    def _stored_aval(self, aval: jax.ShapeDtypeStruct, layout: Layout) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, layout.spec)
        return aval.update(shape=layout.stored_shape(aval.shape), sharding=sharding)

    def placed(self, arguments: Arguments) -> list[Any]:
        """The arguments of a call, on the devices where the program takes them."""
        return arguments.placed(self.mesh)

    def compiled_text(self) -> str:
        """The optimised HLO of the program, as one device runs it."""
        return self.compiled().as_text() or ""

    def collectives(self) -> list[Collective]:
        """The collectives that one run of the compiled program issues, in order."""
        return collectives_in(self.compiled_text())


def replicate(program: Program, mesh: Mesh, steps: int | None = None) -> Executable:
    """Compile ``program`` for the replicas of ``mesh``, in which it was captured; :func:`infer` checks it before.

    Per-replica values travel as one array ``[num_replicas, *shape]`` with a slice on each replica's device, mirrored
    values as one replicated array. If there are fewer devices than replicas, each has the slices of several (see
    :mod:`replicax.shared_devices`). Variables that are split over the replicas stay in pieces (see
    :mod:`replicax.execution.compiled.split_variables`). The layout of every output is pinned, so that the next call
    finds what it expects. Variables that are read and written are donated: their old arrays are reused, if the program
    can't fail while it runs (:class:`LaunchPolicy`).

    With ``steps``, the program runs so many times in a loop. Each argument then has one more dim in front of one
    replica's shape: ``[num_replicas, steps, *shape]``, or ``[steps, *shape]`` if mirrored. Written variables go from
    one time to the next, as they would from call to call; so localities are those of one time. Results are the last.
    """
    count = program.replicas
    several, per_device = count > 1, count // mesh.shape[REPLICA_AXIS]
    in_pieces = largest_split(program)
    split = in_pieces is not None
    in_order = program.reproducible and several
    localities: dict[Any, Locality] | None = {} if split or per_device > 1 or in_order else None
    outputs = infer(program.jaxpr, program.input_localities, program.obligations, check=several, localities=localities)
    n_written = len(program.writes)
    result_localities = outputs[n_written:]
    padded = example_dims = None
    if program.example_dims is not None:
        padded, example_dims = registry.examples_in_results()(program, outputs)

    order = program.order
    donated, kept, written = order.donated, order.kept, order.written
    layouts_in: Groups[Layout] = (
        [program.reads[i].layout for i in donated],
        [program.reads[i].layout for i in kept],
        [value_layout(locality, count) for _, locality in program.arguments],
        [Mirrored()] * len(program.constants),
    )
    # A single replica's results come back bare, so nothing is stacked there.
    layouts_out: Groups[Layout] = (
        [program.writes[i].layout for i in written],
        [
            value_layout(locality if several or (padded and padded[i]) else M, count)
            for i, locality in enumerate(result_localities)
        ],
    )

    def run(*groups: list[Any]) -> Groups[Any]:
        reads: dict[int, Any] = dict(zip([*donated, *kept], [*groups[0], *groups[1]], strict=True))
        values = [*(reads[i] for i in range(len(program.reads))), *groups[2], *groups[3]]
        wanted = [*(use.layout for use in program.writes), *layouts_out[1]]
        if per_device > 1 or in_order:
            given = [*(use.layout for use in program.reads), *layouts_in[2], *layouts_in[3]]
            evaluate = registry.evaluate_on_device()
            results = evaluate(program.jaxpr, values, given, wanted, localities, program, per_device, split)
        elif rewriting is not None and localities is None:  # there is no other pass
            results = _jax.called(rewriting.rewritten(program.jaxpr), values)
        else:
            results = evaluated(program.jaxpr, values, wanted, localities)
        return [results[i] for i in written], results[n_written:]

    def run_in_a_loop(*groups: list[Any]) -> Groups[Any]:
        state, kept_values, elements, constants = groups
        # Variables that are written without being read, and the results, start as zeros, which are never seen.
        unread = [zeros_like(stored_here(program.writes[i], per_device)) for i in written[len(donated) :]]
        start = [array_of(v) for v in state] + unread
        nothing_yet = [
            zeros_like(of_replicas_here(v.aval, layout, per_device))
            for v, layout in zip(program.jaxpr.outvars[n_written:], layouts_out[1], strict=True)
        ]

        def step(carry: tuple[list[Any], list[Any]], element: list[Any]) -> tuple[Any, None]:
            values = [wrapped(v, layout, per_device) for v, layout in zip(carry[0], layouts_in[0], strict=False)]
            one_by_one = [wrapped(v, layout, per_device) for v, layout in zip(element, layouts_in[2], strict=True)]
            new, results = run(values, kept_values, one_by_one, constants)
            return (list(map(array_of, new)), list(map(array_of, results))), None

        # In an Each the dim of the steps comes after that of the replicas.
        slices = [jnp.moveaxis(v.array, 1, 0) if isinstance(v, Each) else v for v in elements]
        last: Groups[Any] = lax.scan(step, (start, nothing_yet), slices, length=steps)[0]
        return _each(lambda v, layout: wrapped(v, layout, per_device), last, layouts_out)

    repeatedly = run if steps is None else run_in_a_loop
    policy = policy_for(program, mesh.size)
    in_a_loop = steps is not None or per_device > 1 or in_order
    target = target_for(mesh, in_a_loop, in_pieces, in_order)
    rewriting = rewriting_for(program.jaxpr, mesh, target, policy.errors)
    at_the_end = None if localities is None else rewriting
    call = over_replicas_of(
        mesh, repeatedly, program.jaxpr, layouts_in, layouts_out, program.name, policy.donates, at_the_end, target
    )
    home_transfer = None
    if any(use.layout.home is not None for use in program.uses.values()):
        donated_at, kept_at = ([NamedSharding(mesh, layout.spec) for layout in group] for group in layouts_in[:2])
        home_transfer = HomeTransfer(donated_at, kept_at, [program.writes[i].layout.sharding(mesh) for i in written])
    return Executable(
        program=program,
        localities=tuple(T if locality is T else M for locality in result_localities),
        call=call,
        donated=tuple(program.reads[i].slot for i in donated),
        kept=tuple(program.reads[i].slot for i in kept),
        written=tuple(program.writes[i].slot for i in written),
        mesh=mesh,
        home_transfer=home_transfer,
        padded=padded,
        example_dims=example_dims or (),
        steps=steps,
        policy=policy,
    )


VARIABLES = ("args[0]", "args[1]")
"""How JAX names the variables among a program's arguments: the first two groups that ``Executable.call`` takes."""
Item = TypeVar("Item")
Groups = tuple[list[Item], ...]


def rewriting_for(jaxpr: _jax.Jaxpr, mesh: Mesh, target: Target, host_errors: HostErrors) -> Rewriting | None:
    """The last pass over ``jaxpr``, compiled for ``mesh``; ``None`` if there is nothing to rewrite."""
    rules: list[Rule] = [HostCalls(host_errors, _jax.calls_back_in_loops(jaxpr))] if _jax.calls_back(jaxpr) else []
    rules += [AutomaticAxes(_logical_axes_of(mesh))] if target.automatic else []
    rules += backend_of(mesh).rules(jaxpr, target)
    return Rewriting(rules) if rules else None


def largest_split(program: Program) -> tuple[int, int] | None:
    """:attr:`Target.in_pieces` of a program."""
    splits = [(use.aval, use.layout) for use in program.uses.values() if isinstance(use.layout, Split)]
    sizes = [(math.prod(aval.shape) * aval.dtype.itemsize, layout.replicas) for aval, layout in splits]
    return max(((size, size // replicas) for size, replicas in sizes), default=None)


def target_for(mesh: Mesh, in_a_loop: bool, in_pieces: tuple[int, int] | None, in_order: bool) -> Target:
    """The :class:`Target` of a program for ``mesh``."""
    is_absent = _jax.is_absent(mesh.devices.flat[0])
    return Target(in_a_loop, bool(_logical_axes_of(mesh)), in_pieces, in_order, is_absent)


def _logical_axes_of(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which the compiler decides how values are split."""
    return tuple(axis for axis in mesh.axis_names if axis != REPLICA_AXIS)


def over_replicas_of(
    mesh: Mesh,
    run: Callable[..., Groups[Any]],
    jaxpr: _jax.Jaxpr,
    layouts_in: Groups[Layout],
    layouts_out: Groups[Layout],
    name: str,
    donates: bool,
    rewriting: Rewriting | None,
    target: Target,
) -> Any:
    """``run``, which evaluates ``jaxpr`` on groups of one replica's values, as a jitted program for all replicas.

    With ``donates``, the arrays of its first group are donated. The ``rewriting`` comes after all other passes.
    """

    def body(*groups: list[jax.Array]) -> Groups[jax.Array]:
        return _each(as_stored_array, run(*_each(as_local_value, groups, layouts_in)), layouts_out)

    rewritten = _jax.enable_x64_as_in(jaxpr)(body if rewriting is None else rewriting.applied_to(body))
    specs_in, specs_out = (
        _each(lambda layout: over_replicas(layout.spec), layouts) for layouts in (layouts_in, layouts_out)
    )
    mapped = jax.shard_map(
        _with_name(rewritten, name),
        mesh=mesh,
        in_specs=specs_in,
        out_specs=specs_out,
        axis_names={REPLICA_AXIS},
        check_vma=False,
    )
    shardings = _each(lambda layout: sharding_on(mesh, layout.spec), layouts_out)
    options = backend_of(mesh).options(target)
    return jax.jit(
        _with_name(mapped, name),
        donate_argnums=(0,) if donates else (),
        out_shardings=shardings,
        compiler_options=None if options is None else dict(options),
    )


def _each(fn: Callable[..., Any], *groups: Any) -> Any:
    """Apply ``fn`` to each item of groups, or to the items that belong together."""
    return tuple([fn(*items) for items in zip(*lists, strict=True)] for lists in zip(*groups, strict=True))


def _with_name(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fn`` under ``name``, which profilers show."""

    def call(*args: Any) -> Any:  # see VARIABLES
        return fn(*args)

    call.__name__ = call.__qualname__ = name
    return call
