"""Collectives over the replicas, as plain functions of one replica's values.

They are for code that runs inside the mesh's replica axis.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.argument_checks import as_integer
from replicax.communication import (
    CommunicationImplementation,
    CommunicationOptions,
    after,
    ring_gather,
    ring_sum,
    watched,
)
from replicax.devices.host_values import as_array, is_key
from replicax.devices.mesh import REPLICA_AXIS, in_logical_mesh
from replicax.devices.summation_order import sum_in_order
from replicax.errors import ContextError

alone_p = _jax.collective_primitive("replicax_alone", lambda *xs: list(xs))
"""The sum over a single replica: its operands, whose locality becomes ``REDUCED``."""

gathered_p = _jax.identity_primitive("replicax_gathered", of_tangents=True)
"""Marks a value gathered from all replicas: its locality is ``REDUCED``; that of its cotangent is not."""

share_back_p = _jax.collective_primitive("replicax_share_back", lambda *xs, **_: list(xs))
"""Marks the cotangent of a share, on its way back to a gradient."""

share_p = _jax.identity_primitive("replicax_share", of_tangents=share_back_p)
"""Marks a replica's share of a value: its locality is ``PER_REPLICA``, even if all shares happen to be equal."""

COMBINED = "a value to combine over the replicas"
"""The name of a value in a message, if no better name is known."""

PACK_LIMIT = 64 * 1024
"""Arrays of at most this many bytes are too small for a separate collective."""


class ReduceOp(enum.Enum):
    """The operation that combines values across replicas. Strings in any case work wherever a ``ReduceOp`` does.

    >>> import replicax
    >>> replicax.ReduceOp.parse("Sum") is replicax.ReduceOp.SUM
    True
    """

    SUM = "sum"
    """Add up."""
    MEAN = "mean"
    """Add up, and divide by the number of values. Integers become floats, as in ``jnp.mean``."""

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Parse a reduce op.

        Raises:
          ValueError: ``op`` is neither a ``ReduceOp`` nor the name of one.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.lower() in {member.value for member in cls}:
            return cls(op.lower())
        hint, name = "", str(getattr(op, "value", op)).lower()
        if extremum := re.match("max|min", name):
            hint = f"; in a step jax.lax.p{extremum[0]}(value, replicax.REPLICA_AXIS)"
        elif name.startswith("only_first"):
            hint = "; 'only_first_replica' is for extended.reduce_to, set_last_step_output and aggregations"
        raise ValueError(f"reduce_op must be 'sum', 'mean' or a ReduceOp, got {op!r}{hint}")


