"""Batches: those of Keras' loop, divided over the replicas."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse

from replicax.data.elements.batch_rows import BatchRows
from replicax.data.elements.chunks import Staged
from replicax.data.elements.elements import Element
from replicax.data.elements.to_devices import placer
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.nests import known
from replicax.workers.replicas import Replicas

_AS_THEY_ARE = frozenset(map(np.dtype, (bool, np.uint8, np.int8, np.int32, np.uint32, np.float16, np.float32)))
"""Dtypes of the host that are those of devices, whatever JAX's settings, so that no number can be out of range."""
_ARRAYS_OF_HOST = {np.ndarray}


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch as the replicas have it.

    Attributes:
      data: what Keras gives a step: ``(x, y, sample_weight)``, with an end that may be missing.
      sizes: how many rows each replica has.
      copies: how many replicas have the same rows: 1, or all of them.
    """

    data: Any
    sizes: tuple[int, ...]
    copies: int

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return sum(self.sizes) // self.copies

    @property
    def own_rows(self) -> int:
        """How many rows this replica has, of whose arrays ``data`` consists."""
        return int(jax.tree_util.tree_leaves(self.data)[0].shape[0])


jax.tree_util.register_dataclass(Batch, data_fields=["data"], meta_fields=["sizes", "copies"])


def sizes_of(rows: int, replicas: int) -> tuple[tuple[int, ...], int]:
    """How many rows each replica gets of a batch, and how many replicas get the same.

    They get as many each as they can. A batch of fewer rows than replicas is given to all of them whole: without rows a
    replica's layers would compute means of nothing.

    >>> from replicax.models.keras.divided_batches import sizes_of
    >>> sizes_of(8, 4), sizes_of(6, 4), sizes_of(3, 4)
    (((2, 2, 2, 2), 1), ((2, 2, 1, 1), 1), ((3, 3, 3, 3), 4))
    """
    if rows < replicas:
        return (rows,) * replicas, replicas
    each, more = divmod(rows, replicas)
    return tuple(each + (i < more) for i in range(replicas)), 1


class Feed:
    """Puts batches on the devices of ``replicas``."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._place: Callable[[Element | Staged], Any] | None = None
        self._kinds: dict[Any, tuple[tuple[int, ...], int, Any]] = {}

    def kind(self, data: Any) -> tuple[Any, list[Any]]:
        """What batches must have in common to be run by the same program of one replica, and the arrays of this one.

        The kind is ``None`` if its arrays have to be looked at.
        """
        leaves, (*_, structure) = self._taken_apart(data)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return (structure, kinds) if all(dtype in _AS_THEY_ARE for _, dtype in kinds) else None, leaves

    def batch(self, data: Any) -> Batch:
        """One batch, of ``PerReplica`` arrays (with one replica, of plain ones)."""
        leaves, (sizes, copies, structure) = self._taken_apart(data)
        if self._replicas.count == 1:
            alone: Batch = jax.tree_util.tree_unflatten(structure, leaves)  # the program's call takes them as they are
            return alone
        placed: Batch = self._placer(self._element(leaves, sizes, copies, structure))
        return placed

    def groups(self, batches: Sequence[Any]) -> list[ElementGroup | Single]:
        """Some batches, as groups of those that one program can go through."""
        groups: list[ElementGroup | Single] = []
        for members, kind in self._runs(batches):
            sizes, copies, structure = kind
            columns = list(zip(*members, strict=True))
            if len(set(sizes)) == 1:
                groups.append(self._placer(_StagedBatches(columns, sizes, copies, structure, self._replicas.local)))
            else:
                groups += [Single(self._placer(self._element(leaves, *kind))) for leaves in members]
        return groups

    def _runs(self, batches: Sequence[Any]) -> list[tuple[list[list[Any]], tuple[tuple[int, ...], int, Any]]]:
        """Neighbours of one kind: the arrays of each, and how they are taken apart, which is found out once for all."""
        runs: list[tuple[list[list[Any]], tuple[tuple[int, ...], int, Any]]] = []
        before: list[Any] | None = None
        for data in batches:
            leaves, tree = jax.tree_util.tree_flatten(data)
            if set(map(type, leaves)) != _ARRAYS_OF_HOST:
                leaves, _ = self._taken_apart(data)
            like = [tree, *[leaf.shape for leaf in leaves], *[leaf.dtype for leaf in leaves]]
            if like != before:
                leaves, kind = self._taken_apart(data)
                runs.append(([], kind))
                before = like
            runs[-1][0].append(leaves)
        return runs

    @property
    def _placer(self) -> Callable[[Element | Staged], Any]:
        if self._place is None:
            self._place = placer(self._replicas)
        return self._place

    def _taken_apart(self, data: Any) -> tuple[list[Any], tuple[tuple[int, ...], int, Any]]:
        """The arrays of a batch; how many rows each replica gets, how many get the same, and the structure."""
        leaves, tree = jax.tree_util.tree_flatten(data)
        lengths = {len(leaf) if type(leaf) is np.ndarray and leaf.ndim else None for leaf in leaves}
        key = tree, *lengths
        kind = self._kinds.get(key)
        if kind is None:
            rows = _rows(data)
            leaves, tree = jax.tree_util.tree_flatten(known(data))
            sizes, copies = sizes_of(rows, self._replicas.count)
            whole = Batch(jax.tree_util.tree_unflatten(tree, leaves), sizes, copies)
            kind = sizes, copies, jax.tree_util.tree_structure(whole)
            if len(lengths) == 1 and None not in lengths:  # else it is looked at each time
                self._kinds[key] = kind
        return [leaf if type(leaf) is np.ndarray else np.asarray(leaf) for leaf in leaves], kind

    def _element(self, leaves: Sequence[Any], sizes: tuple[int, ...], copies: int, structure: Any) -> Element:
        batch = BatchRows(list(leaves), sum(sizes) // copies)
        if copies > 1:
            parts = [batch for _ in self._replicas.local]
        else:
            starts = list(itertools.accumulate(sizes, initial=0))
            parts = [batch.part(starts[i], sizes[i]) for i in self._replicas.local]
        return Element(structure, parts, sizes, len(set(sizes)) == 1)


class _StagedBatches(Staged):
    """Batches of one kind, in arrays ``[this worker's replicas, batches, …]`` on the host.

    Args:
      columns: for each leaf, that of each batch.
      sizes: how many rows each replica gets.
      copies: how many replicas get the same.
      structure: of a batch.
      local: the numbers of this worker's replicas.
    """

    def __init__(
        self, columns: Sequence[Any], sizes: tuple[int, ...], copies: int, structure: Any, local: Sequence[int]
    ) -> None:
        self.tree = structure
        self.is_padded = False
        self.sizes = [sizes] * len(columns[0])
        self._buffers = []
        for column in columns:
            count, shape = len(column), column[0].shape
            rows = np.concatenate(column)  # the one copy that is needed: the dataset may fill its buffers again
            if copies > 1:
                parts = np.broadcast_to(rows.reshape(1, count, *shape), (len(local), count, *shape))
            else:
                parts = rows.reshape(count, len(sizes), sizes[0], *shape[1:]).swapaxes(0, 1)
                if len(sizes) > 1:
                    parts = parts[list(local)]
            self._buffers.append(parts)


def _rows(data: Any) -> int:
    """How many rows a batch has.

    Raises:
      ValueError: it is not of dense arrays that have all the same dim 0.
    """
    leaves = jax.tree_util.tree_leaves(data, is_leaf=_is_sparse)
    dense = all(isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim for leaf in leaves)
    if dense and len({leaf.shape[0] for leaf in leaves}) == 1:
        return int(leaves[0].shape[0])
    found = jax.tree_util.tree_flatten_with_path(data, is_leaf=_is_sparse)[0]
    shown = ", ".join(f"batch{jax.tree_util.keystr(path)}: {_described(leaf)}" for path, leaf in found)
    raise ValueError(
        "a batch is divided over the replicas by its rows, so it must consist of dense arrays with the same dim 0; got "
        f"{shown or 'no array'}. Have the dataset give such arrays."
    )


def _is_sparse(value: Any) -> bool:
    """Whether it is a sparse array, which is a tree of arrays to JAX."""
    return isinstance(value, JAXSparse)


def _described(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | jax.Array):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}"


class Group:
    """The elements of one call of ``run_steps``; see :class:`replicax.execution.many_steps.loop.StepSource`."""

    def __init__(self, groups: list[ElementGroup | Single]) -> None:
        self._groups = groups

    def take(self, steps: int, staged: bool) -> tuple[list[ElementGroup | Single], Exception | None]:
        """All of them."""
        return self._groups, None

    def give_back(self, groups: Sequence[ElementGroup | Single]) -> None:
        """What has not been run is lost, as in Keras' own loop."""


def taken(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next batches of Keras' loop, at least one and at most ``count``.

    Raises:
      StopIteration: there is none.
    """
    batches = [next(iterator)]
    while len(batches) < count:
        try:
            batches.append(next(iterator))
        except StopIteration:
            break
    return batches
