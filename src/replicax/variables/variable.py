"""``Variable``: a handle to an array that outlives a step."""

from __future__ import annotations

import html
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from replicax import _jax, context
from replicax.argument_checks import checked_name, parse_enum
from replicax.devices.arrays import compute, is_in_parts, local_array, put
from replicax.devices.host_values import (
    as_array,
    casts,
    check_numbers,
    check_x64,
    dtype_and_shape,
    holds_no_numbers,
    is_key,
    numpy_array,
    numpy_copy,
)
from replicax.errors import LocalityError, VariableLostError, cant_be_pickled
from replicax.indexed_slices import IndexedSlices, check_rows
from replicax.user_functions import checked_result
from replicax.values import Local, PerReplica, components_in
from replicax.variables.aggregation import Aggregation, Synchronization, combined, parse_synchronization, share_of
from replicax.variables.array_like import ArrayLike
from replicax.variables.collection import Initial, agreed_initial
from replicax.variables.initial_layout import Stored, layout_for
from replicax.variables.layout import Copies, Layout, Split
from replicax.variables.lost_arrays import present_array
from replicax.variables.partitioners import checked_partitioner
from replicax.variables.store import (
    ConcreteStore,
    CreatedByStore,
    check_write_trace,
    current_collection,
    current_store,
    run_across,
    use_store,
)
from replicax.workers.digests import digest

if TYPE_CHECKING:
    from replicax.variables.partitioners import Partitioner

_counter = itertools.count()
_CHOOSE = (
    "but it differs between replicas, and the variable has no aggregation. Reduce the value first "
    "(replicax.get_replica_context().all_reduce), or create the variable with an aggregation."
)


