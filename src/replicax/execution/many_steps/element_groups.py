"""Groups: consecutive elements of a dataset side by side on the devices, for one program that loops over them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.devices.arrays import put
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.replica_values import example_mask
from replicax.execution.tracing.arguments import Arguments
from replicax.pytrees import is_leaf, registered
from replicax.values import ExampleMask, PerReplica, Stacked


@dataclasses.dataclass(frozen=True, eq=False)
class Masks:
    """The masks of padded elements: which rows are examples.

    Attributes:
      array: bool ``[num_replicas, count, rows]``, a slice on each replica's device.
      counts: int32 ``[count]``, how many examples all replicas have together, on all devices.
      sizes: for each element, how many examples each replica has.
    """

    array: jax.Array
    counts: jax.Array
    sizes: tuple[tuple[int, ...], ...]

    def of(self, index: int, mesh: Mesh) -> ExampleMask:
        """The mask of element ``index``."""
        return example_mask(self.sizes[index], self.array.shape[2], mesh)


@dataclasses.dataclass(frozen=True, eq=False)
class ElementGroup:
    """Some elements of one structure, one after the other.

    Attributes:
      tree: the structure of an element.
      arrays: for each leaf an array ``[num_replicas, count, …]``, with a slice on each replica's device; or, of a
        single replica whose elements are bare arrays, ``[count, …]``.
      count: how many elements there are.
      mesh: the replicas' devices.
      bare: whether elements are bare arrays.
      masks: of padded elements; ``None`` if they are not padded.
      states: the places of their pass before, between and after them; empty if these are not needed.
    """

    tree: Any
    arrays: list[jax.Array]
    count: int
    mesh: Mesh
    bare: bool
    masks: Masks | None = None
    states: Sequence[bytes] = ()

    @property
    def inputs(self) -> list[jax.Array]:
        """The inputs of a program for these elements."""
        return self.arrays if self.masks is None else [*self.arrays, self.masks.array, self.masks.counts]

    @property
    def mask(self) -> ExampleMask | None:
        """The mask of the last element, if it is padded."""
        return None if self.masks is None else self.masks.of(-1, self.mesh)

    @property
    def join_key(self) -> Any:
        """A key that is equal for groups that can be joined."""
        return self.tree, self.bare, self._array_types

    @property
    def described(self) -> Any:
        """An element with ``jax.ShapeDtypeStruct`` in the place of arrays."""
        return _element_of(self.tree, self.bare, itertools.starmap(jax.ShapeDtypeStruct, self._array_types), self.mask)

    @property
    def arguments(self) -> Arguments:
        """The arguments of a step for a described element."""
        if self.masks is not None:
            return Arguments((self.described,), {})
        return _arguments(self.tree, self.bare, self._array_types)

    @property
    def _array_types(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """The shape and dtype of each array of an element."""
        at = self._axis
        return tuple(((*a.shape[:at], *a.shape[at + 1 :]), a.dtype) for a in self.arrays)

    def elements(self) -> list[Any]:
        """The elements one by one, as iterating over the dataset gives them."""
        return [self._element(i) for i in range(self.count)]

    def split(self, count: int) -> tuple[ElementGroup, ElementGroup]:
        """The first ``count`` elements, and the others."""
        return self._part(0, count), self._part(count, self.count - count)

    @property
    def _axis(self) -> int:
        return 0 if self.bare else 1

    @property
    def _layout(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec() if self.bare else PartitionSpec(REPLICA_AXIS))

    def _element(self, index: int) -> Any:
        mask = None if self.masks is None else self.masks.of(index, self.mesh)
        place = self._place(index)
        arrays = [put(_at(a, place, self._axis), self._layout) for a in self.arrays]
        return _element_of(self.tree, self.bare, arrays, mask)

    def _part(self, start: int, size: int) -> ElementGroup:
        masks = self.masks
        first = self._place(start)
        if masks is not None:
            array, counts = (_slice(a, first, size, axis) for a, axis in ((masks.array, 1), (masks.counts, 0)))
            masks = self._masks(array, counts, masks.sizes[start : start + size])
        arrays = [put(_slice(a, first, size, self._axis), self._layout) for a in self.arrays]
        states = self.states[start : start + size + 1]
        return dataclasses.replace(self, arrays=arrays, count=size, masks=masks, states=states)

    def _place(self, index: int) -> jax.Array:
        """``index`` on the devices, by an explicit transfer, which ``jax.transfer_guard("disallow")`` permits."""
        return put(np.int32(index), NamedSharding(self.mesh, PartitionSpec()))

    def _masks(self, array: jax.Array, counts: jax.Array, sizes: tuple[tuple[int, ...], ...]) -> Masks:
        return Masks(put(array, self._layout), put(counts, NamedSharding(self.mesh, PartitionSpec())), sizes)


def _element_of(tree: Any, bare: bool, arrays: Iterable[Any], mask: ExampleMask | None) -> Any:
    return jax.tree_util.tree_unflatten(tree, arrays if bare else [PerReplica(Stacked(a), mask) for a in arrays])


@functools.lru_cache(maxsize=256)  # asked for at every call
def _arguments(tree: Any, bare: bool, array_types: Any) -> Arguments:
    return Arguments((_element_of(tree, bare, itertools.starmap(jax.ShapeDtypeStruct, array_types), None),), {})


@dataclasses.dataclass(frozen=True, eq=False)
class Single:
    """An element on its own: of replicas that differ in size, or for a step whose program can't loop."""

    element: Any
    count: int = 1
    states: Sequence[bytes] = ()

    def elements(self) -> list[Any]:
        """The element."""
        return [self.element]


