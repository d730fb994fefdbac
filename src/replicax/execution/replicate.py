"""Replicate: one program for one replica becomes one compiled program for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

from replicax import _jax
from replicax.execution.collectives import Collective, collectives_in
from replicax.execution.example_places import UNKNOWN, Place, Rows
from replicax.execution.examples import dim_of_examples, example_places, shape_of
from replicax.execution.infer import infer
from replicax.execution.partition import partitioned
from replicax.execution.pieces import Piece
from replicax.execution.program import Program, Use
from replicax.locality import Locality, M, T
from replicax.topology.mesh import REPLICA_AXIS
from replicax.variables.layout import Copies, Layout, Mirrored, Split
from replicax.variables.slots import Slot


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """Where the arrays of variables go before and after each call."""

    donated: list[NamedSharding]
    kept: list[NamedSharding]
    homes: list[Sharding]
    """Of the written ones, between calls."""


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
    """Of the step's computed results."""
    call: Any
    donated: tuple[Slot, ...]
    kept: tuple[Slot, ...]
    written: tuple[Slot, ...]
    """The donated ones first, in the same order."""
    mesh: Mesh
    travel: Travel | None
    """If arrays of variables are somewhere else between calls than in the program."""
    padded: tuple[bool, ...] | None = None
    """Of the step's computed results, which have rows that may be padding; ``None`` if no argument has."""
    example_dims: tuple[int | None, ...] = ()
    """Along which of their dims; ``None`` if that can't be told."""
    steps: int | None = None
    """How often it runs the program, each time on another element of its arguments; ``None``: once, on all of them."""
    repetitions: dict[int, Executable] = dataclasses.field(default_factory=dict)
    """What :meth:`repeated` has made."""

    def repeated(self, steps: int) -> Executable:
        """The same program, ``steps`` times in one call; see :func:`replicate`."""
        if steps not in self.repetitions:
            self.repetitions[steps] = replicate(self.program, self.mesh, steps)
        return self.repetitions[steps]

    def compiled(self) -> jax.stages.Compiled:
        """The program as JAX's compiled object, which can tell the memory that it needs, and what it costs."""
        uses = {use.slot: use for use in (*self.program.writes, *self.program.reads)}
        variables = [
            [self._stored(uses[slot].aval, uses[slot].layout) for slot in slots] for slots in (self.donated, self.kept)
        ]
        several = () if self.steps is None else (self.steps,)
        arguments = [
            self._stored(aval.update(shape=(*several, *aval.shape)), _of_value(locality, self.mesh))
            for aval, locality in self.program.arguments
        ]
        compiled: jax.stages.Compiled = self.call.lower(*variables, arguments, self.program.constants).compile()
        return compiled

    def _stored(self, aval: jax.ShapeDtypeStruct, layout: Layout) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, layout.spec)
        return aval.update(shape=layout.stored_shape(aval.shape), sharding=sharding)

    def compiled_text(self) -> str:
        """The optimised HLO of the program, as one device runs it."""
        return self.compiled().as_text() or ""

    def collectives(self) -> list[Collective]:
        """The collectives that one run of the compiled program issues, in order."""
        return collectives_in(self.compiled_text())


