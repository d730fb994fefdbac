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
from jax.sharding import Mesh, NamedSharding

from replicax.devices.arrays import put
from replicax.devices.mesh import mirrored_sharding, per_replica_sharding
from replicax.execution.replica_values import example_mask
from replicax.execution.tracing.arguments import Arguments
from replicax.pytrees import is_leaf, registered
from replicax.values import ExampleMask, PerReplica, Stacked, rebuilt


@dataclasses.dataclass(frozen=True, eq=False)
class ElementGroup:
    """Some elements of one structure, one after the other."""

    tree: Any  # the structure of an element
    # For each leaf an array ``[num_replicas, count, …]``, with a slice on each replica's device; or, of a single
    # replica whose elements are bare arrays, ``[count, …]``. Of padded elements two more follow: the rows that are
    # examples, bool ``[num_replicas, count, rows]``, and how many all replicas have together, int32 ``[count]``.
    arrays: list[jax.Array]
    count: int  # how many elements there are
    mesh: Mesh  # the replicas' devices
    bare: bool  # whether elements are bare arrays
    # For each padded element, how many examples each replica has; ``None`` if they are not padded.
    sizes: tuple[tuple[int, ...], ...] | None
    # The places of their pass before, between and after them; empty if these are not needed.
    states: Sequence[bytes] = ()

    @property
    def mask(self) -> ExampleMask | None:
        """The mask of the last element, if it is padded."""
        return self._mask(-1)

    @property
    def join_key(self) -> Any:
        """A key that is equal for groups that can be joined."""
        return self.tree, self.bare, self.sizes is None, self._array_types

    @property
    def described(self) -> Any:
        """An element with ``jax.ShapeDtypeStruct`` in the place of arrays."""
        return _element_of(self.tree, self.bare, itertools.starmap(jax.ShapeDtypeStruct, self._array_types), self.mask)

    @property
    def arguments(self) -> Arguments:
        """The arguments of a step for a described element."""
        if self.sizes is not None:
            return Arguments((self.described,), {})
        return _arguments(self.tree, self.bare, self._array_types)

    @property
    def _array_types(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """The shape and dtype of each array of an element."""
        leaves = zip(self.arrays, self._places[: self.tree.num_leaves], strict=False)
        return tuple(((*a.shape[:axis], *a.shape[axis + 1 :]), a.dtype) for a, (axis, _) in leaves)

    def elements(self) -> list[Any]:
        """The elements one by one, as iterating over the dataset gives them."""
        return [self._element(i) for i in range(self.count)]

    def split(self, count: int) -> tuple[ElementGroup, ElementGroup]:
        """The first ``count`` elements, and the others."""
        return self._part(0, count), self._part(count, self.count - count)

    @functools.cached_property
    def _places(self) -> list[tuple[int, NamedSharding]]:
        """For each array the axis along which the elements lie, and its layout."""
        everywhere, along = (0, mirrored_sharding(self.mesh)), (1, per_replica_sharding(self.mesh))
        leaves = [everywhere if self.bare else along] * self.tree.num_leaves
        return leaves if self.sizes is None else [*leaves, along, everywhere]

    def _mask(self, index: int) -> ExampleMask | None:
        return None if self.sizes is None else example_mask(self.sizes[index], self.arrays[-2].shape[2], self.mesh)

    def _element(self, index: int) -> Any:
        at, leaves = self._on_devices(index), list(zip(self.arrays, self._places, strict=True))[: self.tree.num_leaves]
        arrays = [put(_at(a, at, axis), layout) for a, (axis, layout) in leaves]
        return _element_of(self.tree, self.bare, arrays, self._mask(index))

    def _part(self, start: int, size: int) -> ElementGroup:
        first, pairs = self._on_devices(start), zip(self.arrays, self._places, strict=True)
        arrays = [put(_slice(a, first, size, axis), layout) for a, (axis, layout) in pairs]
        sizes = None if self.sizes is None else self.sizes[start : start + size]
        states = self.states[start : start + size + 1]
        return dataclasses.replace(self, arrays=arrays, count=size, sizes=sizes, states=states)

    def _on_devices(self, index: int) -> jax.Array:
        """``index`` on the devices, by an explicit transfer, which ``jax.transfer_guard("disallow")`` permits."""
        return put(np.int32(index), mirrored_sharding(self.mesh))


def _element_of(tree: Any, bare: bool, arrays: Iterable[Any], mask: ExampleMask | None) -> Any:
    return rebuilt(tree, list(arrays) if bare else [PerReplica(Stacked(a), mask) for a in arrays])


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
    arrays = leaves if bare else [leaf.form.array for leaf in leaves]
    sizes = None
    if mask is not None:
        arrays += [mask.array, mask.count]
        sizes = (tuple(int(size) for size in mask.host.sum(1)),)
    group = ElementGroup(tree, arrays, 1, mesh, bare, sizes)
    expanded = [put(_expand(a, (axis,)), layout) for a, (axis, layout) in zip(arrays, group._places, strict=True)]
    return dataclasses.replace(group, arrays=expanded)


def joined(groups: Sequence[Any]) -> Any:
    """Groups of one ``join_key`` as one, a copy on the devices; one group or :class:`Single` is returned unchanged."""
    first = groups[0]
    if len(groups) == 1:
        return first
    columns = zip(zip(*(g.arrays for g in groups), strict=True), first._places, strict=True)
    arrays = [put(_concatenate(column, axis), layout) for column, (axis, layout) in columns]
    sizes = None if first.sizes is None else tuple(size for g in groups for size in g.sizes)
    states = [*first.states, *(state for g in groups[1:] for state in g.states[1:])]
    return dataclasses.replace(first, arrays=arrays, count=sum(g.count for g in groups), sizes=sizes, states=states)


# Compiled once for each shape, wherever in the group the slice is.
_slice = jax.jit(lax.dynamic_slice_in_dim, static_argnums=(2, 3))
_at = jax.jit(functools.partial(lax.dynamic_index_in_dim, keepdims=False), static_argnums=2)
_expand = jax.jit(lax.expand_dims, static_argnums=1)
_concatenate = jax.jit(lax.concatenate, static_argnums=1)
