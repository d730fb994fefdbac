"""Cross-replica functions: reduce, gather and local_results, wherever the components are.

Inside a ``merge_fn`` that is being traced the components are one traced value, and collectives over the mesh
combine them. Outside a step they are on the devices; then a step is run that only combines them in the same way.
Components of different dtypes or ranks can't be in one program. They are combined on one device: each worker does so
for itself, after all have exchanged their components.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import context
from replicax.collectives import Communicator, ReduceOp, check_other_dims, checked_axes, divide, summable
from replicax.communication import CommunicationOptions
from replicax.devices.arrays import local_array, put
from replicax.devices.host_values import as_array, check_numbers
from replicax.errors import LocalityError, ShareWarning, warn
from replicax.execution.cache import ProgramCache
from replicax.execution.replica_values import ARRAYS, cant_be_told
from replicax.execution.run import run_compiled
from replicax.indexed_slices import IndexedSlices, is_slices
from replicax.pytrees import is_leaf, registered
from replicax.values import USE_LEAVES, Local, PerReplica, Ragged, Scale, Stacked
from replicax.variables.layout import Split
from replicax.variables.slots import exchanging
from replicax.variables.store import current_store
from replicax.variables.trees import as_arrays
from replicax.variables.variable import Variable
from replicax.workers.replicas import Replicas

Axis = int | tuple[int, ...] | None


def reduce(
    programs: ProgramCache,
    op: ReduceOp,
    value: Any,
    axis: Axis,
    options: CommunicationOptions | None = None,
    what: str = "strategy.reduce",
) -> Any:
    """See :meth:`replicax.Strategy.reduce`; ``what`` is the method that the user has called."""
    units, structure = jax.tree_util.tree_flatten(registered(value), is_leaf=lambda v: is_leaf(v) or is_slices(v))
    if any(map(is_slices, units)):
        dense = iter(reduce(programs, op, [unit for unit in units if not is_slices(unit)], axis, options, what))
        reduced = [_reduce_slices(programs, op, unit, axis, what) if is_slices(unit) else next(dense) for unit in units]
        return jax.tree_util.tree_unflatten(structure, reduced)
    leaves, treedef = _flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, PerReplica):
            check_numbers(leaf, f"{what}: the value")
    results = [
        None if isinstance(leaf, PerReplica) else _reduce_plain(programs.replicas.num_replicas, op, leaf, axis, what)
        for leaf in leaves
    ]
    ours = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerReplica)]
    if op is ReduceOp.MEAN and axis is None:
        warn_of_means([leaves[i] for i in ours], what)
    for batch in _by_mask(ours, leaves):
        values = [leaves[i] for i in batch]
        for value in values:
            if axis is not None:
                _check_dim_is_known(value, axis, what)
            if (shapes := _shapes(value)) is not None:
                _check_can_be_reduced(shapes, axis, what)
        reduced = _by_form(
            programs,
            values,
            lambda values, communicator: _reduce_local(op, values, axis, communicator, options, what),
            lambda values: _reduce_components(op, values, axis, what),
            reduce,
            op=op,
            axis=axis,
            options=options,
        )
        for i, result, value in zip(batch, reduced, values, strict=True):
            removed = () if axis is None or value.mask is None else checked_axes(axis, value.values[0].shape, what)
            results[i] = _examples_only(result, value, removed=removed)
    return jax.tree_util.tree_unflatten(treedef, results)


def warn_of_means(values: Iterable[PerReplica], what: str = "strategy.reduce") -> None:
    """Warn if the mean over the replicas of one of these values is a mistake, by its scale."""
    for value in {value.scale: value for value in values if value.scale in _NO_MEANS}.values():
        problem = _NO_MEANS[value.scale].format(what=what, count=value.count)
        warn(f"{what}('mean', …): {problem}", ShareWarning)


_NO_MEANS: dict[Scale | None, str] = {
    "share": "a value is each replica's share of a mean over the global batch (replicax.compute_average_loss), so the "
    "mean of the {count} shares is 1/{count} of that mean. Add the shares up: {what}('sum', value).",
    "ragged mean": "a value is the mean over each replica's own examples, of which replicas have different numbers "
    "here. In the mean of these means examples of a replica that has fewer weigh more than others, and it is NaN if a "
    "replica has none. Return replicax.compute_average_loss(values) from the step, which is each replica's share of "
    "the mean over the whole batch, and add the shares up: {what}('sum', share); or keep a metric (replicax.Mean).",
}
"""The mistake in the mean over the replicas of a number of this scale."""


def first(programs: ProgramCache, value: Any) -> Any:
    """Replica 0's component of each ``PerReplica`` in a pytree; other leaves as they are."""
    leaves, treedef = _flatten(value)
    ours = [PerReplica(leaf.form) for leaf in leaves if isinstance(leaf, PerReplica)]
    components = _by_form(
        programs,
        ours,
        lambda values, communicator: [communicator.from_first(v) for v in values],
        lambda values: [components[0] for components in values],
        first,
    )
    results = [components.pop(0) if isinstance(v, PerReplica) else as_arrays(v) for v in leaves]
    return jax.tree_util.tree_unflatten(treedef, results)


