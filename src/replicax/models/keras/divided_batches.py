"""Batches: those of Keras' loop, divided over the replicas."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse

from replicax.data.elements.batch_rows import BatchRows
from replicax.data.elements.chunks import Staged
from replicax.data.elements.elements import Element
from replicax.data.elements.to_devices import placer
from replicax.devices.host_values import own_copy, room_for
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.pytrees import registered
from replicax.workers.replicas import Replicas

_AS_THEY_ARE = frozenset(map(np.dtype, (bool, np.uint8, np.int8, np.int32, np.uint32, np.float16, np.float32)))
"""Dtypes of the host that are those of devices, whatever JAX's settings, so that no number can be out of range."""
_flatten = jax.tree_util.default_registry.flatten  # jax.tree_util.tree_flatten calls it


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

        They are copies, as the dataset may fill its own again before the program begins. The kind is ``None`` if its
        arrays have to be looked at.
        """
        leaves, (*_, structure) = self._taken_apart(data)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        is_known = all(dtype in _AS_THEY_ARE for _, dtype in kinds)
        return (structure, kinds) if is_known else None, list(map(own_copy, leaves))

    def batch(self, data: Any) -> Batch:
        """One batch, of ``PerReplica`` arrays (with one replica, of plain ones)."""
        leaves, (sizes, copies, structure) = self._taken_apart(data)
        if self._replicas.count == 1:
            alone: Batch = jax.tree_util.tree_unflatten(structure, leaves)  # the program's call takes them as they are
            return alone
        placed: Batch = self._placer(self._element(leaves, sizes, copies, structure))
        return placed

    def groups(self, batches: Iterable[Any], room: int) -> list[ElementGroup | Single]:
        """At most ``room`` batches, as groups of those that one program can go through."""
        groups: list[ElementGroup | Single] = []
        for run in self._runs(batches, room):
            if len(set(run.kind[0])) == 1:
                groups.append(self._placer(run))
            else:
                groups += [Single(self._placer(self._element(leaves, *run.kind))) for leaves in run.batches()]
        return groups

    def _runs(self, batches: Iterable[Any], room: int) -> list[_Run]:
        """Neighbours of one kind. How they are taken apart is found out once for all."""
        runs: list[_Run] = []
        given: Any = None
        for data in batches:
            leaves, tree = _flatten(data)
            if not runs or tree != given or not runs[-1].added(leaves):
                leaves, kind = self._taken_apart(data)
                if not runs or tree != given or not runs[-1].added(leaves):
                    runs.append(_Run(kind, leaves, room - sum(run.count for run in runs), self._replicas.local))
                    runs[-1].added(leaves)
                    given = tree
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
            leaves, tree = jax.tree_util.tree_flatten(registered(data))
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


class _Run(Staged):
    """Batches of one kind, one after the other, on the host.

    What is added is copied at once, as the dataset may fill its arrays again.

    Args:
      kind: how many rows each replica gets, how many replicas get the same, and the structure of a batch.
      leaves: of the first batch, which is not added.
      room: for how many batches there is room.
      local: the numbers of this worker's replicas.
    """

    def __init__(
        self, kind: tuple[tuple[int, ...], int, Any], leaves: Sequence[Any], room: int, local: Sequence[int]
    ) -> None:
        self.kind = kind
        self.tree = kind[2]
        self.is_padded = False
        self.sizes = []
        self._local = local
        self._batches = [room_for((room, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._leaves = [(leaf.shape, leaf.dtype, batches) for leaf, batches in zip(leaves, self._batches, strict=True)]

    def added(self, leaves: Sequence[Any]) -> bool:
        """Add one more, if it is of this kind; of the host."""
        at = len(self.sizes)
        for leaf, (shape, dtype, batches) in zip(leaves, self._leaves, strict=True):
            if type(leaf) is not np.ndarray or leaf.shape != shape or leaf.dtype != dtype:
                return False
            batches[at] = leaf
        self.sizes.append(self.kind[0])
        return True

    def batches(self) -> list[list[Any]]:
        """The arrays of each."""
        return [[batches[i] for batches in self._batches] for i in range(self.count)]

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """For each leaf an array ``[this worker's replicas, batches, …]``."""
        return [self._stack(batches[: self.count]) for batches in self._batches]

    def _stack(self, batches: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sizes, copies, _ = self.kind
        count, _, *shape = batches.shape
        if copies > 1:
            return np.broadcast_to(batches, (len(self._local), *batches.shape))
        parts = batches.reshape(count, len(sizes), sizes[0], *shape).swapaxes(0, 1)
        return parts[list(self._local)] if len(sizes) > 1 else parts


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


def taken(iterator: Iterator[Any], count: int) -> tuple[Any, Iterator[Any]]:
    """The next batches of Keras' loop, at least one and at most ``count``: the first, and then all of them.

    The dataset may fill a batch's arrays again when the next one is taken.

    Raises:
      StopIteration: there is none.
    """
    first = next(iterator)
    return first, itertools.chain((first,), itertools.islice(iterator, count - 1))
