"""Gradient accumulation: a step that takes its batch in parts, and updates once with the sum of their gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _jax, context
from replicax.argument_checks import as_keys, checked_integer
from replicax.collectives import ReplicaExamples
from replicax.devices.host_values import as_array, strongly_typed
from replicax.errors import ContextError, warn
from replicax.execution.replica_values import ARRAYS
from replicax.execution.tracing.function_key import Wrapper
from replicax.execution.tracing.stateful_arguments import objects_in
from replicax.execution.tracing.step_call import check_changes_leave, mutable_objects
from replicax.indexed_slices import is_slices
from replicax.loop.step_metrics import number_name
from replicax.loop.step_objects import is_whole
from replicax.loop.wrapped_steps.accumulated_gradients import check_loss, makes_share, used_too_early
from replicax.pytrees import key_paths, registered
from replicax.training.step_hooks import update_hook, using
from replicax.user_functions import checked_function, checked_result
from replicax.variables import Variable
from replicax.variables.store import DerivedStore, Store, current_store, use_store

if TYPE_CHECKING:
    from replicax.models.nnx_parts import NNXParts


def accumulated(step: Callable[..., Any], parts: int, *, mean: Iterable[str] | bool = ()) -> Callable[..., Any]:
    """``step``, which gets its batch in ``parts`` micro-batches, and updates once, with the sum of their gradients.

    It computes what ``step`` computes of the whole batch, with the activations of one micro-batch in memory at a time.
    ``replicax.train(accumulate=4)`` does it by itself; in a loop of your own,
    ``strategy.run(accumulated(step, 4), args=(batch,))``.

    The step runs once for each micro-batch, one after the other, and what it assigns to variables (metrics, batch
    statistics, counters) goes on from one to the next. Only ``apply_gradients`` waits: gradients are added up, and
    after the last micro-batch they are summed over the replicas and applied, in one all-reduce. A batch that is not
    divisible by ``parts`` is padded; :func:`replicax.compute_average_loss` and metrics leave the padding out, and count
    the examples of the whole batch. So the loss has to end in ``compute_average_loss``, with a loss for each example,
    or in :func:`replicax.as_share`. Sums of your own, also returned ones, include padding, unless you leave it out by
    ``get_replica_context().example_mask``.

    Args:
      step: returns numbers, or a pytree of numbers. Those that depend on the examples, or are shares
        (:func:`replicax.compute_average_loss`, :func:`replicax.scale_regularization_loss`), are added up; others are
        those of the last micro-batch.
      parts: how many; the arrays of the batch are split along their first dim.
      mean: the keys of numbers of which a mean over the examples is returned instead of the sum; ``True`` for all.

    Raises:
      ValueError: ``parts`` is not an int of at least 1. In the step: no array to split; arrays of different lengths;
        what it returns are no numbers, or none has a key of ``mean``; the loss is no share; ``apply_gradients`` is
        given further arguments, or is not called.
      TypeError: ``mean`` is one key, and no list.
      TraceError: in the step: a variable is used that ``apply_gradients``, or the update of an ``nnx.Optimizer``, is to
        change, after it was called.

    >>> import replicax, optax, jax.numpy as jnp, numpy as np
    >>> from replicax.loop import accumulated
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(np.ones(3, np.float32), name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss_of = lambda: replicax.compute_average_loss(jnp.square(x @ w))
    ...     loss, gradients = replicax.value_and_grad(loss_of, [w])()
    ...     optimizer.apply_gradients(zip(gradients, [w]))
    ...     return loss
    >>> for batch in strategy.distribute_dataset([np.ones((20, 3), np.float32)]):
    ...     loss = strategy.run(accumulated(step, 4), args=(batch,))
    >>> float(strategy.reduce("sum", loss)), [round(float(x), 4) for x in w.numpy()]
    (9.0, [0.4, 0.4, 0.4])
    """
    parts = checked_integer(parts, "accumulated(step, parts): parts")
    checked_function(step, "accumulated(step, parts)", "step")
    keys = mean if isinstance(mean, bool) else as_keys(mean)
    if keys is None:
        raise TypeError(
            f"accumulated(step, parts): mean must be a list of keys, or True, got {mean!r}; for one: mean=[key]"
        )
    return step if parts == 1 else AccumulatedStep(step, parts, keys)


class AccumulatedStep(Wrapper):
    """A step that takes its batch in parts; see :func:`accumulated`."""

    def __init__(self, fn: Callable[..., Any], parts: int, mean: frozenset[str] | bool, others: bool = False) -> None:
        super().__init__(fn, parts, mean, others)
        self._parts = parts
        self._mean = mean
        self._has_others = others  # whether ``mean`` may have keys that the step does not return
        self._rows = (0, 0)  # the most that it was traced for, of a replica's batch: without and with padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = context.get_replica_context()
        if replica is None:
            raise ContextError(
                f"{self.__name__} is a step: call it by strategy.run(accumulated(step, {self._parts}), args=(batch,))"
            )
        if replica._replicas.remote_variables is not None:
            raise ContextError(
                f"{self.__name__} adds up the gradients of micro-batches, which steps on parameter servers can't: "
                "schedule a function for each micro-batch, with the step itself"
            )
        communicator: Any = replica._communicator
        objects, adapter, call_with = objects_in(self.fn, args, kwargs)
        parts = None if adapter is None else adapter.parts(objects)
        batch = _Batch((args, kwargs), self._parts, communicator, self.__name__)
        self._rows = max(self._rows, (batch.length, batch.masks.size))
        outer, hook = current_store(), update_hook.get()
        run = _Run(self, outer, batch, communicator, parts, call_with)
        with _jax.kept_programs():
            computed = run.found(*batch.first)
            carried = [outer.read(v) for v in run.written]
            held = [] if parts is None else parts.values
            sums = [jnp.zeros(shape.shape, shape.dtype) for shape in run.shapes]
            pieces = (batch.pieces, batch.masks, jnp.arange(self._parts, dtype=jnp.int32))
            (values, held, sums), numbers = lax.scan(run.body, (carried, held, sums), pieces)
        _jax.renew_kept_programs()
        for variable, value in zip(run.written, values, strict=True):
            outer.write(variable, value, run.error_unless_mirrored[variable])
        if parts is not None:
            parts.put_back(held)
        summed = iter(sums)
        for update in run.updates:
            gradients = [next(summed) for _ in range(update.count)]
            if hook is None or not update.of_gradients:
                update.apply(gradients)
            else:
                hook.update(gradients, update.variables, {}, update.apply)
        return self._combined_numbers(run, computed, numbers, batch)

    def check_padding(self) -> None:
        """Warn if the micro-batches were mostly padding."""
        length, rows = self._rows
        if rows > 2 * length:
            warn(
                f"{self.__name__}: a replica's batch of {length} row(s) is padded to {rows}, to divide into "
                f"{self._parts} micro-batches, so {1 - length / rows:.0%} of what is computed is padding. Use at "
                f"most accumulate={length}, or larger batches."
            )

    def _combined_numbers(self, run: _Run, depends: list[bool], numbers: list[Any], batch: _Batch) -> Any:
        """Combine the numbers of micro-batches to those of the whole batch."""
        result = []
        for is_mean, is_share, each in zip(self.are_means(run.tree)[1], depends, numbers, strict=True):
            if not is_share:
                result.append(each[-1])
            elif is_mean:
                weights = jnp.sum(batch.masks, axis=1).astype(each.dtype)
                result.append(jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), jnp.ones((), each.dtype)))
            else:
                result.append(jnp.sum(each, dtype=each.dtype))
        return run.tree.unflatten(result)

    def are_means(self, tree: Any) -> tuple[list[str], list[bool]]:
        """The names of the numbers that the step returns, and whether each is averaged over the micro-batches."""
        names = [number_name(path) for path in key_paths(tree)]
        unknown = [] if isinstance(self._mean, bool) or self._has_others else sorted(self._mean.difference(names))
        if unknown:
            raise ValueError(
                f"accumulated({self.__name__}, {self._parts}, mean=…): the step returns no number called "
                f"{unknown[0]!r}; it returns {str(names)[1:-1] or 'none'}"
            )
        return names, [self._mean if isinstance(self._mean, bool) else name in self._mean for name in names]


class _Batch:
    """The arguments of a step, and the pieces ``[parts, rows, …]`` that the arrays of a batch in them are split into.

    ``masks`` says which rows of the pieces are examples, of which all replicas together have ``total``. ``examples`` is
    what the batch itself has in that way, if it is padded, or a micro-batch.
    """

    def __init__(self, arguments: Any, parts: int, communicator: Any, name: str) -> None:
        self._leaves, self._tree = jax.tree_util.tree_flatten(registered(arguments), is_leaf=is_whole)
        self._split = [i for i, x in enumerate(self._leaves) if isinstance(x, jax.Array | np.ndarray) and x.ndim]
        lengths = {self._leaves[i].shape[0] for i in self._split}
        if len(lengths) != 1:
            found = f"of {len(lengths)} lengths, {sorted(lengths)}" if lengths else "none"
            arrays = [self._leaves[i] for i in self._split]
            if any(x.dtype == jnp.uint32 and x.shape in ((2,), (4,)) for x in arrays):
                found += ". If one is a random key, make it with jax.random.key, which is not split"
            raise ValueError(
                f"{name}: to accumulate gradients, the arrays of the batch are split along their first dim, so they "
                f"must all have one length there; the step got {found}"
            )
        [self.length] = [length] = lengths
        rows = -(-length // parts)
        self.examples = examples = communicator.examples
        self.total = communicator.add_up(length) if examples is None else examples.count
        mask = jnp.ones(length, jnp.bool_) if examples is None else examples.mask
        padding = parts * rows - length
        self.is_padded = padding > 0 or examples is not None
        self.masks = jnp.pad(mask, (0, padding)).reshape(parts, rows)
        # Padded with examples again, whose derivatives are finite.
        self.pieces = []
        for i in self._split:
            array = self._leaves[i]
            if padding:
                array = jnp.take(array, jnp.arange(parts * rows, dtype=jnp.int32) % length, axis=0)
            self.pieces.append(array.reshape(parts, rows, *array.shape[1:]))

    @property
    def first(self) -> tuple[list[Any], Any]:
        return [piece[0] for piece in self.pieces], self.masks[0]

    def arguments(self, pieces: Sequence[Any]) -> Any:
        leaves = list(self._leaves)
        for i, piece in zip(self._split, pieces, strict=True):
            leaves[i] = piece
        return jax.tree_util.tree_unflatten(self._tree, leaves)


@dataclasses.dataclass(frozen=True)
class _Update:
    """A call of ``apply_gradients``, or an addition to a metric, that waits for the sums over all micro-batches."""

    variables: Sequence[Variable]
    count: int
    apply: Callable[[list[Any]], None]
    of_gradients: bool


class _Run:
    """The step on micro-batches, as the body of a scan, which collects the gradients of the step's updates."""

    def __init__(
        self,
        step: AccumulatedStep,
        outer: Store,
        batch: _Batch,
        communicator: Any,
        parts: NNXParts | None,
        call_with: Callable[..., tuple[Any, Any, Any]],
    ) -> None:
        self._parts, self._call_with = parts, call_with
        self._step, self._outer, self._batch, self._communicator = step, outer, batch, communicator
        self._created: list[Variable] = []
        self.written: list[Variable] = []
        self.error_unless_mirrored: dict[Variable, str | None] = {}  # see `Store.write`
        self.updates: list[_Update] = []
        self.shapes: list[Any] = []  # of the gradients of all updates
        self.tree: Any = None  # of what the step returns
        # While `found` traces the step: for each array of the objects an input that stands for its value after the
        # updates that wait, so that the traced program shows each use of that value. Otherwise empty.
        self._awaited: Sequence[Any] = ()
        self._waiting: dict[int, str] = {}  # the names of those arrays that such an update changes, by number

    def found(self, pieces: list[Any], mask: Any) -> list[bool]:
        """Find out what the step writes and returns; whether each number that it returns depends on the examples."""
        held = [] if self._parts is None else self._parts.values

        def traced(pieces: list[Any], mask: Any, awaited: list[Any]) -> Any:
            self._awaited = awaited
            store, gradients, numbers, left = self._run_step([], held, pieces, mask, 0)
            self._awaited = ()
            for number, name in self._waiting.items():
                if left[number] is not awaited[number]:
                    raise used_too_early(name, "written")
            self.written = list(store.written)
            self.error_unless_mirrored = dict(store.written)
            others = [pair for number, pair in enumerate(zip(left, held, strict=True)) if number not in self._waiting]
            written = [(store.values[v], self._outer.read(v)) for v in self.written]
            return numbers, gradients, [*written, *others]

        program, (_, self.shapes, _) = jax.make_jaxpr(traced, return_shape=True)(pieces, mask, held)
        later = dict(zip(program.jaxpr.invars[len(program.jaxpr.invars) - len(held) :], range(len(held)), strict=True))
        uses = [(v, e) for e in program.jaxpr.eqns for v in e.invars] + [(v, None) for v in program.jaxpr.outvars]
        for v, equation in uses:
            if not isinstance(v, _jax.Literal) and v in later:
                where = "" if equation is None else f" at {_jax.source_line(equation)}"
                raise used_too_early(self._waiting[later[v]], f"read{where}")

        outputs = program.jaxpr.outvars
        numbers, changes = outputs[: self.tree.num_leaves], outputs[self.tree.num_leaves + len(self.shapes) :]
        are_gradients = [update.of_gradients for update in self.updates for _ in range(update.count)]
        gradients = list(itertools.compress(outputs[self.tree.num_leaves :], are_gradients))
        sums = [None if is_mean else name for name, is_mean in zip(*self._step.are_means(self.tree), strict=True)]
        check_loss(self._step.__name__, program.jaxpr, gradients, changes[::2], changes[1::2], sums)
        depends = set(program.jaxpr.invars)
        for equation in program.jaxpr.eqns:
            # A penalty's share is one for each micro-batch, too.
            if makes_share(equation) or not depends.isdisjoint(_jax.without_literals(equation.invars)):
                depends.update(equation.outvars)
        return [not isinstance(v, _jax.Literal) and v in depends for v in numbers]

    def body(self, carry: Any, piece: Any) -> Any:
        """Run one micro-batch: returns the new values of variables and sums of gradients, and the numbers."""
        values, held, sums = carry
        store, gradients, numbers, held = self._run_step(values, held, *piece)
        values = [store.values[v] for v in self.written]
        return (values, held, [a + b for a, b in zip(sums, gradients, strict=True)]), numbers

    def _run_step(
        self, values: Sequence[Any], held: Sequence[Any], pieces: list[Any], mask: Any, part: Any
    ) -> tuple[DerivedStore, list[Any], list[Any], list[Any]]:
        """Run the step; returns what it writes, its gradients, its numbers, and the objects' arrays afterwards."""
        self._store = store = _PartStore(self._outer, dict(zip(self.written, values, strict=True)), self._created)
        self._gradients: list[Any] = []
        self.updates = []
        if not self._batch.is_padded:
            mask = jnp.ones(mask.shape, jnp.bool_)  # a constant, by which the compiler selects nothing
        copies = () if self._parts is None else self._parts.copies(held)
        fn, args, kwargs = self._call_with(copies, *self._batch.arguments(pieces))
        objects = mutable_objects(self._step.fn, fn, args, kwargs)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self._communicator, "examples", self._communicator.examples)
            outer, parts = self._batch.examples, self._step._parts
            if outer is not None:  # these are parts of that part
                parts, part = outer.parts * parts, outer.part * parts + part
            self._communicator.examples = ReplicaExamples(mask, self._batch.total, parts, part)
            stack.enter_context(use_store(store))
            stack.enter_context(using(update_hook, self))
            if self._parts is not None:
                stack.enter_context(self._parts.collecting(copies, self.take))
            returned = checked_result(fn(*args, **kwargs), self._step.fn, "accumulated(step, parts)")
        left = [] if self._parts is None else self._parts.values_of(copies)
        leaves, self.tree = jax.tree_util.tree_flatten(registered(returned), is_leaf=is_whole)
        check_changes_leave(objects, {id(x) for x in [*leaves, *store.values.values()]})
        numbers = []
        for leaf in leaves:
            value = leaf.value if isinstance(leaf, Variable) else leaf
            if not isinstance(value, ARRAYS) or jnp.ndim(value):
                raise ValueError(
                    f"{self._step.__name__}: a step whose gradients are accumulated returns numbers, got {value!r}: "
                    "reduce it first (replicax.compute_average_loss), or keep it in a variable"
                )
            numbers.append(strongly_typed(as_array(value, f"what {self._step.__name__} returned")))
        return store, self._gradients, numbers, left

    def update(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        extra: Mapping[str, Any],
        apply: Callable[[list[Any]], None],
    ) -> None:
        dense = [g.to_dense() if is_slices(g) else g for g in gradients]
        self.take([g.astype(v.dtype) for g, v in zip(dense, variables, strict=True)], extra, apply, variables)
        self._store.waiting.update(variables)

    def take(
        self,
        gradients: list[Any],
        extra: Mapping[str, Any] | None,
        apply: Callable[[list[Any]], None],
        variables: Sequence[Variable] = (),
        cells: Callable[[], Mapping[tuple[str, int], Any]] = dict,
    ) -> None:
        """Add an update that waits, of variables, or of arrays in objects: see :mod:`replicax.models.nnx_parts`."""
        if extra:
            raise ValueError(
                f"apply_gradients: the argument {next(iter(extra))!r} of the transformation is of one micro-batch, and "
                "the gradients are accumulated over several: use a transformation that needs the gradients alone"
            )
        self._gradients += gradients
        self.updates.append(_Update(variables, len(gradients), apply, extra is not None))
        for (name, number), cell in cells().items() if self._awaited else ():
            self._waiting[number] = name
            cell.set_raw_value(self._awaited[number])


class _PartStore(DerivedStore):
    """The store of a step on one micro-batch."""

    def __init__(self, outer: Store, values: dict[Variable, Any], created: list[Variable]) -> None:
        super().__init__(outer, values)
        self.waiting: set[Variable] = set()  # changed when all micro-batches are through
        self._created = created
        self._next = 0

    def create(self, make: Callable[[], Variable]) -> Variable:
        if self._next == len(self._created):
            self._created.append(self.outer.create(make))
        self._next += 1
        return self._created[self._next - 1]

    def read(self, variable: Variable) -> Any:
        self._check(variable, "read")
        return super().read(variable)

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        self._check(variable, "written")
        super().write(variable, value, error_unless_mirrored)

    def _check(self, variable: Variable, what: str) -> None:
        if variable in self.waiting:
            raise used_too_early(variable.describe(), what)