def gather(programs: ProgramCache, value: Any, axis: int) -> Any:
    """See :meth:`replicax.Strategy.gather`."""
    leaves, treedef = _flatten(value)
    several = programs.replicas.num_replicas > 1
    for leaf in leaves:
        if not isinstance(leaf, PerReplica):
            if several:
                raise ValueError(
                    f"strategy.gather joins the components of PerReplica values, but got {leaf!r}, which all "
                    f"{programs.replicas.num_replicas} replicas share. There is nothing to gather: use it as it is."
                )
            checked_axes(axis, np.shape(leaf), "gather")
    ours = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    for leaf in ours:
        _check_dim_is_known(leaf, axis, "strategy.gather")
        if (shapes := _shapes(leaf)) is not None:
            _check_can_be_gathered(shapes, axis)
    gathered = _by_form(
        programs,
        [PerReplica(v.form) if isinstance(v.form, Stacked) and v.mask is not None else v for v in ours],
        lambda values, communicator: [_gather_local(v, axis, communicator) for v in values],
        lambda values: [_gather_components(v, axis) for v in values],
        gather,
        axis=axis,
    )
    wholes = (
        _examples_only(whole, v, is_joined=v.dim in (axis, axis + whole.ndim))
        for whole, v in zip(gathered, ours, strict=True)
    )
    results = [next(wholes) if isinstance(leaf, PerReplica) else as_arrays(leaf) for leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, results)


