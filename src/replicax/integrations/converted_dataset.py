"""Datasets of other libraries: detects them without importing the library, and converts them."""

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
    """A dataset of another library, converted."""

    # Its elements as pytrees of NumPy arrays: a ``grain.MapDataset`` if it has random access, or a re-iterable.
    batches: Any
    length: int | None  # the number of elements of a pass; None if unknown or infinite
    # Why a second pass, or one in another process, could have other elements or another order, and the remedy; None if
    # it has the same. An iterator can then be restored by repeating the pass up to its place.
    unrepeatable: str | None = None


def adapted(dataset: Any) -> Adapted | None:
    """Convert a tf.data, PyTorch or Hugging Face dataset to one of NumPy arrays; ``None`` if it is none of these.

    Raises:
      TypeError: it holds values other than arrays of numbers, such as strings.

    >>> adapted([np.zeros(3)]) is None
    True
    """
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(dataset).__mro__}
    if bases & _HUGGING_FACE:  # first: its IterableDataset becomes a subclass of PyTorch's if PyTorch is installed
        from replicax.integrations import hugging_face

        return hugging_face.adapt(dataset)
    if bases & _TF_DATA:
        from replicax.integrations import tf_data

        return tf_data.adapt(dataset)
    if bases & _TORCH_DATA:
        from replicax.integrations import torch_data

        return torch_data.adapt(dataset)
    return None


_HUGGING_FACE = {
    "datasets.arrow_dataset.Dataset",
    "datasets.iterable_dataset.IterableDataset",
    "datasets.dataset_dict.DatasetDict",
    "datasets.dataset_dict.IterableDatasetDict",
}
_TF_DATA = {"tensorflow.python.data.ops.dataset_ops.DatasetV2"}
_TORCH_DATA = {"torch.utils.data.dataloader.DataLoader", "torch.utils.data.dataset.Dataset"}


class Converted:
    """The elements of an iterable, converted one by one; re-iterable if the iterable is."""

    def __init__(self, elements: Iterable[Any], convert: Callable[[Any, str], Any]) -> None:
        self._elements = elements
        self._convert = convert

    def __iter__(self) -> Generator[Any, None, None]:
        # A generator: when closed or dropped it drops the iterator, which then ends its workers.
        for number, element in enumerate(self._elements):
            yield self._convert(element, f"element {number}")


def convert_leaves(element: Any, where: str, convert: Callable[[Any, str], Any]) -> Any:
    """The pytree ``element``, called ``where`` in messages, with ``convert(leaf, path)`` for each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(leaf, where + jax.tree_util.keystr(path)), registered(element)
    )


def check_array(leaf: Any, where: str, cure: str) -> Any:
    """``leaf`` itself, if it is a number or a NumPy array of numbers.

    Raises a TypeError if it is not, for instance a string or an array of objects.
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
