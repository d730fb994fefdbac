"""Sources: converts everything that a dataset can be made from to a Grain dataset."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from replicax._grain import graph, nodes
from replicax._grain.installed import what_is_lost
from replicax.argument_checks import check_unmasked
from replicax.data.reading.pass_iterators import LoaderIterator, Replayed, count_rows
from replicax.devices.host_values import check_no_keys
from replicax.errors import warn
from replicax.integrations.converted_dataset import adapted
from replicax.pytrees import registered
from replicax.user_functions import why_not_taken, without_partials

ARRAYS_AS_DATASET = "arrays, whose slices along dim 0 are the batches"
"""The kind of a source that is a pytree of arrays."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A Grain dataset, with its properties."""

    dataset: Any  # a ``grain.MapDataset`` or ``grain.IterDataset``
    kind: str  # a description of the original
    unrepeatable: str | None = None  # why a second pass could differ; ``None`` if it does not
    length: int | None = None  # the number of elements, if known
    rows: int | None = None  # the number of rows of all elements, if they are a list or arrays

    @property
    def is_endless(self) -> bool:
        """Return whether a pass certainly never ends."""
        return graph.is_endless(self.dataset)


def as_source(dataset: Any, method: str) -> Source:
    """Convert ``dataset`` to a Grain dataset."""
    name = type(dataset).__name__
    unrepeatable, length = None, None
    if isinstance(dataset, grain.MapDataset | grain.IterDataset | grain.DataLoader):
        name = f"Grain {name}"
    elif (foreign := adapted(dataset)) is not None:
        name = f"{type(dataset).__module__.split('.')[0]} {name}"
        dataset, unrepeatable, length = foreign.batches, foreign.unrepeatable, foreign.length
    if isinstance(dataset, grain.MapDataset | grain.IterDataset) and (lost := what_is_lost()):
        warn(lost)
    if isinstance(dataset, grain.MapDataset):
        return Source(dataset, f"a {name}", unrepeatable, graph.length(dataset))
    if isinstance(dataset, grain.IterDataset):
        return Source(dataset, f"a {name}", length=graph.length(dataset))
    if isinstance(dataset, grain.DataLoader):
        return Source(nodes.Iterated(LoaderIterator, dataset), f"a {name}")
    if _is_function(dataset):
        kind = f"the generator function {_name_of(dataset)}"
        if why := why_not_taken(dataset):
            raise TypeError(
                f"{method} calls {kind} without arguments, for each pass anew, but: {why}. Use functools.partial; a "
                "function of an InputContext goes to strategy.distribute_datasets_from_function."
            )
        # The first call shows what it returns, and is the first pass. (Calling a generator function runs none of its
        # code.)
        first = [_iterator_of(dataset, kind, method)]
        return Source(Replayed(lambda: first.pop() if first else _iterator_of(dataset, kind, method)), kind)
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{method} needs something that can be iterated anew for each epoch, got the iterator {dataset!r}. "
            "Pass the dataset itself, a list of batches, a generator function, or an object whose __iter__ makes a new "
            "iterator."
        )
    kind = f"a {name} of batches"
    if _is_array_tree(dataset):
        dataset, kind = _Slices(dataset), ARRAYS_AS_DATASET
    elif isinstance(dataset, str | bytes | dict | type):
        raise TypeError(_refusal(dataset, method))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        rows = None
        if isinstance(dataset, _Slices):
            rows = len(dataset) * count_rows(dataset[0]) if len(dataset) else 0
        elif type(dataset) in (list, tuple):  # a subclass may read each batch from a file
            rows = sum(map(count_rows, dataset))
        batches = Replayed(lambda: map(dataset.__getitem__, range(len(dataset))))
        return Source(batches, kind, length=len(dataset), rows=rows)
    if isinstance(dataset, Iterable):
        return Source(Replayed(lambda: iter(dataset)), f"the iterable {name}", unrepeatable, length)
    raise TypeError(_refusal(dataset, method))