def group_of(element: Any, mesh: Mesh) -> ElementGroup | Single:
    """A group of one element; the element itself, without a copy, if no program can hold it."""
    leaves, tree = jax.tree_util.tree_flatten(registered(element), is_leaf=is_leaf)
    if any(isinstance(leaf, PerReplica) and not isinstance(leaf.form, Stacked) for leaf in leaves):
        return Single(element)
    bare = not any(isinstance(leaf, PerReplica) for leaf in leaves)
    mask = None if bare or not leaves else leaves[0].mask
    group = ElementGroup(tree, [], 1, mesh, bare)
    arrays = [put(_expand(a if bare else a.form.array, group._axis), group._layout) for a in leaves]
    masks = None
    if mask is not None:
        sizes = tuple(int(size) for size in mask.host.sum(1))
        masks = group._masks(_expand(mask.array, 1), _expand(mask.count, 0), (sizes,))
    return dataclasses.replace(group, arrays=arrays, masks=masks)


def joined(groups: Sequence[Any]) -> Any:
    """Groups of one ``join_key`` as one, a copy on the devices; one group or :class:`Single` is returned unchanged."""
    first = groups[0]
    if len(groups) == 1:
        return first
    columns = zip(*(g.arrays for g in groups), strict=True)
    arrays = [put(_concatenate(column, first._axis), first._layout) for column in columns]
    masks = None
    if first.masks is not None:
        masks_of = [g.masks for g in groups if g.masks is not None]
        sizes = tuple(size for m in masks_of for size in m.sizes)
        array, counts = _concatenate([m.array for m in masks_of], 1), _concatenate([m.counts for m in masks_of], 0)
        masks = first._masks(array, counts, sizes)
    states = [*first.states, *(state for g in groups[1:] for state in g.states[1:])]
    return dataclasses.replace(first, arrays=arrays, count=sum(g.count for g in groups), masks=masks, states=states)


# Compiled once for each shape, wherever in the group the slice is.


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice(array: Any, start: Any, size: int, axis: int) -> Any:
    return lax.dynamic_slice_in_dim(array, start, size, axis)


@functools.partial(jax.jit, static_argnums=2)
def _at(array: Any, index: Any, axis: int) -> Any:
    return lax.dynamic_index_in_dim(array, index, axis, keepdims=False)


@functools.partial(jax.jit, static_argnums=1)
def _expand(array: Any, axis: int) -> Any:
    return lax.expand_dims(array, [axis])


@functools.partial(jax.jit, static_argnums=1)
def _concatenate(arrays: Sequence[Any], axis: int) -> Any:
    return lax.concatenate(list(arrays), axis)
