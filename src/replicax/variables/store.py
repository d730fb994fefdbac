"""Stores: they read and write the values of variables.

A variable is a handle. Outside a step its value is an array in a :class:`Slot`; inside a step that is being
traced, or inside ``value_and_grad``, it is a traced value. A :class:`Store` hides the difference; variables use
the innermost store of the thread.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax.numpy as jnp

from replicax import _jax, context
from replicax.devices.logical_axes import constrained
from replicax.errors import ContextError, TraceError
from replicax.locality import Locality
from replicax.values import Local, PerReplica, Stacked
from replicax.variables.collection import VariableCollection, check_agreed, check_all_read
from replicax.variables.slots import escaped, exchanging, store_each
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.variables.variable import Variable


class Store(Protocol):
    """Creates variables, and reads and writes one replica's values of them."""

    def create(self, make: Callable[[], Variable]) -> Variable:
        """The variable that ``make`` creates; inside a step, the one that it created the last time."""

    def read(self, variable: Variable) -> Any:
        """This replica's value; outside a step, the array as it is stored."""

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        """Set this replica's value.

        If ``error_unless_mirrored`` is a text, all replicas must agree on the value, and the text is the error if they
        don't.
        """

    def copies(self, variable: Variable) -> PerReplica:
        """Every replica's copy of an on-read variable, in cross-replica context."""

    def expect(
        self, values: Sequence[Any], refused: frozenset[Locality], message: str, *, is_loss: bool = False
    ) -> list[Any]:
        """Return ``values``; raise ``message`` if the first one turns out to have a refused locality.

        The check is made if any of the values is used. With ``is_loss`` the first is a loss, and the others are its
        gradients.
        """

    def if_it_fails(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if the step in progress raises an error."""


class ConcreteStore:
    """The store outside every step. If ``frozen``, programs that are being traced may hold values as constants."""

    def __init__(self, frozen: bool = False) -> None:
        self._frozen = frozen

    def create(self, make: Callable[[], Variable]) -> Variable:
        return make()

    def read(self, variable: Variable) -> Any:
        staging = _jax.staging_trace(_jax.current_trace())
        if staging is not None and not self._frozen:
            raise TraceError(
                f"{variable.describe()} was read inside jax.{_jax.traced_for(staging)}, outside a step: its present "
                "value would become a constant of a program that JAX keeps. Run the whole function with strategy.run "
                "(outside every scope: replicax.get_strategy().run), which compiles it, or pass the value in as an "
                "argument."
            )
        if variable.replicas.is_absent and staging is not None:
            shape = variable.slot.array.shape if variable.is_stacked else variable.shape
            return jnp.zeros(shape, variable.dtype)  # only the shapes of this program are used
        if variable.replicas.is_absent:
            context.check_present(variable.replicas, f"reading {variable.describe()}")
        check_all_read(variable)
        with exchanging():
            value = variable.from_storage()
            if value is variable.slot.array:
                escaped.add(variable.slot)
            return value

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        check_write_trace(variable, _jax.eval_trace())
        if variable.replicas.is_absent:
            context.check_present(variable.replicas, f"assigning {variable.describe()}")
        check_agreed(variable, value)
        store_each({variable.slot: variable.to_storage(value)})

    def copies(self, variable: Variable) -> PerReplica:
        return PerReplica(Stacked(self.read(variable)))

    def expect(
        self, values: Sequence[Any], refused: frozenset[Locality], message: str, *, is_loss: bool = False
    ) -> list[Any]:
        return list(values)

    def if_it_fails(self, undo: Callable[[], None]) -> None:
        pass


class DerivedStore:
    """A store on top of another, in which some variables have other values and writes are held back.

    ``value_and_grad`` uses it: the variables that it differentiates have traced values, and values written
    inside leave as ordinary results.
    """

    def __init__(self, outer: Store, values: dict[Variable, Any]) -> None:
        self.outer = outer
        self.expect = outer.expect
        self.if_it_fails = outer.if_it_fails
        self.values = dict(values)
        self.written: dict[Variable, str | None] = {}
        self._trace = _jax.current_trace()
        _jax.renew_kept_programs()

    def create(self, make: Callable[[], Variable]) -> Variable:
        return self.outer.create(make)

    def read(self, variable: Variable) -> Any:
        if variable in self.values:
            _jax.note_read(self._trace)
            return split_like(variable, self.values[variable])
        return self.outer.read(variable)

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        check_write_trace(variable, self._trace)
        self.values[variable] = value
        self.written[variable] = error_unless_mirrored
        _jax.renew_kept_programs()

    def copies(self, variable: Variable) -> PerReplica:
        form, value = self.outer.copies(variable).form, self.read(variable)
        return PerReplica(Local(value, form.communicator) if isinstance(form, Local) else Stacked(value))


class Creations:
    """The variables that a step creates when it first runs, and gets again, in the same order, afterwards."""

    def __init__(self, replicas: Replicas, variables: list[Variable]) -> None:
        self._replicas = replicas
        self._variables = variables
        self._next = 0
        self._undo: list[Callable[[], None]] = []

    def if_it_fails(self, undo: Callable[[], None]) -> None:
        """See :meth:`Store.if_it_fails`."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo the step, which has raised an error."""
        for undo in reversed(self._undo):
            undo()

    def for_replica(self) -> Creations:
        """The creations of another replica, which gets the same variables in the same order."""
        other = Creations(self._replicas, self._variables)
        other._undo = self._undo
        return other

    def create(self, make: Callable[[], Variable]) -> Variable:
        """The next variable of the step."""
        if self._next == len(self._variables):
            with outside_steps(self._replicas):
                self._variables.append(make())
        self._next += 1
        return self._variables[self._next - 1]


def current_collection() -> VariableCollection:
    """The variables of the strategy whose scope or step we are in, where a new one belongs."""
    return context.get_strategy().extended.variables


class CreatedByStore(abc.ABCMeta):
    """Lets the store decide whether calling the class creates a variable, or returns the one created before."""

    if not TYPE_CHECKING:  # type checkers and help() show what __init__ takes
        __signature__ = property(lambda cls: inspect.signature(cls.__init__.__get__(cls)))

        @_jax.public_call
        def __call__(cls, *args, **kwargs):
            return current_store().create(lambda: super(CreatedByStore, cls).__call__(*args, **kwargs))


def run_across(variable: Variable, step: Callable[..., Any], *args: Any) -> Any:
    """Run ``step`` on the replicas of ``variable``, outside of every step, so that its copies can be combined.

    The strategy runs it; raises inside another strategy's scope, and where devices are only described.
    """
    context.check_cross_replica(variable.replicas, f"using {variable.describe()}")
    context.check_present(variable.replicas, f"using {variable.describe()}")
    return variable.collection.run(step, args)


def check_owner(variable: Variable, replicas: Replicas, what: str = "the step runs under") -> None:
    """Raise a ContextError unless ``variable`` is one of ``replicas``, whose step uses it."""
    if variable.replicas is not replicas:
        another = "another " if repr(variable.replicas) == repr(replicas) else ""
        raise ContextError(
            f"{variable.describe()} belongs to {variable.replicas!r}, but {what} {another}{replicas!r}: use the "
            "variable's strategy there (replicax.train takes strategy=…, or a dataset that it has distributed), or "
            "create the variable inside this strategy's scope()"
        )


def check_write_trace(variable: Variable, allowed: Any) -> None:
    """Raise a TraceError unless ``allowed`` is the innermost JAX transformation.

    A write inside ``jax.grad``, ``scan``, ``cond``, ``jit``, … would let a value escape from there.
    """
    if _jax.current_trace() is allowed:
        return
    what = _jax.traced_for(_jax.current_trace())
    inside = f"inside jax.{what}" if what else "inside a raw JAX transformation (jax.grad, jax.vmap, …)"
    if what == "jit":
        raise TraceError(
            f"{variable.describe()} was written {inside}, where the written value can't leave. strategy.run "
            "compiles the whole step: leave jax.jit out, and outside a step run the function with strategy.run "
            "(outside every scope: replicax.get_strategy().run). From a jitted helper inside a step, return the new "
            "value and assign it afterwards."
        )
    raise TraceError(
        f"{variable.describe()} was written {inside}, where the written value can't leave. For gradients use "
        "replicax.value_and_grad, which lets writes out; in a loop or branch (jax.lax.scan, while_loop, cond, "
        "checkpoint) return the new value from the body and assign it afterwards."
    )


def split_like(variable: Variable, value: Any) -> Any:
    """The traced ``value`` of ``variable``, split over logical devices like the variable; so is its gradient."""
    axes = variable.layout.axes
    return constrained(value, axes) if axes else value


class _Stores(threading.local):
    def __init__(self) -> None:
        self.stack: list[Store] = [ConcreteStore()]


_stores = _Stores()


def current_store() -> Store:
    """The innermost store of this thread."""
    return _stores.stack[-1]


@contextlib.contextmanager
def use_store(store: Store) -> Iterator[None]:
    """Read and write variables through ``store``."""
    try:
        _stores.stack.append(store)
        yield
    finally:
        if _stores.stack[-1] is store:
            _stores.stack.pop()


@contextlib.contextmanager
def outside_steps(replicas: Replicas) -> Iterator[None]:
    """Compute and store values at once in the middle of a step, in the cross-replica context of ``replicas``."""
    with (
        _jax.outside_tracing(),
        _jax.compiling(),
        context.cross_replica(replicas),
        use_store(ConcreteStore()),
    ):
        yield


def state_of_stores() -> Callable[[], None]:
    """A function that restores the stores of this thread; see :func:`replicax.context.state_of_contexts`."""
    before = list(_stores.stack)

    def put_back() -> None:
        _stores.stack[:] = before

    return put_back
