"""Datasets of other libraries: which they are, seen without importing the libraries."""

from __future__ import annotations

import importlib
from typing import Any

from replicax.integrations.converted_dataset import Adapted

# Where a class is defined, what it is called, and the room that knows it. Hugging Face's come first, because its
# IterableDataset becomes a subclass of PyTorch's where that is installed.
_CLASSES = (
    ("datasets.arrow_dataset", "Dataset", "hugging_face"),
    ("datasets.iterable_dataset", "IterableDataset", "hugging_face"),
    ("datasets.dataset_dict", "DatasetDict", "hugging_face"),
    ("datasets.dataset_dict", "IterableDatasetDict", "hugging_face"),
    ("tensorflow.python.data.ops.dataset_ops", "DatasetV2", "tf_data"),
    ("torch.utils.data.dataloader", "DataLoader", "torch_data"),
    ("torch.utils.data.dataset", "Dataset", "torch_data"),
)


def adapted(dataset: Any) -> Adapted | None:
    """A tf.data, PyTorch or Hugging Face dataset as one of NumPy arrays.

    Returns:
      None if ``dataset`` is none of these.

    Raises:
      TypeError: it holds what is no array of numbers, such as strings.

    >>> import numpy as np
    >>> adapted([np.zeros(3)]) is None
    True
    """
    bases = {(base.__module__, base.__qualname__) for base in type(dataset).__mro__}
    for module, name, integration in _CLASSES:
        if (module, name) in bases:
            result: Adapted = importlib.import_module(f"replicax.integrations.{integration}").adapt(dataset)
            return result
    return None
