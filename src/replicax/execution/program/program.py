"""Program: a step as data."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax.execution.program.marks import Obligation, assigns
from replicax.locality import Locality, M, T
from replicax.values import Scale
from replicax.variables.layout import Layout
from replicax.variables.slots import Slot

if TYPE_CHECKING:
    from replicax.variables.variable import Variable


class VariableRef(weakref.ref["Variable"]):
    """A weak reference to a variable that a step returned."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Where one leaf of what the step returned comes from."""

    index: int | None
    """Its position among the computed results; ``None`` if it is not computed."""
    value: Any = None
    """The leaf itself, if it is not computed: a Python object, or the :class:`VariableRef` of a variable."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """The shape of each replica's array, if they differ: each is then at the start of what is computed."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One variable that a program reads or writes."""

    slot: Slot
    layout: Layout
    aval: jax.ShapeDtypeStruct
    """The shape and dtype of one replica's value."""
    name: str
    """The variable's name."""
    variable: weakref.ref[Variable]

    def describe(self) -> str:
        """The variable in a message."""
        variable = self.variable()
        return f"variable {self.name!r}" if variable is None else variable.describe()


@dataclasses.dataclass(frozen=True, slots=True)
class VariableOrder:
    """The order in which a compiled program takes its variables, and gives their new values back."""

    donated: list[int]
    """The variables that are read and written, by their positions among the reads; in the order of the writes."""
    kept: list[int]
    """The other variables that are read, by their positions among the reads."""
    written: list[int]
    """The variables that are written, by their positions among the writes: first the donated ones, in that order."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Program:
    """A step as traced once for one replica, with the places where its inputs and outputs belong.

    The jaxpr is over one replica's values. Its inputs are, in this order, the variables it reads, the step's
    arguments and the arrays it closed over; its outputs the new values of the variables that it writes, and
    then what the step returns.
    """

    name: str
    replicas: int
    """The number of replicas that run it together."""
    replicas_at_once: int
    """The number of replicas that a device computes at the same time, if several share it."""
    reproducible: bool
    """Whether sums over them are taken in a fixed order: results then have the same bits on any number of devices."""
    jaxpr: _jax.Jaxpr
    reads: tuple[Use, ...]
    arguments: tuple[tuple[jax.ShapeDtypeStruct, Locality], ...]
    constants: list[jax.Array]
    writes: tuple[Use, ...]
    results: tuple[Result, ...]
    result_tree: Any
    obligations: Mapping[int, Obligation]
    timeout: float | None
    """The longest of its collectives' timeouts, in seconds; ``None`` if they have none."""
    asked_for_count: bool
    """Whether the step has read the number of replicas."""
    scales: tuple[Scale | None, ...] = ()
    """The scale of each computed result over the replicas, if that is certain; empty if it was not looked at."""
    example_dims: tuple[Any, ...] | None = None
    """The dim of each argument along which the examples of a padded batch lie: ``None`` if it is unknown, ``()`` if it
    has none. Two more arguments follow then: the mask, and how many examples all replicas have."""

    def __repr__(self) -> str:
        """What it takes and gives; its operations are in :attr:`jaxpr`."""
        taken = [f"{_shown(aval)} ({locality.name.lower()})" for aval, locality in self.arguments]
        names = [[use.name for use in uses] for uses in (self.reads, self.writes)]
        given = [_shown(v.aval) for v in self.jaxpr.outvars[len(self.writes) :]]
        rows = zip(("takes", "reads", "writes", "returns"), (taken, *names, given), strict=True)
        return "\n  ".join([f"Program {self.name!r} on {self.replicas} replica(s)", *(_row(*row) for row in rows)])

    @property
    def uses(self) -> dict[Slot, Use]:
        """The variables that it reads or writes."""
        return {use.slot: use for use in (*self.reads, *self.writes)}

    @property
    def order(self) -> VariableOrder:
        """The order in which it takes and gives its variables when it is compiled."""
        position = {use.slot: i for i, use in enumerate(self.reads)}
        written = sorted(range(len(self.writes)), key=lambda i: self.writes[i].slot not in position)
        donated = [position[self.writes[i].slot] for i in written if self.writes[i].slot in position]
        return VariableOrder(donated, sorted(set(position.values()).difference(donated)), written)

    @property
    def has_derivatives(self) -> bool:
        """Whether a loss is differentiated: by ``value_and_grad``, or by JAX, as other libraries do it."""
        return any(o.is_loss for o in self.obligations.values()) or _jax.contains(self.jaxpr, _jax.is_backward)

    @property
    def is_placed(self) -> bool:
        """Whether it assigns values to logical devices, or has variables that live on one."""
        return any(use.layout.logical_device is not None for use in self.uses.values()) or assigns(self.jaxpr)

    @property
    def returns_numbers(self) -> bool:
        """Whether a result is a float scalar."""
        outputs: Any = (v.aval for v in self.jaxpr.outvars[len(self.writes) :])
        return any(aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating) for aval in outputs)

    @property
    def dims_of_examples(self) -> list[Any]:
        """The dim of each argument along which examples may lie; ``None`` if it is unknown, ``()`` if it has none."""
        if self.example_dims is None:
            return [0] * len(self.arguments)
        return [*self.example_dims, 0, ()]

    @property
    def numbers_of_examples(self) -> list[int]:
        """The numbers of examples that a replica may have: sizes of arguments along dim 0, or the padded size."""
        if self.example_dims is not None:
            return [self.arguments[-2][0].shape[0]]
        return list(dict.fromkeys(aval.shape[0] for aval, locality in self.arguments if locality is T and aval.ndim))

    @property
    def input_localities(self) -> list[Locality]:
        """The locality of each input of the jaxpr."""
        variables = [use.layout.locality for use in self.reads]
        return [*variables, *(locality for _, locality in self.arguments), *[M] * len(self.constants)]


def _shown(aval: Any) -> str:
    return f"{aval.dtype.name}{list(aval.shape)}"


def _row(what: str, items: list[str]) -> str:
    return f"{what} {first_of(items) or 'nothing'}"


def first_of(items: list[str], most: int = 10) -> str:
    """The first items, and how many more there are."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return ", ".join([*items[:most], *more])
