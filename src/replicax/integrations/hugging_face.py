"""Hugging Face datasets: rows as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from replicax._grain import BatchedSource
from replicax.integrations.converted_dataset import Adapted, Converted, check_array, convert_leaves

_CURE = "Leave the column out (.remove_columns), or make numbers of it, of one length, with .map(…)."
# NumPy takes 128 bits of entropy from the operating system; seeds that people choose have fewer.
_CHOSEN = 1 << 64


def adapt(dataset: Any) -> Adapted:
    """Convert a ``datasets.Dataset`` or ``IterableDataset``.

    A Dataset becomes a ``grain.MapDataset`` of its rows, for Grain to shuffle and batch; an IterableDataset a
    re-iterable of its rows, or of its batches after its ``batch``. Values are in the library's numpy format (in which
    floats are float32), unless the dataset has another numpy format or its own transform.

    Raises:
      TypeError: a column holds strings, or the dataset is a dict of splits; and, while reading, a value is not an array
        of numbers, with its path.
    """
    if isinstance(dataset, dict):
        raise TypeError(
            f"{type(dataset).__name__} holds several datasets, its splits {list(dataset)}: choose one, such as "
            f"dataset[{next(iter(dataset), 'train')!r}]"
        )
    own_format = _format(dataset)
    if own_format != "custom":
        for name, feature in (dataset.features or {}).items():
            _check(feature, f"column {name!r}")
    rows = dataset if own_format in ("custom", "numpy") else dataset.with_format("numpy")
    if isinstance(dataset, datasets.IterableDataset):
        return Adapted(Converted(rows, to_numpy), None, _unrepeatable(dataset))
    import grain  # heavy: loaded when used

    return Adapted(grain.MapDataset.source(HuggingFaceRows(rows)), len(rows))


class HuggingFaceRows(BatchedSource):
    """The rows of a Dataset as a random-access source."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return to_numpy(self._dataset[int(index)], f"row {index}")

    def read_several(self, indices: Sequence[int]) -> Sequence[Any]:
        rows = self._dataset.__getitems__([int(index) for index in indices])
        return [to_numpy(row, f"row {index}") for row, index in zip(rows, indices, strict=True)]


def to_numpy(row: Any, where: str) -> Any:
    """Return ``row``; raises a TypeError, with the path, unless it holds only arrays of numbers."""
    return convert_leaves(row, where, lambda leaf, path: check_array(leaf, path, _CURE))


def _format(dataset: Any) -> str | None:
    """The name of the format of the dataset's values."""
    if isinstance(dataset, datasets.IterableDataset):
        formatting = getattr(dataset, "_formatting", None)
        return formatting.format_type if formatting is not None else None
    return dataset.format["type"]


def _check(feature: Any, where: str) -> None:
    """Refuse columns of strings before reading."""
    if isinstance(feature, dict):
        for name, part in feature.items():
            _check(part, f"{where}, field {name!r}")
    elif isinstance(feature, datasets.Value):
        if "string" in feature.dtype or "binary" in feature.dtype:
            raise TypeError(
                f"datasets.Dataset: {where} holds {feature.dtype}s, which can't be laid on a device. {_CURE}"
            )
    elif (inner := getattr(feature, "feature", None)) is not None:
        _check(inner, where)


def _unrepeatable(dataset: Any) -> str | None:
    """The reason if a shuffle in the pipeline has no seed: another process would draw another order."""
    nodes = [getattr(dataset, "_ex_iterable", None)]
    while nodes:
        node = nodes.pop()
        generator = getattr(node, "generator", None)
        entropy = getattr(getattr(getattr(generator, "bit_generator", None), "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy >= _CHOSEN:
            return "the IterableDataset is shuffled without a seed: .shuffle(seed=…)"
        for part in vars(node).values() if hasattr(node, "__dict__") else ():
            several = part if isinstance(part, list) else [part]
            nodes.extend(p for p in several if type(p).__module__ == datasets.IterableDataset.__module__)
    return None