def all_reduce(op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[jax.Array]:
    """Combine each array with the same array of all replicas; every replica gets the results.

    One fused all-reduce for any number of arrays. Booleans count as int32. Each replica differentiates its own loss, so
    the gradient of SUM is SUM, and the gradient of MEAN is MEAN.
    """
    arrays = [summable(as_array(a, COMBINED), op) for a in arrays]
    size = lax.axis_size(REPLICA_AXIS)
    totals = list(sum_over_replicas(arrays, options) if size > 1 else alone_p.bind(*arrays))
    return totals if op is ReduceOp.SUM else [divide(total, size) for total in totals]


def sum_over_replicas(arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[jax.Array]:
    """The sum of each array over the replicas; for several replicas only."""
    return list(all_reduce_p.bind(*arrays, axes=(REPLICA_AXIS,), options=options, per_device=1, in_order=False))


def sums_of(
    *arrays: jax.Array, axes: tuple[str, ...], options: CommunicationOptions | None, per_device: int, in_order: bool
) -> list[jax.Array]:
    """The compiled form of :data:`all_reduce_p`."""
    if in_order:
        return sums_of_blocks([a[None] for a in arrays], options, per_device)
    ring = options is not None and options.implementation is CommunicationImplementation.RING
    rings = functools.partial(_packed, summed=ring_sum)  # a ring has as many steps as there are replicas
    return _sums(arrays, options, per_device, rings if ring else _fused_sums)


def sums_of_blocks(
    arrays: Sequence[jax.Array], options: CommunicationOptions | None, per_device: int
) -> list[jax.Array]:
    """Sums over the replicas in their fixed order, which is the same for all implementations of collectives.

    Each array is ``[blocks, *shape]``, the sums of the blocks of this device's replicas, of which a device has
    ``per_device``.
    """
    one = functools.partial(sum_in_order, replicas=per_device * lax.axis_size(REPLICA_AXIS))
    in_order = functools.partial(_packed, summed=one, terms=1)
    filled = iter(_sums([a for a in arrays if a.size], options, per_device, in_order))
    return [next(filled) if a.size else a[0] for a in arrays]


def _sums(
    arrays: Sequence[jax.Array],
    options: CommunicationOptions | None,
    per_device: int,
    summed_up: Callable[[Sequence[Any]], list[Any]],
) -> list[jax.Array]:
    options = options or CommunicationOptions()
    replicas = (
        None if per_device == 1 else lax.axis_index(REPLICA_AXIS) * per_device + jnp.arange(per_device, dtype=jnp.int32)
    )
    results: list[jax.Array] = []
    # Empty arrays are left out: there is nothing to send, and some compilers fail on them.
    for group in _groups([a for a in arrays if a.size], options.bytes_per_pack):
        if results:  # so that XLA does not merge the groups
            group = [after(group[0], results[-1]), *group[1:]]
        results += watched(group, options.timeout_seconds, summed_up, replicas)
    sums = iter(results)
    return [next(sums) if a.size else a for a in arrays]


def _groups(arrays: Sequence[jax.Array], limit: int) -> list[list[jax.Array]]:
    """``arrays`` in their order, in groups of at most ``limit`` bytes; 0 for no limit."""
    groups: list[list[jax.Array]] = []
    size = 0
    for array in arrays:
        size += array.size * array.dtype.itemsize
        if not groups or (limit and size > limit):
            groups.append([])
            size = array.size * array.dtype.itemsize
        groups[-1].append(array)
    return groups


def packs(arrays: Sequence[Any], limit: float) -> tuple[list[list[int]], list[int]]:
    """Choose arrays to concatenate: for each dtype those of at most ``limit`` bytes, if there are several.

    Returns the positions of the members of each pack, and the positions of the other arrays. If a replica has several
    logical devices, there are no packs: an array that is split over these would have to be gathered first.
    """
    if in_logical_mesh():
        return [], list(range(len(arrays)))
    small: dict[Any, list[int]] = {}
    for i, a in enumerate(arrays):
        if a.size * a.dtype.itemsize <= limit:
            small.setdefault(a.dtype, []).append(i)
    groups = [members for members in small.values() if len(members) > 1]
    packed = {i for members in groups for i in members}
    return groups, [i for i in range(len(arrays)) if i not in packed]


def _fused_sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """One all-reduce, which compilers merge themselves."""
    return list(lax.psum(tuple(arrays), REPLICA_AXIS))


def _packed(arrays: Sequence[jax.Array], summed: Callable[[Any], Any], terms: int = 0) -> list[jax.Array]:
    """``summed`` of each array, with all arrays of a dtype concatenated: for sums that compilers don't merge.

    An array is ``[…terms, …shape]``, with so many dims of ``terms``; ``summed`` returns ``[…shape]``.
    """
    results: list[Any] = [None] * len(arrays)
    groups, whole = packs(arrays, math.inf)
    for i in whole:
        results[i] = summed(arrays[i])
    for members in groups:
        flat = [arrays[i].reshape(*arrays[i].shape[:terms], -1) for i in members]
        total = summed(jnp.concatenate(flat, axis=terms))
        parts = lax.split(total, [each.shape[terms] for each in flat])
        for i, part in zip(members, parts, strict=True):
            results[i] = part.reshape(arrays[i].shape[terms:])
    return results


all_reduce_p = _jax.collective_primitive("all_reduce", sums_of)
"""``y, … = all_reduce[axes=… options=… per_device=… in_order=…] x, …``: ``y`` is the sum of ``x`` over the replicas.

If a device has several replicas, ``x`` contains all of theirs, and ``per_device`` is their number.
``in_order`` says whether terms are added in a fixed order (see :mod:`replicax.devices.summation_order`).

It is lowered only when the whole program is known: if a replica needs only a piece of the sum, it becomes a
reduce-scatter (see :mod:`replicax.execution.compiled.split_variables`).
"""


own_sum_p = _jax.collective_primitive("replicax_own_sum", sums_of)
"""The same as :data:`all_reduce_p` for those operands that have not been reduced; the others are returned unchanged.

Captured programs do not contain it: :mod:`replicax.execution.program.infer` replaces it by all-reduces.
"""


def sum_unless_reduced(arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[jax.Array]:
    """The sum over the replicas of each array, unless it is reduced already (one fused all-reduce)."""
    arrays = [summable(as_array(a, COMBINED)) for a in arrays]
    if lax.axis_size(REPLICA_AXIS) == 1:
        return list(alone_p.bind(*arrays))
    return list(own_sum_p.bind(*arrays, axes=(REPLICA_AXIS,), options=options, per_device=1, in_order=False))


def all_gather(array: Any, axis: int, options: CommunicationOptions | None = None) -> jax.Array:
    """Concatenate the replicas' arrays along ``axis``; every replica gets the whole (one all-gather).

    Gradient: the slice at this replica's place, summed over all replicas' losses.
    """
    options = options or CommunicationOptions()
    array = as_array(array, COMBINED)
    axis = checked_axes(axis, array.shape, "all_gather")[0]
    size = lax.axis_size(REPLICA_AXIS)
    if array.size == 0:  # XLA has no collectives for empty arrays
        shape = (*array.shape[:axis], size * array.shape[axis], *array.shape[axis + 1 :])
        return gathered_p.bind(jnp.zeros(shape, array.dtype))[0]
    if size == 1:
        return gathered_p.bind(array)[0]

    def gather(arrays: Sequence[Any]) -> list[Any]:
        if options.implementation is CommunicationImplementation.RING:
            return [ring_gather(arrays[0], axis)]
        return [lax.all_gather(arrays[0], REPLICA_AXIS, axis=axis, tiled=True)]

    if options == CommunicationOptions():
        return gather([array])[0]
    # The result of a ring is the same on every replica, but no analysis could infer that, hence the mark.
    return gathered_p.bind(watched([array], options.timeout_seconds, gather)[0])[0]


def from_first(array: Any, options: CommunicationOptions | None = None) -> jax.Array:
    """Replica 0's array on every replica (one all-reduce: the others contribute zeros)."""
    array = as_array(array, COMBINED)
    if lax.axis_size(REPLICA_AXIS) == 1:
        return gathered_p.bind(array)[0]
    if is_key(array.dtype):
        return of_key_data(lambda data: from_first(data, options), array)
    mine = lax.axis_index(REPLICA_AXIS) == 0
    kept = jnp.where(mine, summable(array), jnp.zeros_like(summable(array)))
    return sum_over_replicas([kept], options)[0].astype(array.dtype)


def of_key_data(fn: Callable[[jax.Array], Any], keys: jax.Array) -> jax.Array:
    """The random keys whose numbers ``fn`` makes from those of ``keys``."""
    return jax.random.wrap_key_data(fn(jax.random.key_data(keys)), impl=jax.random.key_impl(keys))


def divide(total: jax.Array, count: Any) -> jax.Array:
    """``total / count`` in the dtype of ``total``, or a float dtype if it is an integer."""
    dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else jnp.result_type(float)
    return total.astype(dtype) / jnp.asarray(count, dtype)


def parse_axis(axis: Any) -> int | tuple[int, ...] | None:
    """``axis`` as an int, a tuple of ints or ``None``; a ValueError for anything else."""
    if axis is None:
        return None
    given = axis if isinstance(axis, Sequence) else (axis,)
    axes = [integer for a in given if (integer := as_integer(a)) is not None]
    if len(axes) < len(given):
        raise ValueError(f"axis must be an int, a tuple of ints or None, got {axis!r}")
    return tuple(axes) if given is axis else axes[0]


def checked_axis(axis: Any, what: str) -> int:
    """``axis`` as an int; a ValueError that begins with ``what`` for anything else."""
    integer = as_integer(axis)
    if integer is None:
        raise ValueError(f"{what}: axis must be an int, got {axis!r}")
    return integer


def checked_axes(axis: int | Sequence[int], shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    """``axis`` as non-negative dims of ``shape``; a ValueError if one is out of range or named twice."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -len(shape) <= a < len(shape):
            raise ValueError(
                f"{what}: axis {a} is out of range for a value of shape {shape} on each replica"
                + ("" if shape else "; a scalar has no axis: ")
                + ("" if shape else "pass axis=None" if what == "reduce" else "add a dim first, with jnp.atleast_1d")
            )
    normal = tuple(a % len(shape) for a in axes)
    if len(set(normal)) != len(normal):
        raise ValueError(f"{what}: axis {axis!r} names a dim of shape {shape} twice")
    return normal


def check_other_dims(shapes: Sequence[tuple[int, ...]], axis: int, what: str) -> None:
    """Raise a ValueError if arrays of these shapes, ``what``, can't be concatenated along ``axis``."""
    others = [(len(shape), shape[:axis], shape[axis + 1 :]) for shape in shapes]
    if any(other != others[0] for other in others):
        sizes = zip(*shapes, strict=True) if len(set(map(len, shapes))) == 1 else ()
        differing = [dim for dim, its in enumerate(sizes) if len(set(its)) > 1]
        hint = f": join them along dim {differing[0]}" if len(differing) == 1 else ""
        raise ValueError(f"{what} may differ in dim {axis} only, but have shapes {list(shapes)}{hint}")


def summable(array: jax.Array, op: ReduceOp = ReduceOp.SUM) -> jax.Array:
    """``array`` as it is added up: booleans as int32; for MEAN these and integers as floats, as in ``jnp.mean``."""
    if is_key(array.dtype):
        raise TypeError(
            "random keys can't be added up or averaged over the replicas: combine the numbers that are drawn from "
            "them, or take the first replica's keys, with 'only_first_replica' (extended.reduce_to, aggregation)"
        )
    is_bool = array.dtype == jnp.bool_
    if op is ReduceOp.MEAN and (is_bool or jnp.issubdtype(array.dtype, jnp.integer)):
        return array.astype(jnp.result_type(float))
    return array.astype(jnp.int32) if is_bool else array


# --- communication of one replica -----------------------------------------------------------------------


class ReplicaExamples(NamedTuple):
    """The examples of a padded batch, inside a step."""

    mask: Any
    """Its rows that are examples: bool ``[rows]``, per replica."""
    count: Any
    """The number of examples of all replicas: int32, mirrored; an int where it is known while the step is traced."""
    parts: int = 1
    """The number of micro-batches of which these are one."""
    part: Any = 0
    """The number of this micro-batch: int32, mirrored."""


class Communicator(Protocol):
    """Communicates with the other replicas. Each executor has its own."""

    @property
    def examples(self) -> ReplicaExamples | None:
        """The examples among the rows; ``None`` if no argument of the step is padded."""

    def replica_id(self) -> Any:
        """This replica's number: an int32 scalar, or an int."""

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Combine each array with the same array of all replicas."""

    def sum_unless_reduced(self, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """The sum over the replicas of each array; one that has been reduced already is returned unchanged."""

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the replicas' arrays along ``axis``."""

    def from_first(self, array: Any) -> Any:
        """Replica 0's array."""

    def add_up(self, count: int) -> int:
        """The sum of the replicas' counts, such as the sizes of their batches; a compiled step needs no collective."""

    def has_examples_along(self, value: Any, dim: int, what: str, **errors: str) -> Any:
        """Whether the examples of a padded batch lie along ``dim`` of ``value``: a bool, known before the step runs.

        Raises an error that names the caller ``what`` if it can't be known. With ``error_if_so``, raises an error with
        this text if they do. With ``error_if_not``, raises one if they surely don't, each in its row, and only then.
        """

    def components(self, value: Any) -> Sequence[Any]:
        """Every replica's value, in the order of the replicas."""

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)`` in cross-replica context, once for all replicas."""


class SingleReplica:
    """The communicator of a single replica: every collective returns its operand."""

    examples: ReplicaExamples | None = None

    def replica_id(self) -> Any:
        return 0

    def _own(self, array: Any) -> jax.Array:
        if isinstance(array, jax.core.Tracer) and _jax.current_trace() is _jax.eval_trace():
            raise ContextError(
                "a collective was called on a value of a step, but outside it: a thread that a step starts is outside "
                "the step, so call collectives in the thread that runs the step"
            )
        return jnp.asarray(array)

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        totals = [summable(self._own(a)) for a in arrays]
        return totals if op is ReduceOp.SUM else [divide(total, 1) for total in totals]

    def sum_unless_reduced(self, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        return self.all_reduce(ReduceOp.SUM, arrays, options)

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        array = self._own(array)
        checked_axes(axis, array.shape, "all_gather")
        return array

    def from_first(self, array: Any) -> Any:
        return array

    def add_up(self, count: int) -> int:
        return count

    def has_examples_along(self, value: Any, dim: int, what: str, **errors: str) -> Any:
        return self.examples is not None and value.shape[dim] == self.examples.mask.shape[0]

    def components(self, value: Any) -> Sequence[Any]:
        return [value]

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)


def mask_of_rows(values: Any, communicator: Communicator, what: str) -> Any:
    """Which rows of ``values`` are examples of the padded batch: bool ``[rows]``.

    Raises a ValueError if the values, which it calls ``what``, surely don't have the batch's rows in their order.
    """
    examples = communicator.examples
    assert examples is not None
    rows = examples.mask.shape[0]
    kind = "padded to" if examples.parts == 1 else "a micro-batch of accumulated gradients, of"
    text = (
        f"{what} must have an entry for each row of the batch, which is {kind} {rows} rows, in their order, "
        "got {}: padding could not be left out. Reduce within each example only (reshape losses of tokens to [batch, "
        "time]), and don't move rows; or reduce them yourself, with replicax.get_replica_context().example_mask."
    )
    if values.shape[0] != rows:
        raise ValueError(text.format(f"shape {values.shape}"))
    moved = text.format("rows in another order, such as sorted or flipped ones, or along another dim")
    return examples.mask & communicator.has_examples_along(values, 0, what, error_if_not=moved)
