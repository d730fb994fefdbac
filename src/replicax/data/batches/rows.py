"""Batches as rows on the host: checks, divides and pads them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax.argument_checks import check_unmasked
from replicax.devices.host_values import check_integers, check_no_keys
from replicax.execution.replica_values import ARRAYS
from replicax.pytrees import registered

Leaf = tuple[tuple[int, ...], Any]
"""Shape of one row (of the whole array, if there are no rows), and dtype."""


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """Rows of a batch; or one example, whose arrays have no rows."""

    leaves: list[Any]  # arrays ``[size, …]``; for one example of any shape
    size: int  # the number of rows
    is_example: bool = False  # whether it is one example, which is never divided

    @property
    def nbytes(self) -> int:
        """The memory of the rows, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def part(self, start: int, size: int) -> BatchRows:
        """``size`` rows, starting at ``start``."""
        if size == self.size and not start:
            return self
        return BatchRows([leaf[start : start + size] for leaf in self.leaves], size)

    def cut(self, sizes: Sequence[int]) -> list[BatchRows]:
        """Parts of these sizes, starting at the first row."""
        starts = itertools.accumulate(sizes, initial=0)
        return [self.part(start, size) for start, size in zip(starts, sizes, strict=False)]

    def kinds(self) -> tuple[Leaf, ...]:
        """Shape of a row and dtype of each leaf."""
        start = 0 if self.is_example else 1
        return tuple((leaf.shape[start:], leaf.dtype) for leaf in self.leaves)


def no_rows(kinds: Sequence[Leaf]) -> BatchRows:
    """The rows of a replica that gets none."""
    return BatchRows([np.zeros((0, *shape), dtype) for shape, dtype in kinds], 0)


