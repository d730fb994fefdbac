"""Variables and optimizers in a worker's process: copies of those on the servers, and notes of a step's changes.

A step's changes leave it as anywhere, in variables: besides its own copy, a variable has *notes*, further variables of
the worker, into which the step writes gradients and changes to add. After the step their content goes to the servers.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax, context
from replicax.errors import ContextError
from replicax.indexed_slices import IndexedSlices, check_rows, is_slices
from replicax.training.optimizer import Optimizer, _optimised_variables
from replicax.training.step_hooks import using
from replicax.variables.collection import VariableCollection
from replicax.variables.slots import Slot
from replicax.variables.store import ConcreteStore, current_store, outside_steps
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    from replicax.parameter_server.worker.server_variables import ServerVariables

is_part: contextvars.ContextVar[bool] = contextvars.ContextVar("is_part", default=False)
"""Whether collectives are the first halves of those that the servers complete."""
in_run: contextvars.ContextVar[bool] = contextvars.ContextVar("in_run", default=False)  # in strategy.run


class WorkerCollection(VariableCollection):
    """The variables of a worker: the coordinator's, and notes. Functions can't create any."""

    is_open = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allow the creation of variables, outside of any step."""
        self.is_open = True
        try:
            with outside_steps(self.replicas):
                yield
        finally:
            self.is_open = False

    def slot(self, array: jax.Array) -> Slot:
        if not self.is_open:
            raise ContextError(
                "a scheduled function creates a variable, which only this worker would have. Create variables in "
                "strategy.scope(), in the program that schedules, and use them in the function."
            )
        return super().slot(array)


