"""Divides the batches of Keras' loop over the replicas."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse

from replicax.data.batches.local_batches import BatchGroup, HostBatch
from replicax.data.batches.rows import BatchRows
from replicax.data.batches.to_devices import placer
from replicax.devices.host_values import own_copy, room_for
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.pytrees import registered
from replicax.workers.replicas import Replicas

_AS_THEY_ARE = frozenset(map(np.dtype, (bool, np.uint8, np.int8, np.int32, np.uint32, np.float16, np.float32)))
"""Host dtypes that devices have with any JAX settings, so that no number can be out of range."""
_flatten = jax.tree_util.default_registry.flatten  # called by jax.tree_util.tree_flatten


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch, divided over the replicas."""

    data: Any  # the arguments that Keras gives a step: ``(x, y, sample_weight)``, perhaps without the last ones
    sizes: tuple[int, ...]  # the number of rows of each replica
    copies: int  # the number of replicas with the same rows: 1, or all of them

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return sum(self.sizes) // self.copies

    @property
    def own_rows(self) -> int:
        """The number of this replica's rows, which are the content of ``data``."""
        return int(jax.tree_util.tree_leaves(self.data)[0].shape[0])


jax.tree_util.register_dataclass(Batch, data_fields=["data"], meta_fields=["sizes", "copies"])


