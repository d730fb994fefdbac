"""Batches: those of Keras' loop, divided over the replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax.data.elements.batch_rows import BatchRows
from replicax.data.elements.chunks import Staged
from replicax.data.elements.elements import Element
from replicax.data.elements.to_devices import placer
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.nests import known
from replicax.workers.replicas import Replicas


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

    def batch(self, data: Any) -> Batch:
        """One batch, of ``PerReplica`` arrays (with one replica, of plain ones)."""
        placed: Batch = self._placer(self._element(data))
        return placed

    def groups(self, batches: Sequence[Any]) -> list[ElementGroup | Single]:
        """Some batches, as groups of those that one program can go through."""
        groups: list[ElementGroup | Single] = []
        staged: Staged | None = None
        for number, data in enumerate(batches):
            element = self._element(data)
            if staged is not None and staged.takes(element):
                staged.add(element)
                continue
            if staged is not None:
                groups.append(self._placer(staged))
            staged = Staged(element, len(batches) - number) if element.alike else None
            if staged is None:
                groups.append(Single(self._placer(element)))
        if staged is not None:
            groups.append(self._placer(staged))
        return groups

    @property
    def _placer(self) -> Callable[[Element | Staged], Any]:
        if self._place is None:
            self._place = placer(self._replicas)
        return self._place

    def _element(self, data: Any) -> Element:
        leaves, tree = jax.tree_util.tree_flatten(known(data))
        rows = _rows(data, leaves)
        sizes, copies = sizes_of(rows, self._replicas.count)
        batch = BatchRows([np.asarray(leaf) for leaf in leaves], rows)
        if copies > 1:
            parts = [batch for _ in self._replicas.local]
        else:
            starts = np.cumsum((0, *sizes)).tolist()
            parts = [batch.part(starts[i], sizes[i]) for i in self._replicas.local]
        structure = jax.tree_util.tree_structure(Batch(jax.tree_util.tree_unflatten(tree, leaves), sizes, copies))
        return Element(structure, parts, sizes, len(set(sizes)) == 1)


def _rows(data: Any, leaves: Sequence[Any]) -> int:
    """How many rows a batch has.

    Raises:
      ValueError: its arrays have not all the same dim 0.
      TypeError: it has something else than dense arrays.
    """
    shapes = {getattr(leaf, "shape", None) for leaf in leaves}
    rows = {shape[0] for shape in shapes if shape}
    if len(rows) == 1 and all(shapes):
        return int(rows.pop())
    found = jax.tree_util.tree_flatten_with_path(data)[0]
    shown = ", ".join(f"batch{jax.tree_util.keystr(path)}: {_described(leaf)}" for path, leaf in found)
    raise ValueError(
        "a batch is divided over the replicas by its rows, so all its arrays must have the same dim 0; got "
        f"{shown or 'no array'}"
    )


def _described(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return f"{type(leaf).__name__} without a shape" if shape is None else f"{leaf.dtype}{list(shape)}"


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
