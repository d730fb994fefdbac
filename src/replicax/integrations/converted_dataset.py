"""Datasets of other libraries: whose they are, seen without importing the library, and what they are turned into."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import numpy as np

from replicax.errors import shortened
from replicax.pytrees import registered


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A dataset of another library, as one that Replicax knows.

    Attributes:
      batches: its elements as pytrees of NumPy arrays: a ``grain.MapDataset`` if they can be had by number, or
        something that can be iterated again and again.
      length: how many elements one pass has; None if nobody knows, or if it never ends.
      unrepeatable: why a second pass, or one in another process, could give other elements or another order, and what
        to do about it; None if it gives the same. An iterator can then be restored by going over what it has given.
    """

    batches: Any
    length: int | None
    unrepeatable: str | None = None


def adapted(dataset: Any) -> Adapted | None:
    """A tf.data, PyTorch or Hugging Face dataset as one of NumPy arrays.

    Returns:
      None if ``dataset`` is none of these.

    Raises:
      TypeError: it holds what is not an array of numbers, such as strings.

    >>> import numpy as np
    >>> adapted([np.zeros(3)]) is None
    True
    """
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(dataset).__mro__}
    for adapt, classes in _CLASSES.items():
        if not bases.isdisjoint(classes):
            return adapt(dataset)
    return None


def _hugging_face(dataset: Any) -> Adapted:
    from replicax.integrations import hugging_face

    return hugging_face.adapt(dataset)


def _tf_data(dataset: Any) -> Adapted:
    from replicax.integrations import tf_data

    return tf_data.adapt(dataset)


def _torch_data(dataset: Any) -> Adapted:
    from replicax.integrations import torch_data

    return torch_data.adapt(dataset)


# By what loads the library's module: its classes. Hugging Face's come first, because its IterableDataset becomes a
# subclass of PyTorch's where that is installed.
_CLASSES: dict[Callable[[Any], Adapted], set[str]] = {
    _hugging_face: {
        "datasets.arrow_dataset.Dataset",
        "datasets.iterable_dataset.IterableDataset",
        "datasets.dataset_dict.DatasetDict",
        "datasets.dataset_dict.IterableDatasetDict",
    },
    _tf_data: {"tensorflow.python.data.ops.dataset_ops.DatasetV2"},
    _torch_data: {"torch.utils.data.dataloader.DataLoader", "torch.utils.data.dataset.Dataset"},
}


class Converted:
    """The elements of an iterable, converted one by one; can be iterated as often as the iterable can."""

    def __init__(self, elements: Iterable[Any], convert: Callable[[Any, str], Any]) -> None:
        self._elements = elements
        self._convert = convert

    def __iter__(self) -> Generator[Any, None, None]:
        # A generator: dropped or closed, it lets go of the iterator, which then ends its workers.
        for number, element in enumerate(self._elements):
            yield self._convert(element, f"element {number}")


def convert_leaves(element: Any, where: str, convert: Callable[[Any, str], Any]) -> Any:
    """Convert every leaf of ``element``; containers stay what they are.

    Args:
      element: a nest.
      where: what to call it in messages.
      convert: makes a leaf of a leaf, given also its path.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(leaf, where + jax.tree_util.keystr(path)), registered(element)
    )


def check_array(leaf: Any, where: str, cure: str) -> Any:
    """``leaf`` itself, if it is a number or a NumPy array of numbers.

    Raises:
      TypeError: it is something else, such as a string or an array of objects.
    """
    if isinstance(leaf, (bool, int, float, complex)):
        return leaf
    if not isinstance(leaf, (np.ndarray, np.generic)):
        raise TypeError(
            f"{where} is {type(leaf).__name__} {shortened(repr(leaf), 60)}, which is not an array of numbers. {cure}"
        )
    if leaf.dtype.kind in "OSUT":
        kind = "objects, such as rows that differ in length" if leaf.dtype.kind == "O" else "strings"
        raise TypeError(f"{where} is an array of {kind}, which can't be laid on a device. {cure}")
    return leaf
