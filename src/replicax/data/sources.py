"""What a dataset can be made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.nests import known


class _Slices:
    """The slices of a pytree of arrays along dim 0, as a random-access source."""

    def __init__(self, arrays: Any) -> None:
        paths, self._tree = jax.tree_util.tree_flatten_with_path(known(arrays))
        if not paths:
            raise ValueError("a dataset of NumPy arrays needs at least one array, got an empty pytree")
        sizes = {}
        self._leaves = []
        for path, leaf in paths:
            array = np.asarray(leaf)
            name = "input" + jax.tree_util.keystr(path)
            if array.ndim == 0:
                raise ValueError(f"{name} is a scalar; every array needs a dim 0 along which the examples lie")
            sizes[name] = array.shape[0]
            self._leaves.append(array)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays must have the same dim 0, one row for each example, got {sizes}")
        self._length = next(iter(sizes.values()))

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: int) -> Any:
        return jax.tree_util.tree_unflatten(self._tree, [leaf[index] for leaf in self._leaves])


def numpy_examples(arrays: Any) -> Any:
    """See ``Strategy.make_numpy_dataset``."""
    import grain  # heavy: loaded when used

    return grain.MapDataset.source(_Slices(arrays))


def as_reiterable(dataset: Any) -> Iterable[Any]:
    """Something that can be iterated again and again over global batches.

    Raises:
      TypeError: ``dataset`` is an iterator, or not iterable at all.
    """
    if isinstance(dataset, Iterator):
        raise TypeError(
            "distribute_dataset needs something that can be iterated anew for each epoch, got the iterator "
            f"{dataset!r}. "
            "Pass the dataset itself, a list of batches, or an object whose __iter__ makes a new iterator."
        )
    if _is_array_tree(dataset):
        slices = _Slices(dataset)
        return [slices[i] for i in range(len(slices))]
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "distribute_dataset takes a Grain dataset, a re-iterable of pytrees of NumPy arrays, or a pytree of NumPy "
            f"arrays, got {dataset!r}"
        )
    if hasattr(dataset, "to_iter_dataset"):  # a grain.MapDataset, which reads ahead in this form
        iterable: Iterable[Any] = dataset.to_iter_dataset()
        return iterable
    return dataset


def _is_array_tree(dataset: Any) -> bool:
    """Whether ``dataset`` is a pytree of arrays; a list is a list of batches."""
    if isinstance(dataset, list) or not isinstance(dataset, (np.ndarray, jax.Array, tuple, dict)):
        return False
    leaves = jax.tree_util.tree_leaves(known(dataset))
    return bool(leaves) and all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves)