class WorkerVariable(Variable):
    """A worker's copy of a variable on servers, which has this number there."""

    def __init__(self, server_variables: ServerVariables, number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_variables, self.number_on_servers = server_variables, number
        server_variables.roles[self.slot] = self, "assigned", [self.slot]
        self._notes: dict[Any, tuple[Variable, ...]] = {}
        # The steps of replicas that have added to it, assigned it, or given an optimizer its gradient. (On the
        # per-replica executor they take turns.)
        self._noted_in: weakref.WeakSet[Any] = weakref.WeakSet()
        self._assigned_in: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimized_in: weakref.WeakSet[Any] = weakref.WeakSet()

    # --- reading and writing ----------------------------------------------------------------------------

    def read_value(self) -> Any:
        if self._is_outside():
            self.server_variables.bring([self.slot])
        return super().read_value()

    def __getitem__(self, index: Any) -> Any:
        """Index the value; outside a step, an index of rows fetches only these from the servers."""
        rows = _rows_of(index, self.shape) if self._is_outside() else None
        if rows is None:
            return super().__getitem__(index)
        check_rows(rows, self.shape, f"{self.describe()}[index]")
        self.server_variables.check_readable(self)
        return jnp.asarray(
            self.server_variables.rows(self.number_on_servers, np.where(rows < 0, rows + self.shape[0], rows))
        )

    def assign(self, value: Any) -> Variable:
        if not self._is_outside() and (_step() in self._noted_in or _step() in self._optimized_in):
            raise self._changed_twice()
        with using(is_part, True):
            super().assign(value)
        if self._is_outside():
            self.server_variables.servers.forget(self.number_on_servers)
            self.server_variables.change({("assigned", self.number_on_servers): self.slot.array})
        else:
            self._assigned_in.add(_step())
        return self

    def _assign_change(self, delta: Any, change: Callable[[Any, Any], Any], method: str) -> Variable:
        delta = self.checked(delta)
        signed = delta if method == "assign_add" else -delta
        if self._is_outside():
            self.server_variables.change({("added", self.number_on_servers): signed})
            return self
        with using(is_part, True):
            combined = self._combined_value(signed) if self._in_replica() else signed
        self._write(current_store().read(self) + combined)
        self._note_added(jnp.asarray(combined, self.dtype))
        return self

    def _scatter(self, slices: IndexedSlices, change: Callable[[Any, IndexedSlices], Any], method: str) -> Any:
        if method == "scatter_update" or self._is_outside():
            raise ContextError(
                f"{self.describe()}: {method}{' outside a step' if self._is_outside() else ''} is not for variables on "
                "parameter servers: use scatter_add or scatter_sub inside a step"
            )
        before = current_store().read(self)
        with using(is_part, True):
            super()._scatter(slices, change, method)
        self._note_added(current_store().read(self) - before)
        return self

    def _is_outside(self) -> bool:
        return isinstance(current_store(), ConcreteStore) and _jax.staging_trace(_jax.current_trace()) is None

    # --- notes ------------------------------------------------------------------------------------------

    def _note_added(self, delta: Any) -> None:
        if _step() in self._assigned_in:
            return  # the value that is assigned after the step has it
        [note] = self._notes_for("added", [(self.shape, self.dtype)])
        step, store = _step(), current_store()
        total = store.read(note) + delta if step in self._noted_in else delta
        self._noted_in.add(step)
        store.write(note, jnp.asarray(total, self.dtype), self._otherwise())

    def note_gradient(self, optimizer: int, gradient: Any) -> None:
        """Note the gradient of the present step for an optimizer; all of the worker's replicas have the same."""
        if _step() in self._assigned_in:
            raise self._changed_twice()
        self._optimized_in.add(_step())
        if is_slices(gradient):
            rows = jnp.asarray(gradient.indices, jnp.int32)
            rows = jnp.where(rows < 0, rows + self.shape[0], rows)
            values = [rows, gradient.values.astype(self.dtype)]
        else:
            values = [gradient.astype(self.dtype)]
        notes = self._notes_for(optimizer, [(v.shape, v.dtype) for v in values])
        for note, value in zip(notes, values, strict=True):
            current_store().write(note, value, self._otherwise())

    def _changed_twice(self) -> ContextError:
        return ContextError(
            f"{self.describe()} is assigned in a step that also changes it by apply_gradients, assign_add or "
            "scatter_add. The servers apply these after the step, so one of the changes would be lost: assign the "
            "final value only, in a function that is scheduled later (weight decay is the optimizer's: optax.adamw)"
        )

    def _notes_for(self, kind: int | str, avals: list[tuple[Any, Any]]) -> tuple[Variable, ...]:
        key = kind, *((tuple(shape), jnp.dtype(dtype).name) for shape, dtype in avals)
        if key not in self._notes:
            collection = self.collection
            assert isinstance(collection, WorkerCollection)
            with collection.opened():
                name = f"{self.name}/{kind}"
                notes = tuple(Variable(np.zeros(shape, dtype), name=name) for shape, dtype in avals)
            self._notes[key] = notes
            for note in notes:
                self.server_variables.roles[note.slot] = self, kind, [note.slot for note in notes]
        return self._notes[key]

    def _otherwise(self) -> str:
        return f"what changes {self.describe()} differs between the replicas of a worker"


def _step() -> context.ReplicaContext | None:
    """An identity of the present step, even inside a merge_fn."""
    return context.get_replica_context() or context.merging_replica()


def _rows_of(index: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """``index`` as indices of rows of an array of ``shape``; ``None`` if it is another kind of index."""
    if not shape or not isinstance(index, int | np.integer | np.ndarray | jax.Array):
        return None
    rows = np.asarray(index)
    return rows.astype(np.int64) if rows.dtype.kind in "iu" else None


class WorkerOptimizer(Optimizer):
    """An optimizer in a worker's process: sends its gradients to the servers, which have its state."""

    def __init__(self, server_variables: ServerVariables, number: int, name: str, built_for: Callable[[], Any]) -> None:
        import optax

        super().__init__(optax.identity(), name)
        self._server_variables = server_variables
        self._number = number
        self._built_for = built_for
        self._applied_in: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def state(self) -> NoReturn:
        raise ContextError(
            f"{self.name}.state was read in a scheduled function, but the servers have it: read it, or set a "
            "hyperparameter, in the program that schedules"
        )

    def build(self, variables: Any) -> None:
        found, tree = _optimised_variables(variables)
        if not self._variables:
            built_for = self._built_for()
            if built_for is None:
                numbers = [variable.number_on_servers for variable in found]
                raise NotBuiltError(self._number, jax.tree_util.tree_unflatten(tree, numbers))
            self._variables, self._tree = _optimised_variables(built_for)
        self._check_same(found)

    def apply_gradients(self, gradients: Any, variables: Any = None, aggregate: bool = True, **extra: Any) -> None:
        if isinstance(variables, bool):
            variables, aggregate = None, variables
        if extra:
            raise TypeError(
                f"apply_gradients: further arguments ({', '.join(extra)}) can't be used with parameter servers, where "
                "each server changes its part of the variables by itself"
            )
        if not aggregate and self._server_variables.groups > 1:
            raise ValueError(
                "apply_gradients(aggregate=False): the gradients of several workers are reduced on the servers only, "
                "so none can be reduced already; leave aggregate out"
            )
        step = context.get_replica_context()
        if step in self._applied_in:
            raise ContextError(
                f"{self.name}.apply_gradients was called twice in one step: a step sends the servers one gradient for "
                "each variable. Add the gradients, or use an optimizer for each."
            )
        with using(is_part, True):
            super().apply_gradients(gradients, variables, aggregate)
        self._applied_in.add(step)

    def _change_by(self, by_variable: dict[Variable, Any], further: dict[str, Any]) -> None:
        for variable, gradient in by_variable.items():
            assert isinstance(variable, WorkerVariable)
            variable.note_gradient(self._number, gradient)


class NotBuiltError(BaseException):
    """A function needs an optimizer built for variables, a pytree of their numbers. Functions must not catch it."""

    def __init__(self, number: int, variables: Any) -> None:
        self.number = number
        self.variables = variables