def local_results(replicas: Replicas, value: Any) -> tuple[Any, ...]:
    """See :meth:`replicax.Strategy.local_results`."""
    if isinstance(value, Variable) and not value.is_stacked:
        if isinstance(value.layout, Split) and not context.in_step() and not replicas.is_absent:
            with exchanging():
                pieces = value.layout.pieces_here(value.stored()).values()
                return tuple(piece for piece in pieces for _ in range(replicas.per_device))
        places = [replica // replicas.per_device for replica in _seen_here(replicas)]
        return value.layout.parts(value.read_value(), places)
    leaves, treedef = _flatten(value)
    columns = [_components(leaf) if isinstance(leaf, PerReplica) else None for leaf in leaves]
    if not any(columns) and jax.tree_util.treedef_is_leaf(treedef) and not _is_everywhere(replicas, value):
        return (value,)  # a single value that no replica has computed
    count = next((len(c) for c in columns if c is not None), len(_seen_here(replicas)))

    def of_one(i: int) -> list[Any]:
        return [leaf if column is None else column[i] for leaf, column in zip(leaves, columns, strict=True)]

    return tuple(jax.tree_util.tree_unflatten(treedef, of_one(i)) for i in range(count))


def _is_everywhere(replicas: Replicas, value: Any) -> bool:
    """Return whether ``value`` is an array that every replica has, such as a mirrored value."""
    if not isinstance(value, jax.Array):
        return False
    if context.in_step():
        return True
    if isinstance(value, jax.core.Tracer):
        return False
    return all(value.sharding.device_set.intersection(row) for row in replicas.logical_devices)


def _seen_here(replicas: Replicas) -> Sequence[int]:
    """The replicas whose components are visible: this worker's; inside a step all, since each gathers them."""
    return range(replicas.num_replicas) if context.in_step() else replicas.local_replicas


def _flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of ``value``, with the copies of on-read variables as ``PerReplica``, and its structure."""
    try:
        leaves, treedef = jax.tree_util.tree_flatten(registered(value), is_leaf=is_leaf)
    except LocalityError as error:
        error.add_note(f"A pytree class took its parts for arrays when it was taken apart. {USE_LEAVES}")
        raise
    copies = [
        current_store().copies(leaf) if isinstance(leaf, Variable) and leaf.is_stacked else leaf for leaf in leaves
    ]
    return copies, treedef


def _components(value: PerReplica) -> Sequence[Any]:
    form = value.form
    return form.communicator.components(form.value) if isinstance(form, Local) else value.real_values


def _by_mask(positions: Sequence[int], leaves: Sequence[Any]) -> list[list[int]]:
    """The positions of values that can be combined together: those of the same padded batch, and unpadded ones."""
    groups: list[tuple[Any, list[int]]] = []
    for i in sorted(positions, key=lambda i: leaves[i].mask is None):
        mask = leaves[i].mask
        group = next((group for other, group in groups if mask is None or mask.same_as(other)), None)
        if group is None:
            group = []
            groups.append((mask, group))
        group.append(i)
    return [group for _, group in groups]


def _check_dim_is_known(value: Any, axis: Axis, what: str) -> None:
    if isinstance(value, PerReplica) and value.mask is not None and value.dim is None:
        shape = value.values[0].shape
        raise cant_be_told(what, checked_axes(axis, shape, what)[0], shape)  # type: ignore[arg-type]


def _shapes(value: PerReplica) -> Sequence[tuple[int, ...]] | None:
    """The shape of each replica's component without padding; ``None`` if all have one shape, or it is not known."""
    if isinstance(value.form, Ragged):
        return value.form.shapes
    if value.mask is None or value.dim is None or not isinstance(value.form, Stacked):
        return None
    before, after = value.form.array.shape[1 : value.dim + 1], value.form.array.shape[value.dim + 2 :]
    return [(*before, int(size), *after) for size in value.mask.host.sum(1)]


def _examples_only(whole: Any, value: PerReplica, is_joined: bool = False, removed: Sequence[int] = ()) -> Any:
    """The combined array ``whole`` of a value without padding, after dims of the value were ``removed``.

    It has the examples of all replicas if it ``is_joined`` along their dim; otherwise each replica has as many.
    """
    if value.mask is None or value.mask.is_full or value.dim is None or value.dim in removed:
        return whole
    rows = np.flatnonzero(value.mask.host if is_joined else value.mask.host[0])
    dim = value.dim - sum(d < value.dim for d in removed)
    return put(jnp.take(local_array(whole), rows, axis=dim), whole.sharding)


def _gather_local(value: Any, axis: int, communicator: Communicator) -> Any:
    if communicator.examples is not None:
        array = as_array(value, "strategy.gather: the value")
        [dim] = checked_axes(axis, array.shape, "gather")
        padded = communicator.has_examples_along(array, dim, "strategy.gather", error_if_so=_SIZE_UNKNOWN)
        value = jnp.where(padded, jnp.zeros_like(array), array)  # no effect, but it keeps the question in the program
    return communicator.all_gather(value, axis)


_SIZE_UNKNOWN = (
    "strategy.gather in a merge_fn: some rows of the value may be padding, and the number of examples is not known "
    "while the step is compiled. Return the value from the step and gather it outside, or all_gather it together with "
    "replicax.get_replica_context().example_mask."
)


def _by_form(
    programs: ProgramCache,
    values: list[PerReplica],
    of_local: Callable[[list[Any], Communicator], list[Any]],
    of_components: Callable[[list[tuple[Any, ...]]], list[Any]],
    again: Callable[..., list[Any]],
    **settings: Any,
) -> list[Any]:
    """Combine components: directly while tracing, or by running a step that calls ``again`` with ``settings``."""
    if not values:
        return []
    forms = {type(v.form) for v in values}
    if forms == {Local}:
        locals_ = [v.form for v in values if isinstance(v.form, Local)]
        return of_local([form.value for form in locals_], locals_[0].communicator)
    if forms <= {Stacked, Ragged} and not context.in_step():
        return run_compiled(programs, _step(again, **settings), (values,))
    if Local in forms or context.in_step():
        raise ValueError(
            "inside a step only its own values can be combined; pass a PerReplica from outside to the step through "
            "strategy.run(step, args=(value,))"
        )
    local_values = [v.real_values for v in values]
    everyones = programs.replicas.lockstep.exchange("combines components of different kinds", local_values)
    return of_components([tuple(itertools.chain(*parts)) for parts in zip(*everyones, strict=True)])


@functools.lru_cache(maxsize=64)
def _step(again: Callable[..., list[Any]], **settings: Any) -> Callable[[list[Any]], Any]:
    """The step that calls ``again``: the same function in each call, as the key of another would be made anew."""

    def merge(strategy: Any, values: list[Any]) -> list[Any]:
        return again(strategy.extended.programs, value=values, **settings)

    def reduce_or_gather(values: list[Any]) -> Any:
        return context.current_replica().merge_call(merge, args=(values,))

    return reduce_or_gather


def _reduce_slices(programs: ProgramCache, op: ReduceOp, slices: IndexedSlices, axis: Axis, what: str) -> Any:
    n = programs.replicas.num_replicas
    if axis is not None:
        raise ValueError(f"{what}: IndexedSlices are reduced across replicas only; pass axis=None")
    if not isinstance(slices.values, PerReplica) and not isinstance(slices.indices, PerReplica):
        return _reduce_plain(n, op, slices, None, what)
    pair = [slices.values, slices.indices]
    own = [x.form for x in pair if isinstance(x, PerReplica) and isinstance(x.form, Local)]
    if len(own) == 2:
        values, indices = _gathered_rows([as_array(x.value, what) for x in own], slices.shape[0], own[0].communicator)
    else:
        values, indices = (
            gather(programs, x, 0) if isinstance(x, PerReplica) else jnp.concatenate([x] * n) for x in pair
        )
    return IndexedSlices(values if op is ReduceOp.SUM else divide(values, n), indices, slices.shape)


def _gathered_rows(pair: list[Any], beyond: int, communicator: Communicator) -> list[Any]:
    """The rows of all replicas and their indices, in a ``merge_fn``. Padding becomes zeros for a row ``beyond``."""
    values, indices = pair
    examples = communicator.examples
    if examples is not None and examples.mask.shape[0] == len(indices):
        theirs = [communicator.has_examples_along(x, 0, "strategy.reduce") for x in pair]
        is_padding = (theirs[0] | theirs[1]) & ~examples.mask
        values = jnp.where(jnp.expand_dims(is_padding, range(1, values.ndim)), jnp.zeros_like(values), values)
        fits = beyond <= jnp.iinfo(indices.dtype).max  # type: ignore[no-untyped-call]
        indices = indices if fits else indices.astype(jnp.int32)
        indices = jnp.where(is_padding, jnp.asarray(beyond, indices.dtype), indices)
    return [communicator.all_gather(x, 0) for x in (values, indices)]


def _reduce_plain(n: int, op: ReduceOp, value: Any, axis: Axis, what: str) -> Any:
    if n > 1 and op is ReduceOp.SUM:
        raise ValueError(
            f"{what}('sum', …) adds up the components of a PerReplica value, but got {value!r}, which all "
            f"{n} replicas share; it is not clear whether it counts once or {n} times. Use it as it is, multiply it "
            f"by {n}, or reduce with 'mean', which returns it."
        )
    value = as_arrays(value)
    counts = n == 1 and isinstance(value, (jax.Array, np.ndarray)) and value.dtype != jax.dtypes.float0
    kept = jnp.number if op is ReduceOp.SUM else jnp.inexact
    if axis is None and not (counts and not jnp.issubdtype(value.dtype, kept)):
        return value
    array = summable(as_array(value, f"{what}: the value"), op)
    if axis is None:
        return array
    axes = checked_axes(axis, array.shape, "reduce")
    return jnp.mean(array, axes) if op is ReduceOp.MEAN and array.size else jnp.sum(array, axes)


def _reduce_local(
    op: ReduceOp,
    values: list[Any],
    axis: Axis,
    communicator: Communicator,
    options: CommunicationOptions | None,
    what: str,
) -> list[Any]:
    if axis is None:
        return communicator.all_reduce(op, values, options)
    values = [as_array(v, f"{what}: a value") for v in values]
    counts: list[Any] = [{}] * len(values)
    if communicator.examples is not None:
        pairs = [_without_padding(v, axis, communicator) for v in values]
        values, counts = [v for v, _ in pairs], [c for _, c in pairs]
    totals = communicator.all_reduce(ReduceOp.SUM, [_sum_along(v, axis, op)[0] for v in values], options)
    if op is ReduceOp.SUM:
        return totals
    numbers = [_numbers(v, axis, c, communicator) for v, c in zip(values, counts, strict=True)]
    return [_mean(t, n, v.dtype) for t, n, v in zip(totals, numbers, values, strict=True)]


def _reduce_components(op: ReduceOp, values: list[tuple[Any, ...]], axis: Axis, what: str) -> list[Any]:
    results = []
    for components in values:
        arrays = _on_one_device(components, what)
        _check_can_be_reduced([a.shape for a in arrays], axis, what)
        sums, counts = zip(*(_sum_along(a, axis, op) for a in arrays), strict=True)
        total = jnp.sum(jnp.stack(sums), 0)
        results.append(total if op is ReduceOp.SUM else _mean(total, max(1, sum(counts)), arrays[0].dtype))
    return results


def _gather_components(components: tuple[Any, ...], axis: int) -> jax.Array:
    arrays = _on_one_device(components, "strategy.gather")
    _check_can_be_gathered([a.shape for a in arrays], axis)
    return jnp.concatenate(arrays, axis)


def _check_can_be_gathered(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    dims = {checked_axes(axis, shape, "gather")[0] for shape in shapes}
    check_other_dims(shapes, min(dims), "strategy.gather: the components")


def _check_can_be_reduced(shapes: Sequence[tuple[int, ...]], axis: Axis, what: str) -> None:
    along = [() if axis is None else checked_axes(axis, shape, "reduce") for shape in shapes]
    if len({tuple(np.delete(shape, dims)) for shape, dims in zip(shapes, along, strict=True)}) == 1:
        return
    hint = "make them of one rank"
    if len(set(map(len, shapes))) == 1:
        differing = {dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1}
        dims = tuple(sorted(differing.union(*along)))
        hint = f"pass axis={dims[0] if len(dims) == 1 else dims} to strategy.reduce, to reduce along what differs, too"
    given = "" if axis is None else f", and axis={axis} leaves sizes that differ"
    raise ValueError(f"{what}: the components have different shapes {list(shapes)}{given}; {hint}")


def _without_padding(value: Any, axis: Axis, communicator: Communicator) -> tuple[Any, dict[int, Any]]:
    """``value`` with zeros for padding; and for each dim of ``axis``, whether it is the examples', and their number.

    It is not known while tracing which dim is the examples', so each is asked (:mod:`replicax.padding.examples`).
    """
    assert communicator.examples is not None
    mask, count = communicator.examples[:2]
    kept, counts = value, {}
    for dim in checked_axes(axis, value.shape, "reduce") if axis is not None else ():
        is_theirs = communicator.has_examples_along(value, dim, "strategy.reduce")
        padding: Any = True  # of another size: the answer is no, or an error
        if value.shape[dim] == mask.shape[0]:
            padding = ~jnp.expand_dims(mask, [d for d in range(value.ndim) if d != dim])
            counts[dim] = is_theirs, count
        kept = jnp.where(is_theirs & padding, jnp.zeros_like(value), kept)
    return kept, counts


def _numbers(value: Any, axis: Axis, counts: Any, communicator: Communicator) -> Any:
    """For each element of the sum of ``value`` along ``axis``: how many numbers it adds up, on all replicas."""
    axes = () if axis is None else checked_axes(axis, value.shape, "reduce")
    number: Any = max(1, communicator.add_up(math.prod(value.shape[a] for a in axes)))
    for dim, (is_theirs, examples) in counts.items():
        others = math.prod(value.shape[a] for a in axes if a != dim)
        number = jnp.where(is_theirs, jnp.maximum(examples, 1) * others, number)
    return number


def _sum_along(value: Any, axis: Axis, op: ReduceOp) -> tuple[jax.Array, int]:
    """The sum along ``axis``, and how many numbers each of its elements adds up."""
    value = summable(jnp.asarray(value), op)
    if axis is None:
        return value, 1
    axes = checked_axes(axis, value.shape, "reduce")
    if op is ReduceOp.MEAN and value.dtype.itemsize < 4:  # half precision may not hold the sum, nor their number
        value = value.astype(jnp.float32)
    return jnp.sum(value, axes), int(np.prod([value.shape[a] for a in axes]))


def _mean(total: jax.Array, count: Any, dtype: Any) -> jax.Array:
    """The mean of ``count`` values of a dtype."""
    mean = divide(total, count)
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean


def _on_one_device(components: tuple[Any, ...], what: str) -> list[jax.Array]:
    for replica, component in enumerate(components):
        if not isinstance(component, ARRAYS):
            raise TypeError(f"{what}: the component of replica {replica} is not an array: {component!r}")
    first = next((c.devices() for c in components if isinstance(c, jax.Array)), None)
    device = next(iter(first)) if first else None
    return [
        jax.device_put(as_array(c, f"{what}: the component of replica {replica}"), device)
        for replica, c in enumerate(components)
    ]
