"""``IndexedSlices``: a sparse update, some rows of a large array."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.devices.host_values import as_array


@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Some rows of an array, and their indices: the gradient of a lookup, without the zeros of all other rows.

    If an index occurs twice, both rows count; a negative index counts from the end. An index out of range is an error
    if its value is known: in a list or NumPy array, or when a variable is changed outside a step. If a step
    computes the index, its row is left out, as in JAX (``.at[i].add``).

    Replicas may hold different rows, and different numbers of rows. A reduction by ``all_reduce``,
    ``Strategy.reduce``, ``extended.reduce_to`` or ``Optimizer.apply_gradients`` gathers the rows of all replicas and
    never makes the dense array: two all-gathers of the rows instead of an all-reduce of the array. It is a
    pytree of ``values`` and ``indices``.

    Attributes:
      values: the rows, ``[k, *shape[1:]]``.
      indices: their indices, ``[k]``, integers.
      shape: of the dense array.

    Raises:
      ValueError: rows, indices and shape do not fit together; a row is out of range.

    >>> import replicax, jax.numpy as jnp
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     table = replicax.Variable(jnp.zeros((5, 2)), name="table", aggregation="sum")
    >>> def step(row):
    ...     table.scatter_add(replicax.IndexedSlices(jnp.ones((1, 2)), row[None], table.shape))
    >>> row = strategy.distribute_values_from_function(lambda ctx: 3 * ctx.replica_id_in_sync_group)
    >>> strategy.run(step, args=(row,)), table.numpy()[:, 0].tolist()
    (None, [1.0, 0.0, 0.0, 1.0, 0.0])
    """

    values: Any
    indices: Any
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list):
            raise TypeError(
                f"IndexedSlices: shape must be that of the whole array, a tuple of ints, got {self.shape!r}"
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.indices, (list, tuple, np.ndarray)):
            check_rows(self.indices, self.shape, "IndexedSlices")
        for name in ("values", "indices"):
            if isinstance(getattr(self, name), (list, tuple, np.ndarray)):
                object.__setattr__(self, name, as_array(getattr(self, name), f"IndexedSlices: {name}"))
        values, indices = (getattr(x, "shape", None) for x in (self.values, self.indices))
        if values is None or indices is None:  # PerReplica values, outside a step
            return
        if not self.shape or len(indices) != 1 or tuple(values) != (indices[0], *self.shape[1:]):
            row = ", ".join(["k", *map(str, self.shape[1:])])
            raise ValueError(
                f"IndexedSlices: for an array of shape {self.shape} the values must have shape [{row}] and the "
                f"indices [k], got {list(values)} and {list(indices)}"
            )
        if not jnp.issubdtype(self.indices.dtype, jnp.integer):
            raise ValueError(f"IndexedSlices: indices must be integers, got {self.indices.dtype}")

    def to_dense(self) -> jax.Array:
        """The dense array, with zeros in all other rows."""
        return jnp.zeros(self.shape, self.values.dtype).at[self.indices].add(self.values)


def _unflatten(shape: tuple[int, ...], children: Any) -> IndexedSlices:
    """Create it without checks: a transformation may have changed the leaves, as ``vmap`` does by adding a dim."""
    slices = object.__new__(IndexedSlices)
    for name, value in zip(("values", "indices", "shape"), (*children, shape), strict=True):
        object.__setattr__(slices, name, value)
    return slices


jax.tree_util.register_pytree_with_keys(
    IndexedSlices,
    lambda s: (
        ((jax.tree_util.GetAttrKey("values"), s.values), (jax.tree_util.GetAttrKey("indices"), s.indices)),
        s.shape,
    ),
    _unflatten,
)


def check_rows(indices: Any, shape: Any, where: str) -> None:
    """Raise a ValueError if ``indices``, whose values are known, are not rows of an array of ``shape``."""
    rows = np.asarray(indices)
    if not rows.size or not len(shape) or rows.dtype.kind not in "iu":
        return  # other errors are reported elsewhere
    count = int(shape[0])
    if rows.min() < -count or rows.max() >= count:
        place = np.argwhere((rows < -count) | (rows >= count))[0].tolist()
        raise ValueError(
            f"{where}: the index {rows[tuple(place)]} at {place} is out of range for an array of shape {tuple(shape)}, "
            f"which has the rows 0 to {count - 1}"
        )


def is_slices(value: Any) -> bool:
    """Whether ``value`` is an :class:`IndexedSlices`."""
    return isinstance(value, IndexedSlices)