def sizes_of(rows: int, replicas: int) -> tuple[tuple[int, ...], int]:
    """The number of rows of each replica, and the number of replicas with the same rows.

    Rows are divided as evenly as possible. If a batch has fewer rows than there are replicas, each replica gets all of
    it: without rows a replica's layers would compute means of nothing.

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
        self._kinds: dict[Any, tuple[tuple[int, ...], int, Any]] = {}

    def kind(self, data: Any) -> tuple[Any, list[Any]]:
        """The properties that batches for the same program must share, and the arrays of a batch with one replica.

        The arrays are copies, as the dataset may fill its own again before the program begins. The kind is ``None`` if
        the arrays need a check first.
        """
        leaves, (*_, structure) = self._taken_apart(data)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        is_known = all(dtype in _AS_THEY_ARE for _, dtype in kinds)
        return (structure, kinds) if is_known else None, list(map(own_copy, leaves))

    def batch(self, data: Any) -> Batch:
        """Convert a batch to ``PerReplica`` arrays (with one replica, to plain ones)."""
        leaves, (sizes, copies, structure) = self._taken_apart(data)
        if self._replicas.num_replicas == 1:
            return jax.tree_util.tree_unflatten(structure, leaves)  # the program takes host arrays
        return self._placer(self._element(leaves, sizes, copies, structure))

    def groups(self, batches: Iterable[Any], room: int) -> list[ElementGroup | Single]:
        """Divide at most ``room`` batches into groups that one program can process."""
        groups: list[ElementGroup | Single] = []
        for run in self._runs(batches, room):
            if len(set(run.kind[0])) == 1:
                groups.append(self._placer(run))
            else:
                groups += [Single(self._placer(self._element(leaves, *run.kind))) for leaves in run.batches()]
        return groups

    def _runs(self, batches: Iterable[Any], room: int) -> list[_Run]:
        """Runs of batches of one kind. The kind is determined only once."""
        runs: list[_Run] = []
        given: Any = None
        for data in batches:
            leaves, tree = _flatten(data)
            if not runs or tree != given or not runs[-1].added(leaves):
                leaves, kind = self._taken_apart(data)
                if not runs or tree != given or not runs[-1].added(leaves):
                    runs.append(
                        _Run(kind, leaves, room - sum(len(run.sizes) for run in runs), self._replicas.local_replicas)
                    )
                    runs[-1].added(leaves)
                    given = tree
        return runs

    @functools.cached_property
    def _placer(self) -> Callable[[HostBatch | BatchGroup], Any]:
        return placer(self._replicas)

    def _taken_apart(self, data: Any) -> tuple[list[Any], tuple[tuple[int, ...], int, Any]]:
        """The arrays of a batch, each replica's number of rows, how many replicas have the same, and the structure."""
        leaves, tree = jax.tree_util.tree_flatten(data)
        lengths = {len(leaf) if type(leaf) is np.ndarray and leaf.ndim else None for leaf in leaves}
        key = tree, *lengths
        kind = self._kinds.get(key)
        if kind is None:
            rows = _rows(data)
            leaves, tree = jax.tree_util.tree_flatten(registered(data))
            sizes, copies = sizes_of(rows, self._replicas.num_replicas)
            whole = Batch(jax.tree_util.tree_unflatten(tree, leaves), sizes, copies)
            kind = sizes, copies, jax.tree_util.tree_structure(whole)
            if len(lengths) == 1 and None not in lengths:  # otherwise it is checked each time
                self._kinds[key] = kind
        return [leaf if type(leaf) is np.ndarray else np.asarray(leaf) for leaf in leaves], kind

    def _element(self, leaves: Sequence[Any], sizes: tuple[int, ...], copies: int, structure: Any) -> HostBatch:
        batch = BatchRows(list(leaves), sum(sizes) // copies)
        if copies > 1:
            parts = [batch for _ in self._replicas.local_replicas]
        else:
            cut = batch.cut(sizes)
            parts = [cut[i] for i in self._replicas.local_replicas]
        return HostBatch(structure, parts, sizes)


class _Run:
    """At most ``room`` consecutive batches of one kind, on the host, for this worker's replicas, ``local``.

    A kind has the number of rows of each replica, the number of replicas with the same rows, and the structure of a
    batch; its arrays are like ``leaves``. A batch is copied when it is added, as the dataset may fill its arrays again.
    """

    def __init__(
        self, kind: tuple[tuple[int, ...], int, Any], leaves: Sequence[Any], room: int, local: Sequence[int]
    ) -> None:
        self.kind = kind
        self.tree = kind[2]
        self.is_padded = False
        self.sizes: list[tuple[int, ...]] = []
        self._local = local
        self._batches = [room_for((room, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._leaves = [(leaf.shape, leaf.dtype, batches) for leaf, batches in zip(leaves, self._batches, strict=True)]

    def added(self, leaves: Sequence[Any]) -> bool:
        """Add a batch on the host, if it is of this kind; returns whether it was."""
        at = len(self.sizes)
        for leaf, (shape, dtype, batches) in zip(leaves, self._leaves, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return False
            batches[at] = leaf
        self.sizes.append(self.kind[0])
        return True

    def batches(self) -> list[list[Any]]:
        """The arrays of each batch."""
        return [[batches[i] for batches in self._batches] for i in range(len(self.sizes))]

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """Return, for each leaf, an array ``[this worker's replicas, batches, …]``."""
        return [self._stack(batches[: len(self.sizes)]) for batches in self._batches]

    def _stack(self, batches: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sizes, copies, _ = self.kind
        count, _, *shape = batches.shape
        if copies > 1:
            return np.broadcast_to(batches, (len(self._local), *batches.shape))
        parts = batches.reshape(count, len(sizes), sizes[0], *shape).swapaxes(0, 1)
        return parts[list(self._local)] if len(sizes) > 1 else parts


def _rows(data: Any) -> int:
    """The number of rows of a batch."""
    leaves = jax.tree_util.tree_leaves(data, is_leaf=_is_sparse)
    dense = all(isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim for leaf in leaves)
    if dense and len({leaf.shape[0] for leaf in leaves}) == 1:
        return int(leaves[0].shape[0])
    found = jax.tree_util.tree_flatten_with_path(data, is_leaf=_is_sparse)[0]
    shown = ", ".join(f"batch{jax.tree_util.keystr(path)}: {_description(leaf)}" for path, leaf in found)
    raise ValueError(
        "a batch is divided over the replicas by its rows, so it must consist of dense arrays with the same dim 0; got "
        f"{shown or 'no array'}. Have the dataset give such arrays."
    )


def _is_sparse(value: Any) -> bool:
    """Return whether ``value`` is a sparse array, which JAX treats as a pytree of arrays."""
    return isinstance(value, JAXSparse)


def _description(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | jax.Array):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def taken(iterator: Iterator[Any], count: int) -> tuple[Any, Iterator[Any]]:
    """The next batches of Keras' loop, at least one and at most ``count``: the first, and an iterator over all of them.

    The dataset may fill a batch's arrays again when the next one is taken. Raises StopIteration if there are no more.
    """
    first = next(iterator)
    return first, itertools.chain((first,), itertools.islice(iterator, count - 1))