def _is_function(dataset: Any) -> bool:
    """Return whether ``dataset`` must be called to get an iterator."""
    is_collection = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    return callable(dataset) and not inspect.isclass(dataset) and not is_collection


def _name_of(function: Any) -> str:
    inner = without_partials(function)
    return getattr(inner, "__qualname__", None) or type(inner).__name__


def _iterator_of(function: Any, kind: str, method: str) -> Iterator[Any]:
    result = function()
    if not isinstance(result, Iterator):
        is_dataset = isinstance(result, Iterable) or hasattr(result, "__getitem__")
        instead = (
            f" Pass what it returns: strategy.distribute_dataset({_name_of(function)}()). A function that makes a "
            "dataset for each worker, of per-replica batches, goes to strategy.distribute_datasets_from_function."
        )
        raise TypeError(
            f"{method}: {kind} must give an iterator over batches (yield them, or return iter(…)), got {result!r}."
            + (instead if is_dataset else "")
        )
    return result


def _refusal(dataset: Any, method: str) -> str:
    return (
        f"{method} takes a Grain dataset, a re-iterable or generator function of pytrees of NumPy arrays, or a pytree "
        f"of NumPy arrays, got {dataset!r}"
    )


class _Slices:
    """The slices of a pytree of arrays along dim 0, as a random-access source."""

    def __init__(self, arrays: Any) -> None:
        paths, self._tree = jax.tree_util.tree_flatten_with_path(registered(arrays))
        if not paths:
            raise ValueError("a dataset of NumPy arrays needs at least one array, got an empty pytree")
        sizes = {}
        self._leaves = []
        for path, leaf in paths:
            name = "input" + jax.tree_util.keystr(path)
            check_no_keys(leaf, name)
            check_unmasked(leaf, name)
            array = np.asarray(leaf)
            if array.ndim == 0:
                raise ValueError(f"{name} is a scalar; every array needs a dim 0 along which the examples lie")
            sizes[name] = array.shape[0]
            self._leaves.append(array)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays must have the same dim 0, one row for each example, got {sizes}")
        self._length = next(iter(sizes.values()))
        self.is_in_memory = not any(isinstance(leaf, np.memmap) for _, leaf in paths)

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: int) -> Any:
        return jax.tree_util.tree_unflatten(self._tree, [leaf[index] for leaf in self._leaves])


class _Examples(_Slices):
    """Slices as copies, which a program may change."""

    def __getitem__(self, index: int) -> Any:
        leaves = [leaf[index].copy() if leaf.ndim > 1 else leaf[index] for leaf in self._leaves]
        return jax.tree_util.tree_unflatten(self._tree, leaves)


def numpy_examples(arrays: Any) -> Any:
    """See ``Strategy.make_numpy_dataset``."""
    stacked = jax.tree_util.tree_map_with_path(
        _stacked_list, registered(arrays), is_leaf=lambda node: isinstance(node, list)
    )
    return grain.MapDataset.source(_Examples(stacked))


def _stacked_list(path: Any, leaf: Any) -> Any:
    """A list as one array, with a row for each of its entries; anything else unchanged."""
    if not isinstance(leaf, list) or not leaf:
        return leaf
    name = "input" + jax.tree_util.keystr(path)
    try:
        array = np.asarray(leaf)
    except ValueError:
        array = np.asarray(None)
    if array.dtype == object:
        shapes = [getattr(entry, "shape", type(entry).__name__) for entry in leaf]
        raise ValueError(
            f"make_numpy_dataset: {name} is a list, which becomes one array with a row for each entry, but its entries "
            f"are not arrays of one shape: {shapes}. Arrays that belong together, such as inputs and labels, go into a "
            "tuple or a dict."
        )
    return array


def _is_array_tree(dataset: Any) -> bool:
    """Return whether ``dataset`` is a pytree of arrays; a list is a list of batches."""
    if isinstance(dataset, list):
        return False
    leaves = jax.tree_util.tree_leaves(registered(dataset))
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