def rows_per_replica(rows: int, replicas: int) -> list[int]:
    """Divide ``rows`` among replicas: the first ones get equally many, the last ones the rest, perhaps none.

    >>> rows_per_replica(5, 4)
    [2, 2, 1, 0]
    """
    fill = -(-rows // replicas)
    return [min(fill, max(0, rows - i * fill)) for i in range(replicas)]


def own_rows(rows: int, replicas: int, mine: range) -> tuple[int, int]:
    """The first row of the replicas ``mine`` in a batch of ``rows``, and the number of their rows."""
    split = rows_per_replica(rows, replicas)
    return sum(split[: mine.start]), sum(split[mine.start : mine.stop])


class Filler:
    """Pads batches with real rows.

    For these a model computes nothing that it would not compute anyway. Zeros might give a NaN, which would spoil the
    gradients although padding has no part in the loss.
    """

    def __init__(self) -> None:
        self._spare: BatchRows | None = None  # a row for replicas that have none

    def filled(self, parts: Sequence[BatchRows], rows: int) -> list[Any]:
        """Return, for each leaf, an array ``[len(parts), rows, …]`` of the parts, each padded with its last row.

        A part without rows is padded with the last row of another replica, now or before; with zeros if there was none.
        """
        having = next((part for part in parts if part.size), None)
        if having is not None:
            row = having.part(having.size - 1, 1)
            # A copy, because the dataset may fill its buffers again.
            self._spare = BatchRows([np.array(leaf) for leaf in row.leaves], 1)
        spare = self._spare
        fits = spare is not None and spare.kinds() == parts[0].kinds()
        fills = spare.leaves if spare is not None and fits else [0] * len(parts[0].leaves)
        stacks = []
        for leaves, fill in zip(zip(*(part.leaves for part in parts), strict=True), fills, strict=True):
            stack = np.zeros((len(parts), rows, *leaves[0].shape[1:]), leaves[0].dtype)
            for slot, leaf in zip(stack, leaves, strict=True):
                slot[: len(leaf)] = leaf
                slot[len(leaf) :] = slot[len(leaf) - 1] if len(leaf) else fill
            stacks.append(stack)
        return stacks


class Checker:
    """Takes batches apart, and checks that each is like the first; or ``examples``, whose arrays need have no rows.

    Messages name the number of ``replicas`` and the ``source``, a description of the dataset.
    """

    def __init__(self, replicas: int, examples: bool, source: str) -> None:
        self._replicas = replicas
        self._source = source
        self._examples = examples
        self._first: list[tuple[int, np.dtype[Any]]] = []
        self.tree: Any = None
        # The dtypes of the thread that created this object, not of the thread that makes the elements.
        self._narrowed = {d: jax.dtypes.canonicalize_dtype(d) for d in (np.dtype(np.int64), np.dtype(np.uint64))}
        self._wide: list[tuple[int, str, Any]] = []  # leaves that get a narrower dtype: position, name, that dtype

    def rows(self, batch: Any, where: str) -> BatchRows:
        """The rows of ``batch``."""
        leaves, tree = jax.tree_util.tree_flatten(registered(batch))
        usual = self.tree is not None and tree == self.tree and all(map(_is_like, leaves, self._first))
        if not usual or (not self._examples and len({len(leaf) for leaf in leaves}) > 1):
            self._check(batch, where)  # slow, with names for messages
        for position, name, dtype in self._wide:
            check_integers(leaves[position], where + name, dtype)
        arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
        return BatchRows(arrays, 1, True) if self._examples else BatchRows(arrays, arrays[0].shape[0])

    def _check(self, batch: Any, where: str) -> None:
        paths, tree = jax.tree_util.tree_flatten_with_path(registered(batch))
        if not paths:
            raise ValueError(f"{where} is {batch!r}, in which there are no arrays")
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [self._array(leaf, where + name) for name, (_, leaf) in zip(names, paths, strict=True)]
        scalars = [where + name for name, leaf in zip(names, leaves, strict=True) if leaf.ndim == 0]
        if scalars and not self._examples:
            raise ValueError(self._about_scalars(batch, where, scalars, whole=len(scalars) == len(leaves)))
        if not self._examples:
            sizes = {where + name: leaf.shape[0] for name, leaf in zip(names, leaves, strict=True)}
            if len(set(sizes.values())) > 1:
                raise ValueError(
                    f"all arrays of a batch must have the same dim 0, one row for each example, got {sizes}. If each "
                    "replica takes arrays of several sizes whole, such as a padded graph, give them a dim more: stack "
                    "one for each replica, and take x[0] of each array in the step"
                )
        self._check_like_first(tree, names, leaves, where)

    def _array(self, leaf: Any, name: str) -> Any:
        if not isinstance(leaf, ARRAYS):
            raise TypeError(f"{name} is {type(leaf).__name__} {leaf!r}; a batch is a pytree of arrays")
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        check_no_keys(array, name)
        check_unmasked(leaf, name)
        if not _is_numeric(array.dtype):
            raise TypeError(
                f"{name} is an array of dtype {array.dtype}, which is not an array of numbers: make numbers of it in "
                "the dataset (Grain's map), before it is distributed"
            )
        return array

    def _about_scalars(self, batch: Any, where: str, names: list[str], whole: bool) -> str:
        """The remedy for scalars in a batch, or for a batch that is ``whole``, only scalars."""
        from replicax.data.reading.sources import ARRAYS_AS_DATASET  # loads Grain

        name, what = names[0], "a scalar"
        nodes = jax.tree_util.tree_flatten_with_path(registered(batch), is_leaf=_is_list_of_scalars)[0]
        lists = [where + jax.tree_util.keystr(path) for path, node in nodes if _is_list_of_scalars(node)]
        if self._source == ARRAYS_AS_DATASET:
            cure = (
                "the dataset is a pytree of arrays, and each of its slices along dim 0 is a batch; for batches of n "
                "rows pass strategy.make_numpy_dataset((x, y)).batch(n) instead"
            )
        elif lists:
            name, what, cure = lists[0], "a list, which is a pytree of scalars,", "make an array of it, with np.asarray"
        elif whole:
            cure = "batch the dataset by the global batch first"
        else:
            cure = (
                "if the dataset has examples, batch it by the global batch first; what is the same for all examples "
                "goes to the step as an argument of its own, strategy.run(step, args=(batch, scalar)); a number for "
                "each example is an array with a row for each"
            )
        return f"{name} is {what} and can't be divided over {self._replicas} replica(s): {cure}"

    def _check_like_first(self, tree: Any, names: list[str], leaves: list[Any], where: str) -> None:
        kinds = [(leaf.ndim, leaf.dtype) for leaf in leaves]
        if self.tree is None:
            self.tree, self._first = tree, kinds
            narrowed = [self._narrowed.get(leaf.dtype, leaf.dtype) for leaf in leaves]
            self._wide = [(i, names[i], d) for i, d in enumerate(narrowed) if d != leaves[i].dtype]
        if tree != self.tree:
            raise TypeError(f"{where} has another structure than the first: expected {self.tree}, got {tree}")
        for name, leaf, first, kind in zip(names, leaves, self._first, kinds, strict=True):
            if kind != first:
                expected = f"{first[1].name} of rank {first[0]}"
                raise TypeError(
                    f"{where}{name} is {leaf.dtype.name}{list(leaf.shape)}, but was {expected} in the first element: "
                    "all elements of a dataset must have the same dtypes and ranks"
                )


def _is_list_of_scalars(node: Any) -> bool:
    return isinstance(node, list) and {np.ndim(leaf) for leaf in jax.tree.leaves(node)} == {0}


def _is_like(leaf: Any, kind: tuple[int, Any]) -> bool:
    is_array = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, np.ma.MaskedArray)
    return is_array and (leaf.ndim, leaf.dtype) == kind


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether NumPy and JAX both have arrays of this dtype."""
    is_number = dtype == np.bool_ or bool(jax.numpy.issubdtype(dtype, np.number))
    return is_number and dtype.char not in "gGmM"  # long doubles, times
