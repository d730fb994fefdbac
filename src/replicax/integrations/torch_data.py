"""PyTorch's DataLoader and Dataset: converts tensors to NumPy arrays, without copies."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.utils.data as torch_data

from replicax.integrations.converted_dataset import Adapted, Converted, check_array, convert_leaves

_CURE = "Leave it out, or make a tensor of numbers of it, in the Dataset or in the DataLoader's collate_fn."
# Dtypes that NumPy has only through ml_dtypes, and the integers of their sizes that carry their bits.
_NAMES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_BITS = {getattr(torch, name): getattr(ml_dtypes, name) for name in _NAMES if hasattr(torch, name)}


def adapt(dataset: Any) -> Adapted:
    """Convert a ``torch.utils.data.DataLoader`` or ``Dataset``.

    A DataLoader or an IterableDataset becomes a re-iterable of its elements; a Dataset with ``__getitem__`` a
    ``grain.MapDataset`` of its examples, for Grain to shuffle and batch. Arrays share memory with the tensors;
    bfloat16 stays the bfloat16 of ``ml_dtypes``.

    A DataLoader's workers end with the iterator. Spawn them (``multiprocessing_context="spawn"``): a fork of a process
    in which JAX runs may hang, as JAX warns.

    Raises:
      TypeError: a Dataset has no length; and, while reading, a value is not a dense array of numbers, with its path.
    """
    if isinstance(dataset, torch_data.DataLoader):
        endless = isinstance(dataset.dataset, torch_data.IterableDataset)  # if it has a length, that is a guess
        return Adapted(Converted(dataset, to_numpy), None if endless else len(dataset), _unrepeatable(dataset))
    if isinstance(dataset, torch_data.IterableDataset):
        return Adapted(Converted(dataset, to_numpy), None)
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} is a torch Dataset without __len__: add it, or make it an IterableDataset"
        )
    import grain  # heavy: loaded when used

    return Adapted(grain.MapDataset.source(TorchDataset(dataset)), len(dataset))


class TorchDataset:
    """A map-style Dataset as a random-access source.

    Grain reads from several threads. Datasets are written for processes with one thread each, so only one thread
    enters at a time.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._one_at_a_time = threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        with self._one_at_a_time:
            example = self._dataset[int(index)]
        return to_numpy(example, f"example {index}")

    def __reduce__(self) -> Any:
        return TorchDataset, (self._dataset,)  # a lock can't be pickled


def to_numpy(element: Any, where: str) -> Any:
    """``element`` with arrays instead of tensors; raises a TypeError, with the path, if a leaf has no numbers."""
    return convert_leaves(element, where, _leaf)


def _leaf(leaf: Any, where: str) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return check_array(leaf, where, _CURE)
    if leaf.is_nested or leaf.is_quantized or leaf.layout != torch.strided:
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout).split(".")[-1]
        raise TypeError(f"{where} is a {kind} tensor, which can't be laid on a device. {_CURE}")
    tensor = leaf.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype in _BITS:
        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return tensor.view(bits).numpy().view(np.dtype(_BITS[tensor.dtype]))
    try:
        return tensor.numpy()
    except TypeError as error:
        raise TypeError(f"{where} is a tensor of {tensor.dtype}, which NumPy doesn't have. {_CURE}") from error


def _unrepeatable(loader: Any) -> str | None:
    """The reason why passes differ, as far as a DataLoader shows it."""
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "the DataLoader has in_order=False, so the order of its batches depends on timing"
    random = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
    samplers = [loader.sampler, loader.batch_sampler]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    for sampler in samplers:
        if isinstance(sampler, random):
            # Even with a generator of a fixed seed: it continues from pass to pass.
            return (
                f"the DataLoader shuffles ({type(sampler).__name__}), and draws another order for every pass: shuffle "
                "and batch its Dataset with Grain, which remembers the order: "
                "grain.MapDataset.source(loader.dataset).seed(…).shuffle().batch(…)"
            )
    return None