class Variable(ArrayLike, metaclass=CreatedByStore):
    """A value that steps read and change. The strategy in whose scope it is created places it.

    Inside a step a variable has this replica's value; outside it has the whole value. It acts like an array
    in operators, indexing and ``jax.numpy`` functions. JAX functions that take a pytree take its present
    value. (``jax.lax`` functions don't take variables: pass them ``variable.value``.)

    Synchronization ``"on_write"`` (the default): *mirrored*, the same on every replica. An
    assignment inside a step combines the replicas' values by ``aggregation``; with ``"none"`` they must be the
    same, which is checked before anything runs. ``"on_read"``: each replica has its own copy; reading
    gives that inside a step, and the copies combined by ``aggregation`` outside. The table of all cases is in
    :mod:`replicax.variables.aggregation`. Every copy starts from the initial value; with several workers, from the
    chief's initial value.

    Create variables in ``strategy.scope()``, or inside a step. A step creates its variables once, when it first
    runs, and gets the same variables again, in the same order, whenever it runs or is traced again.

    Args:
      initial_value: an array, a number, or a callable without arguments that returns one of these. A callable runs
        compiled, on the variable's final placement, so that the whole value is never on one device.
      trainable: for code that collects variables for an optimizer; by default true, and false for on-read variables.
      name: its name; by default one is made up. While another variable of the strategy has it, a number is added
        (``w_1``).
      dtype: of the value; by default that of ``initial_value``.
      synchronization: ``"auto"``, ``"on_write"``, ``"on_read"`` or a :class:`Synchronization`.
      aggregation: ``"none"``, ``"sum"``, ``"mean"``, ``"only_first_replica"`` or an :class:`Aggregation`.
      partitioner: splits the variable over the replicas; see :class:`ShardedVariable`. By default the strategy's. With
        ``partition_dimensions`` it is called with the shape of one part, and splits the part of each logical device.
      partition_dimensions: the number of parts of each dim, split over the logical devices of a replica, as in
        :meth:`Strategy.split_to_logical_devices`. The variable is split from the start: from a callable or a NumPy
        array it is initialised in parts, and no device has the whole variable, unless a step needs it whole.
        An optimizer keeps its slots in the same parts. By default each logical device has the whole variable.
      logical_device: the number of the logical device, of each replica, that has the variable. By default
        :meth:`Strategy.assign_to_logical_device` decides.

    Raises:
      ValueError: unknown options; an integer dtype with aggregation ``"mean"``; an on-read variable with
        ``trainable=True`` or a partitioner; a partitioner with a wrong result; partition dimensions that don't fit, or
        whose parts don't divide evenly along a dim that ``partitioner`` splits, too.
      TypeError: created inside a step, from a value that the step computed.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     v = replicax.Variable(10.0, name="v", aggregation="mean")
    >>> def step():
    ...     v.assign(1.0 + replicax.get_replica_context().replica_id_in_sync_group)
    >>> strategy.run(step)
    >>> v
    <Variable 'v' float32[] mirrored on 2 replicas: 1.5>
    """

    def __init__(
        self,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Synchronization | str = "auto",
        aggregation: Aggregation | str = "none",
        partitioner: Partitioner | None = None,
        partition_dimensions: Sequence[int] | None = None,
        logical_device: int | None = None,
    ) -> None:
        checked_name(name, "Variable")
        self.collection = current_collection()
        self.replicas = self.collection.replicas
        self.strategy = self.replicas.strategy
        self.name = self.collection.named(self, f"variable_{next(_counter)}" if name is None else name)
        if trainable is not None and not isinstance(trainable, bool | np.bool_):
            raise TypeError(f"variable {self.name!r}: trainable must be a bool or None, got {trainable!r}")
        self.synchronization = parse_synchronization(synchronization)
        self.aggregation = parse_enum(Aggregation, aggregation, "aggregation")
        self.trainable = not self.is_on_read if trainable is None else bool(trainable)
        if self.is_on_read and self.trainable:
            raise ValueError(
                f"variable {self.name!r}: an on-read variable can't be trainable, because its copies differ between "
                "replicas; use synchronization='on_write'"
            )
        if self.is_on_read and partitioner is not None:
            raise ValueError(
                f"variable {self.name!r}: an on-read variable can't be split, because each replica has its own "
                "value; use Variable without a partitioner, or synchronization='on_write'"
            )
        self._wishes = checked_partitioner(partitioner), partition_dimensions, logical_device
        initial = self._initialise(initial_value, dtype)
        try:
            self.slot = self.collection.slot(agreed_initial(self, initial))
        except jax.errors.JaxRuntimeError as error:  # a device is full
            error.add_note(f"(raised while the initial value of {self.describe()} was computed)")
            raise
        self.number = self.collection.add(self)
        self._finalizer = weakref.finalize(self, self.slot.release)
        self._finalizer.atexit = False

    @property
    def partitioner(self) -> Partitioner | None:
        """The partitioner that it was given; ``None`` if it has the strategy's."""
        return self._wishes[0]

    def _initialise(self, initial_value: Any, dtype: Any) -> Initial:
        if isinstance(initial_value, PerReplica):
            raise LocalityError(
                f"variable {self.name!r}: the initial value must be the same on every replica, got {initial_value!r}"
            )
        if isinstance(initial_value, jax.core.Tracer):
            raise TypeError(
                f"variable {self.name!r}: the initial value is computed by the step, which runs again and again; pass "
                "a constant or a callable, and assign what the step computes"
            )
        if isinstance(initial_value, Stored):
            array = initial_value.array  # which all workers have computed together
            self._set_aval_and_layout(initial_value.shape, array.dtype, initial_value.layout)
            return Initial(lambda: array, lambda: array, lambda: None)
        where = f"variable {self.name!r}: the initial value"
        try:
            wanted = jax.dtypes.canonicalize_dtype(dtype or float, allow_extended_dtype=True)
        except TypeError:
            wanted = None
        if wanted is None or (isinstance(wanted, np.dtype) and holds_no_numbers(wanted)):
            raise TypeError(f"variable {self.name!r}: there are no arrays of the dtype {dtype!r}")
        if not callable(initial_value) and not self.replicas.is_absent:
            value: Any = numpy_copy(initial_value, dtype, where)
            in_parts = False  # on several workers, which have computed it together
            if value is None:
                value = as_array(initial_value, where, dtype)
                in_parts = is_in_parts(value)
                value = value if in_parts or is_key(value.dtype) else np.array(value)
            self._set_aval_and_layout(value.shape, value.dtype)
            return Initial(lambda: self.to_storage(value), lambda: value, lambda: None if in_parts else digest(value))
        initialise = initial_value if callable(initial_value) else lambda: initial_value
        with use_store(ConcreteStore(frozen=True)):  # this program runs once
            program, aval, of_program = _jax.traced_once(
                lambda: as_array(checked_result(initialise(), initialise, where), where, dtype)
            )
        self._set_aval_and_layout(aval.shape, aval.dtype)
        return Initial(lambda: self._computed_array(program), program, of_program)

    def _computed_array(self, program: Callable[[], Any]) -> jax.Array:
        """The stored array of a program's result, of which each device computes its part."""
        mesh = self.replicas.mesh
        laid_out = compute(lambda: self.layout.laid_out(program()), (), self.layout.laid_out_sharding(mesh))
        return self.layout.to_stored(laid_out, mesh)

    def _set_aval_and_layout(self, shape: tuple[int, ...], dtype: Any, layout: Layout | None = None) -> None:
        if self.aggregation is Aggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"variable {self.name!r}: the mean of {jnp.dtype(dtype).name} values is not of that dtype; use a float "
                "dtype or another aggregation"
            )
        if self.aggregation is not Aggregation.NONE and is_key(dtype):
            raise ValueError(f"variable {self.name!r}: random keys can't be combined; use aggregation='none'")
        self._aval = jax.ShapeDtypeStruct(shape, dtype)
        self.layout = layout_for(self, *self._wishes) if layout is None else layout

    # --- properties -------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one copy."""
        return self._aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self._aval.dtype

    @property
    def ndim(self) -> int:
        """The number of dims of one copy."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of one copy."""
        return self._aval.size

    @property
    def is_on_read(self) -> bool:
        """Whether each replica has its own value."""
        return self.synchronization is Synchronization.ON_READ

    @property
    def is_stacked(self) -> bool:
        """Whether each of several replicas has its own copy, stored as ``[num_replicas, *shape]``."""
        return isinstance(self.layout, Copies)

    @property
    def is_spread(self) -> bool:
        """Whether the pieces of the value are on several workers, so that all must take part in joining them."""
        return isinstance(self.layout, Split) and self.replicas.lockstep.several

    @property
    def sharding(self) -> Sharding:
        """The sharding of the stored array on the strategy's devices."""
        return self.layout.sharding(self.replicas.mesh)

    def describe(self) -> str:
        """The variable in an error message: its name, dtype and shape."""
        return f"variable {self.name!r} ({dtype_and_shape(self)})"

    @_jax.public_call
    def _about_and_value(self) -> tuple[str, str]:
        with _jax.outside_tracing():
            shown = self._shown()
        inside = " (before the step)" if _jax.current_trace() is not _jax.eval_trace() else ""
        where = self.layout.describe(self.replicas.mesh, self.replicas.per_device)
        return f"{type(self).__name__} {self.name!r} {dtype_and_shape(self)} {where}{inside}", shown

    def __repr__(self) -> str:
        about, value = self._about_and_value()
        return f"<{about}:\n{value}>" if "\n" in value else f"<{about}: {value}>"

    def _repr_html_(self) -> str:
        """For notebooks: the variable, and below it the value as NumPy prints it."""
        about, value = self._about_and_value()
        return f"<code>{html.escape(about)}</code><pre>{html.escape(value)}</pre>"

    def _shown(self) -> str:
        if self.replicas.is_absent:
            return "absent"
        try:
            value: Any = self.stored()
            if self.is_spread:
                return self._shown_pieces(value)
            if not self.is_stacked:
                value = local_array(self.from_storage())
        except VariableLostError:
            return "no value any more"
        if is_key(self.dtype):
            return str(value)
        return _in_words(np.concatenate([*components_in(value).values()]) if self.is_stacked else value)

    def _shown_pieces(self, stored: jax.Array) -> str:
        """This worker's pieces, as any worker may print a variable alone."""
        layout = self.layout
        assert isinstance(layout, Split)
        if layout.logical_parts > 1:  # no piece is in one place of the value
            numbers = sorted({replica % layout.replicas for replica in layout.pieces_here(stored)})
            return f"here the pieces {', '.join(map(str, numbers))}"
        pieces = {layout.bounds(replica): piece for replica, piece in layout.pieces_here(stored).items()}
        runs: list[tuple[int, int, list[Any]]] = []  # of pieces that are next to each other
        for (first, last), piece in sorted(pieces.items(), key=lambda item: item[0]):
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], last, [*runs[-1][2], piece]
            else:
                runs.append((first, last, [piece]))
        shown = (f"{a}:{b} {_in_words(np.concatenate(parts, layout.dim))}" for a, b, parts in runs)
        return f"here {', '.join(shown)}"

    # --- reading ----------------------------------------------------------------------------------------

    @_jax.public_call
    def read_value(self) -> jax.Array:
        """The value: inside a step this replica's (the same on all if on-write); elsewhere the whole value.

        Issues no collective, with two exceptions: an on-read variable in cross-replica context (one all-reduce), and a
        split variable (one all-gather; in a step only if the whole value is needed). So with several workers all must
        read these, also if only the chief makes use of the value: outside a step the workers meet before they gather a
        split variable. ``repr`` and :meth:`Strategy.local_results` show a worker its own pieces, without the others.

        Raises:
          LocalityError: an on-read variable without aggregation is read in cross-replica context.
          DeadlockError: not all workers read a variable that is split over the replicas of several.
        """
        if self.is_stacked and not self._in_replica():
            return self._read_across()
        return current_store().read(self)

    @property
    def value(self) -> jax.Array:
        """The same as :meth:`read_value`."""
        return self.read_value()

    @value.setter
    def value(self, value: Any) -> NoReturn:
        raise AttributeError(f"{self.describe()}: value can't be set; change it with variable.assign(value)")

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a new NumPy array."""
        return np.array(self.read_value())

    def _read_across(self) -> Any:
        if self.aggregation is Aggregation.NONE:
            raise LocalityError(
                f"{self.describe()} has a copy on each replica and no aggregation, so it has no single value: read "
                "strategy.local_results(variable), or create it with an aggregation"
            )
        copies = current_store().copies(self)
        if isinstance(copies.form, Local):
            return self.strategy.extended.reduce_to(self.aggregation, copies)
        return run_across(self, combined, copies, self.aggregation)

    def _in_replica(self) -> bool:
        return context.is_in_replica(self.replicas)

    # --- writing ----------------------------------------------------------------------------------------

    @_jax.public_call
    def assign(self, value: Any) -> Variable:
        """Set the value, and return the variable.

        Inside a step: on-write variables combine the replicas' values by the aggregation (one all-reduce; none
        for aggregation ``"none"``, where the value must be mirrored); on-read variables change this replica's copy.
        Elsewhere: all copies are set alike; an on-read sum variable divides ``value`` equally over its copies, so that
        it reads as ``value`` (the remainder of an integer goes to replica 0).

        Args:
          value: of the variable's shape, and of a dtype that casts to the variable's within its kind.

        Raises:
          ValueError: another shape.
          TypeError: a dtype of another kind (a float for an integer variable).
          LocalityError: the value differs between replicas and there is no aggregation; or a ``PerReplica`` value, or a
            value that differs between workers, is assigned in cross-replica context.
          TraceError: called inside a raw JAX transformation, which the value could not leave.
        """
        value = self.checked(value)
        if self._in_replica():
            return self._write(self._combined_value(value))
        if self.is_stacked and self.aggregation is Aggregation.SUM:
            return self._share_out(value)
        return self._write(value)

    def _share_out(self, value: Any) -> Variable:
        if not context.in_step():
            if isinstance(current_store(), ConcreteStore):  # value_and_grad lets writes out, but runs no step
                check_write_trace(self, _jax.eval_trace())
            with jax.transfer_guard("allow"):  # of a value of the host, which each device needs
                run_across(self, Variable._share_out, self, value)
            return self
        form = current_store().copies(self).form
        assert isinstance(form, Local)
        return self._write(share_of(value, form.communicator.replica_id(), self.replicas.num_replicas))

    def assign_add(self, delta: Any) -> Variable:
        """Add ``delta``, combined over the replicas as in :meth:`assign`, and return the variable.

        Raises:
          ValueError: on an on-read sum variable in cross-replica context: it is not clear which copy should grow.
        """
        return self._assign_change(delta, operator.add, "assign_add")

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract ``delta``, combined over the replicas as in :meth:`assign`, and return the variable.

        Raises:
          ValueError: on an on-read sum variable in cross-replica context: it is not clear which copy should shrink.
        """
        return self._assign_change(delta, operator.sub, "assign_sub")

    @_jax.public_call
    def _assign_change(self, delta: Any, change: Callable[[Any, Any], Any], method: str) -> Variable:
        delta = self.checked(delta)
        store = current_store()
        if self._in_replica():
            return self._write(change(store.read(self), self._combined_value(delta)))
        if not self.is_stacked:
            present = store.read(self)
            if isinstance(delta, jax.Array) and _jax.current_trace() is _jax.eval_trace():
                delta = put(delta, present.sharding)  # it may lie on other devices, or on a mesh of the user's
            return self._write(change(present, delta))
        if self.aggregation is Aggregation.SUM:
            raise ValueError(
                f"{self.describe()}: {method} in cross-replica context does not say which copy to change; call it "
                "inside a step, or use assign"
            )
        if context.in_cross_replica_context() and _jax.current_trace() is not _jax.eval_trace():
            return self._write(change(store.read(self), delta))
        run_across(self, getattr(Variable, method), self, delta)
        return self

    def scatter_add(self, slices: IndexedSlices) -> Variable:
        """Add rows, combined over the replicas as in :meth:`assign`, and return the variable.

        Args:
          slices: the rows; their ``shape`` is the variable's. Combining them takes two all-gathers of the rows. A
            variable split by its rows changes in pieces; a variable split along another dim is gathered.

        Raises:
          TypeError, ValueError: not an :class:`IndexedSlices`, or of another shape or kind of dtype; an on-read
            variable in cross-replica context; or an index is out of range, if its value is known (see
            :class:`IndexedSlices`). Otherwise such a row is left out.
          LocalityError, TraceError: as :meth:`assign`.
        """
        return self._scatter(slices, lambda value, s: value.at[s.indices].add(s.values), "scatter_add")

    def scatter_sub(self, slices: IndexedSlices) -> Variable:
        """Subtract rows; see :meth:`scatter_add`."""
        return self._scatter(slices, lambda value, s: value.at[s.indices].add(-s.values), "scatter_sub")

    def scatter_update(self, slices: IndexedSlices) -> Variable:
        """Set rows; see :meth:`scatter_add`.

        Raises:
          ValueError: also if the variable is on-write with aggregation sum or mean: a row that only some replicas set
            has no sum.
        """
        if self.aggregation in (Aggregation.SUM, Aggregation.MEAN) and not self.is_on_read:
            raise ValueError(
                f"{self.describe()}: scatter_update can't combine rows by {self.aggregation.value!r}, because only "
                "some replicas may set a row; use scatter_add, or aggregation 'only_first_replica'"
            )
        return self._scatter(slices, lambda value, s: value.at[s.indices].set(s.values), "scatter_update")

    def _scatter(self, slices: IndexedSlices, change: Callable[[Any, IndexedSlices], Any], method: str) -> Variable:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{self.describe()}: {method} takes IndexedSlices, got {slices!r}")
        if slices.shape != self.shape:
            raise ValueError(f"{self.describe()}: {method} got rows of an array of shape {slices.shape}")
        if isinstance(slices.values, PerReplica) or isinstance(slices.indices, PerReplica):
            raise LocalityError(
                f"{self.describe()}: {method} got {slices!r}, rows of each replica. Combine them first with "
                "strategy.reduce, or call it inside a step."
            )
        if isinstance(current_store(), ConcreteStore) and not isinstance(slices.indices, jax.core.Tracer):
            check_rows(slices.indices, self.shape, f"{self.describe()}: {method}")
        self.check_casts(jnp.asarray(slices.values))
        slices = IndexedSlices(jnp.asarray(slices.values, self.dtype), slices.indices, self.shape)
        if self._in_replica():
            slices = self._combined_value(slices)
        elif self.is_stacked:
            raise ValueError(
                f"{self.describe()}: {method} in cross-replica context would change every copy; call it inside a step"
            )
        return self._write(change(current_store().read(self), slices))

    def _combined_value(self, value: Any) -> Any:
        """The replicas' arrays, or rows, combined into one value."""
        if self.is_on_read or self.aggregation is Aggregation.NONE:
            return value
        return combined(value, self.aggregation)

    def _write(self, value: Any) -> Variable:
        store = current_store()
        is_outside = isinstance(store, ConcreteStore)
        if not (is_outside and isinstance(value, np.ndarray)):
            value = jnp.asarray(value, self.dtype)
        any_value = is_outside or self.is_on_read
        store.write(self, value, None if any_value else f"{self.describe()} was assigned a value, {_CHOOSE}")
        return self

    def checked(self, value: Any) -> Any:
        """``value`` as an array of the variable's shape and dtype; raises as :meth:`assign` does."""
        if isinstance(value, PerReplica):
            raise LocalityError(
                f"{self.describe()} was assigned {value!r}, one value for each replica. Combine it first with "
                "strategy.reduce, or assign inside a step."
            )
        check_x64(self.dtype, self.describe)
        given = value = numpy_array(value)
        if isinstance(value, np.ndarray):
            check_numbers(value, self._what_is_assigned)
        else:
            is_number = type(value) is int and jnp.issubdtype(self.dtype, jnp.number)
            value = as_array(value, self._what_is_assigned, self.dtype if is_number else None)
        if value.shape != self.shape:
            raise ValueError(f"{self.describe()} was assigned a value of shape {value.shape}; expected {self.shape}")
        self.check_casts(value)
        found = numpy_copy(given, self.dtype, self._what_is_assigned)  # from the host each part goes to its device
        if found is not None:
            return found
        return value if value.dtype == self.dtype else value.astype(self.dtype)

    def _what_is_assigned(self) -> str:
        return f"{self.describe()}: the value to assign"

    def check_casts(self, value: Any) -> None:
        """Raise unless the dtype of ``value`` may be assigned; see :meth:`assign`."""
        kind = jnp.complexfloating if jnp.iscomplexobj(value) else jnp.inexact
        weak = getattr(value, "weak_type", False) and jnp.issubdtype(self.dtype, kind)
        if not weak and not casts(value.dtype, self.dtype):
            raise TypeError(
                f"{self.describe()} was assigned a value of dtype {value.dtype.name}, which does not cast to "
                f"{jnp.dtype(self.dtype).name} within its kind; convert it with .astype first"
            )

    # --- storage ----------------------------------------------------------------------------------------

    def to_storage(self, value: Any) -> jax.Array:
        """A new array on the strategy's devices that holds ``value`` on every replica."""
        mesh = self.replicas.mesh
        is_ours = isinstance(value, np.ndarray)  # see numpy_copy
        laid_out = put(self.layout.laid_out(value), self.layout.laid_out_sharding(mesh), may_alias=is_ours)
        return self.layout.to_stored(laid_out, mesh)

    def stored(self) -> jax.Array:
        """The array on the strategy's devices.

        Raises:
          VariableLostError: the array is gone.
        """
        return present_array(self.slot, self.describe)

    def from_storage(self) -> jax.Array:
        """The whole value, on every replica, of an on-write variable: gathered if it is split.

        Raises:
          WorkerError: another worker does not send its pieces.
        """
        if not isinstance(self.layout, Split):
            return self.stored()
        mesh = self.replicas.mesh
        everywhere = self.layout.whole_sharding(mesh)
        laid_out = self.layout.from_stored(self.stored(), mesh)
        if not self.is_spread:
            return jax.device_put(self.layout.whole(laid_out), everywhere)
        with self.replicas.lockstep.explaining(f"reading {self.describe()}"), jax.disable_jit(False):
            return jax.block_until_ready(jax.device_put(self.layout.whole(laid_out), everywhere))

    def block_until_ready(self) -> Self:
        """Wait until the value is computed, as an array's method does; returns the variable.

        Raises:
          VariableLostError: it has none any more.
        """
        if _jax.current_trace() is _jax.eval_trace():
            jax.block_until_ready(self.stored())
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise cant_be_pickled(
            self.describe(),
            "make another Variable from its value, variable.numpy(), or save it with replicax.Checkpoint",
        )


def _in_words(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=20, edgeitems=2)


# To JAX a variable is a pytree whose only leaf is its value, so that any function that takes pytrees takes
# variables; it returns arrays. To Replicax itself a variable is a leaf (see pytrees.is_leaf).
jax.tree_util.register_pytree_node(Variable, lambda v: ((v.read_value(),), None), lambda _, children: children[0])