def replicate(program: Program, mesh: Mesh, steps: int | None = None) -> Executable:
    """Compile ``program`` for the replicas of ``mesh``, in which it was captured.

    Before, check that it means the same for all of them.

    Values of locality T travel as one array ``[num_replicas, *shape]`` with a slice on each replica's device,
    those of locality M as one replicated array. Variables that are split over the replicas stay in pieces (see
    :mod:`replicax.execution.partition`). The layout of every output is pinned, so that the next call
    finds what it expects. Variables that are read and written are donated: their old arrays are reused.

    With ``steps``, the program runs so many times in a loop. Each argument then has one more dim in front of one
    replica's shape: ``[num_replicas, steps, *shape]`` (T) or ``[steps, *shape]`` (M). Written variables go from one time
    to the next, as they would from call to call; so localities are those of one time. Results are those of the last.

    Raises:
      LocalityError, DeadlockError: see :func:`replicax.execution.infer.infer`.

    >>> import replicax
    >>> from replicax.execution.replicate import replicate
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> program = strategy.extended.trace(lambda x: x * 2, args=(3.0,)).program
    >>> _, [result] = replicate(program, strategy.extended.mesh).call([], [], [3.0], [])
    >>> float(result), len(result.devices())
    (6.0, 2)
    """
    several = mesh.shape[REPLICA_AXIS] > 1
    inputs = (
        [u.layout.locality for u in program.reads]
        + [locality for _, locality in program.arguments]
        + [M] * len(program.constants)
    )
    split = any(isinstance(use.layout, Split) for use in (*program.reads, *program.writes))
    localities: dict[Any, Locality] | None = {} if split else None
    outputs = infer(program.jaxpr, inputs, program.obligations, check=several, found=localities)
    n_written = len(program.writes)
    result_localities = outputs[n_written:]
    padded = example_dims = None
    if program.example_dims is not None:
        padded, example_dims = _where_examples_are(program, outputs)

    position = {use.slot: i for i, use in enumerate(program.reads)}
    # Variables that are read as well come first among the written, in the order of the donated.
    written = sorted(range(n_written), key=lambda i: program.writes[i].slot not in position)
    donated = [position[program.writes[i].slot] for i in written if program.writes[i].slot in position]
    kept = [i for i in range(len(program.reads)) if i not in set(donated)]

    layouts_in: Groups[Layout] = (
        [program.reads[i].layout for i in donated],
        [program.reads[i].layout for i in kept],
        [_of_value(locality, mesh) for _, locality in program.arguments],
        [Mirrored()] * len(program.constants),
    )
    # A single replica's results come back bare, so nothing is stacked there.
    layouts_out: Groups[Layout] = (
        [program.writes[i].layout for i in written],
        [
            _of_value(locality if several or (padded and padded[i]) else M, mesh)
            for i, locality in enumerate(result_localities)
        ],
    )

    def once(
        state: Sequence[Any], kept_arrays: Sequence[Any], arguments: Sequence[Any], constants: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        arrays = map(_in_pieces, [*state, *kept_arrays], [*layouts_in[0], *layouts_in[1]])
        reads: dict[int, Any] = dict(zip([*donated, *kept], arrays, strict=True))
        values = [*(reads[i] for i in range(len(program.reads))), *arguments, *constants]
        if localities is None:
            results = _jax.evaluate(program.jaxpr, values)
        else:
            wanted = [use.layout if isinstance(use.layout, Split) else None for use in program.writes]
            wanted += [None] * len(result_localities)
            results = partitioned(program.jaxpr, values, wanted, localities)
        return [results[i] for i in written], results[n_written:]

    def body(*groups: list[jax.Array]) -> Groups[jax.Array]:
        state, kept_arrays, arguments, constants = _each(_enter, groups, layouts_in)
        if steps is None:
            return _each(_leave, once(state, kept_arrays, arguments, constants), layouts_out)
        # What is written without being read, and the results, start as zeros that nobody sees.
        unread = [_piece_shape(program.writes[i]) for i in written[len(donated) :]]
        start = (*state, *map(_zeros, unread)), tuple(_zeros(v.aval) for v in program.jaxpr.outvars[n_written:])

        def step(carry: Any, element: Sequence[Any]) -> tuple[Any, None]:
            new, results = once(carry[0][: len(donated)], kept_arrays, element, constants)
            return (tuple(new), tuple(results)), None

        last, _ = lax.scan(step, start, arguments, length=steps)
        return _each(_leave, last, layouts_out)

    specs_in: Any = _each(lambda layout: layout.spec, layouts_in)
    specs_out: Any = _each(lambda layout: layout.spec, layouts_out)
    mapped = jax.shard_map(
        _named(body, program.name),
        mesh=mesh,
        in_specs=specs_in,
        out_specs=specs_out,
        axis_names={REPLICA_AXIS},
        check_vma=False,
    )
    shardings = jax.tree_util.tree_map(lambda spec: NamedSharding(mesh, spec), specs_out)
    call = jax.jit(_named(mapped, program.name), donate_argnums=0, out_shardings=shardings)
    travel = None
    if any(use.layout.home is not None for use in (*program.reads, *program.writes)):
        donated_at, kept_at = ([NamedSharding(mesh, layout.spec) for layout in group] for group in layouts_in[:2])
        travel = Travel(donated_at, kept_at, [program.writes[i].layout.sharding(mesh) for i in written])
    return Executable(
        program=program,
        localities=tuple(T if locality is T else M for locality in result_localities),
        call=call,
        donated=tuple(program.reads[i].slot for i in donated),
        kept=tuple(program.reads[i].slot for i in kept),
        written=tuple(program.writes[i].slot for i in written),
        mesh=mesh,
        travel=travel,
        padded=padded,
        example_dims=example_dims or (),
        steps=steps,
    )


def _where_examples_are(
    program: Program, localities: Sequence[Locality]
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Which results have rows that may be padding, and along which dim."""
    assert program.example_dims is not None
    rows = program.arguments[-2][0].shape[0]
    inputs: list[Place] = [None] * len(program.reads)
    inputs += [UNKNOWN if dim is None else None if dim == () else Rows(dim) for dim in program.example_dims]
    inputs += [Rows(0), None] + [None] * len(program.constants)
    places = example_places(program.jaxpr, inputs, rows)
    n = len(program.writes)
    outputs = program.jaxpr.outvars[n:]
    found = [dim_of_examples(p, shape_of(v), rows) for p, v in zip(places[n:], outputs, strict=True)]
    padded = [
        locality is T and (dim is not None or unclear)
        for locality, (dim, unclear) in zip(localities[n:], found, strict=True)
    ]
    return tuple(padded), tuple(dim for dim, _ in found)


Item = TypeVar("Item")
Groups = tuple[list[Item], ...]


def _each(fn: Callable[..., Any], *groups: Any) -> Any:
    """``fn`` of each item, or of the items that belong together."""
    return tuple([fn(*items) for items in zip(*lists, strict=True)] for lists in zip(*groups, strict=True))


def _of_value(locality: Locality, mesh: Mesh) -> Layout:
    """How an argument or result lies on the devices."""
    return Copies(mesh.shape[REPLICA_AXIS]) if locality is T else Mirrored()


def _enter(stored: jax.Array, layout: Layout) -> Any:
    """What a replica has of a stored array."""
    return stored.reshape(stored.shape[1:]) if isinstance(layout, Copies) else stored


def _in_pieces(array: Any, layout: Layout) -> Any:
    """The same for the pass over pieces."""
    return Piece(array, layout) if isinstance(layout, Split) else array


def _piece_shape(use: Use) -> jax.ShapeDtypeStruct:
    """What a replica has of a variable's stored array."""
    shape, layout = use.aval.shape, use.layout
    if isinstance(layout, Split):
        shape = (*shape[: layout.dim], layout.piece, *shape[layout.dim + 1 :])
    return use.aval.update(shape=shape)


def _zeros(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def _leave(value: jax.Array, layout: Layout) -> jax.Array:
    return value[None] if isinstance(layout, Copies) else value


def _named(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fn`` under ``name``, which profilers show."""

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__name__ = call.__qualname__ = name
    return call
