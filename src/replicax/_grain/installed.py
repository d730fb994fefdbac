"""Look up once, in small datasets, which names that Grain does not promise the installed one has.

A release of Grain may rename a class of nodes or an attribute. Replicax then does without:

- :data:`STRUCTURE_LACKS`: datasets are read, not analysed. All workers read all batches and keep their own rows, and a
  saved place fits only batches of the same size. The batches are the same.
- :data:`SEEDS_LACK`: workers do not compare their seeds of shuffling.
- :data:`READS_SEVERAL`: if false, examples are read one by one.

`tests/data/test_grain_versions.py` hides each of these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import grain

_BATCHES = ("_parents", "_batch_size", "_drop_remainder", "_batch_fn")
_REPEATS = ("_parents", "_length", "_num_epochs", "_reseed_each_epoch")


def _expected_nodes() -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Nodes, the names of their classes, and the attributes that :mod:`replicax._grain.graph` uses."""
    source = grain.MapDataset.source([0, 1])
    yield source, "SourceMapDataset", ("_parents", "_source")
    yield source.seed(0), "_WithSeedMapDataset", ("_parents",)
    yield source.shuffle(seed=0), "ShuffleMapDataset", ("_parents",)
    yield source.slice(slice(1)), "SliceMapDataset", ("_parents", "_length")
    yield source.map(_same_example), "MapMapDataset", ("_parents",)
    yield source.filter(_same_example), "FilterMapDataset", ("_parents",)
    yield source.repeat(2), "RepeatMapDataset", _REPEATS
    yield source.batch(2), "BatchMapDataset", _BATCHES
    records = source.to_iter_dataset(read_options=grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    yield records, "PrefetchIterDataset", ("_parents",)
    yield records.map(_same_example), "MapIterDataset", ("_parents",)
    yield records.filter(_same_example), "FilterIterDataset", ("_parents",)
    yield records.batch(2), "BatchIterDataset", _BATCHES


def _same_example(example: Any) -> Any:
    return example


def _structure_lacks() -> Iterator[str]:
    for node, name, attributes in _expected_nodes():
        if type(node).__name__ != name:
            yield name
        yield from (f"{name}.{attribute}" for attribute in attributes if not hasattr(node, attribute))
        if name == "PrefetchIterDataset" and iter(node).get_state().get("next_index") != 0:
            yield f"next_index in the state of {name}"


def _seeds_lack() -> Iterator[str]:
    source = grain.MapDataset.source([0, 1])
    for node, name in ((source.seed(0), "_seed_rng_seed"), (source.shuffle(seed=0), "_seed")):
        if not hasattr(node, name):
            yield f"{type(node).__name__}.{name}"


STRUCTURE_LACKS = tuple(_structure_lacks())
"""Names that the analysis of datasets needs; empty if Grain has all."""

SEEDS_LACK = tuple(_seeds_lack())
"""The same for the seeds of datasets."""

READS_SEVERAL = hasattr(grain.MapDataset, "_getitems")
"""Whether nodes have Grain's method that returns several elements."""


def what_is_lost() -> str | None:
    """Return, for a warning, what Replicax does without because Grain lacks names; ``None`` if it has all."""
    lacks = STRUCTURE_LACKS or SEEDS_LACK
    if not lacks:
        return None
    lost = (
        "Datasets are read in order only: every worker reads every batch, files can't be divided among workers, and a "
        "saved place can't be resumed with another batch size."
        if STRUCTURE_LACKS
        else "Workers can't compare their seeds of shuffling: give the same seed to all of them."
    )
    names = ", ".join([*lacks[:3], *(["…"] if len(lacks) > 3 else [])])
    return (
        f"Grain {metadata.version('grain')} lacks names that this version of Replicax knows Grain's datasets by "
        f"({names}). {lost} The batches are the same. Install a newer Replicax, or grain==0.2.18."
    )
