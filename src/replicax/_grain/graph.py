"""Grain's graphs: analyses the nodes of a dataset, and rebuilds its graph on another source or with other batches.

A Grain dataset is a chain of nodes, each of which knows its parent. The name of its class, and private attributes, say
what a node does. Where the installed Grain lacks these (:mod:`replicax._grain.installed`), every dataset counts as one
unknown node. `tests/data/test_grain_graphs.py` runs all kinds of graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from replicax._grain.installed import STRUCTURE_LACKS


def chain(dataset: Any) -> list[Any]:
    """The nodes of ``dataset``, itself first, as long as each has one parent."""
    nodes = [dataset]
    while len(_parents(nodes[-1])) == 1:
        nodes += _parents(nodes[-1])
    return nodes


def _parents(node: Any) -> Sequence[Any]:
    return () if STRUCTURE_LACKS else getattr(node, "parents", ())


def parent(node: Any) -> Any:
    """The only parent of a node."""
    [only] = _parents(node)
    return only


def source_of(root: Any) -> Any:
    """The source of a root node; ``None`` if it has none."""
    return getattr(root, "_source", None)


def is_random_access(node: Any) -> bool:
    """Return whether a node has random access."""
    return isinstance(node, grain.MapDataset)


def is_batch(node: Any) -> bool:
    """Return whether ``node`` is Grain's own ``batch``."""
    return _name(node) in ("BatchMapDataset", "BatchIterDataset")


def is_repeat(node: Any) -> bool:
    """Return whether ``node`` iterates over its parent several times."""
    return _name(node) in _REPEATS


def is_reader(node: Any) -> bool:
    """Return whether ``node`` passes on its parent's elements unchanged, only earlier."""
    return _name(node) in _READERS


_READERS = {"PrefetchIterDataset", "ThreadPrefetchIterDataset", "WithOptionsIterDataset"}
_SEEDS = {"_WithSeedMapDataset", "_WithSeedIterDataset"}
_MAPS = {"MapMapDataset", "RandomMapMapDataset", "MapIterDataset", "RandomMapIterDataset"}
_INDEXED_MAPS = {"MapWithIndexMapDataset", "MapWithIndexIterDataset"}
_FILTERS = {"FilterMapDataset", "FilterIterDataset"}
_SHUFFLES = {"ShuffleMapDataset", "WindowShuffleMapDataset", "WindowShuffleIterDataset"}
_REPEATS = {"RepeatMapDataset", "RepeatIterDataset"}
_BATCHES = {"BatchMapDataset", "BatchIterDataset", "RebatchIterDataset"}
_FLAT_MAPS = {"FlatMapMapDataset", "FlatMapIterDataset"}
_SELECTIONS = _SEEDS | _SHUFFLES | _REPEATS | {"SliceMapDataset"}
_PACKS = {"ConcatThenSplitIterDataset", "FirstFitPackIterDataset", "BestFitPackIterDataset"}


def _with_parents(nodes: Sequence[Any]) -> list[Any]:
    """``nodes``, and all their ancestors."""
    found = list(nodes)
    for node in found:  # grows
        found += _parents(node)
    return found


def keeps_order(node: Any) -> bool:
    """Return whether ``node`` keeps the order of its parent's elements, so that a place in one is a place in both."""
    return _name(node) in _READERS | _SEEDS | _MAPS | _INDEXED_MAPS | {"FilterIterDataset"}


def keeps_elements(node: Any) -> bool:
    """Return whether the elements of ``node`` are those of its parent, in any order and any number of times."""
    return _name(node) in _READERS | _SEEDS | _FILTERS | _SHUFFLES | _REPEATS


def length(dataset: Any) -> int | None:
    """The number of elements of a pass; ``None`` if it is unknown without reading, or infinite."""
    nodes = chain(dataset)
    at = next((i for i, node in enumerate(nodes) if is_random_access(node)), None)
    one_by_one = _READERS | _SEEDS | _MAPS | _INDEXED_MAPS | _SHUFFLES
    if STRUCTURE_LACKS or at is None or not all(_name(node) in one_by_one for node in nodes[:at]):
        return None
    if any(_name(node) in _FILTERS | _FLAT_MAPS for node in _with_parents([nodes[at]])):
        return None
    elements = len(nodes[at])
    return elements if elements < _ENDLESS else None


_ENDLESS = 1 << 48
"""For infinite repetition Grain reports ``sys.maxsize`` elements; batches of these are fewer."""


def is_endless(dataset: Any) -> bool:
    """Return whether a pass over ``dataset`` certainly never ends."""
    one_by_one = _READERS | _SEEDS | _MAPS | _INDEXED_MAPS | _FILTERS | _SHUFFLES | _REPEATS | _BATCHES
    for node in chain(dataset):
        if is_random_access(node):
            return len(node) >= _ENDLESS
        if _name(node) == "RepeatIterDataset" and getattr(node, "_num_epochs", 1) is None:
            return True
        if _name(node) not in one_by_one:
            break
    return False


def epoch_of_endless(nodes: Sequence[Any]) -> int | None:
    """The number of elements that random-access ``nodes`` repeat without end; ``None`` if they don't, or it is unknown.

    The last node comes first.
    """
    if len(nodes[0]) < _ENDLESS:
        return None
    return next((len(node) for node in nodes if len(node) < _ENDLESS), None)


def has_parents_state(node: Any) -> bool:
    """Return whether the state of an iterator over ``node`` is that of its parent's iterator."""
    return _name(node) in {"MapIterDataset", "FilterIterDataset", "WithOptionsIterDataset", "_WithSeedIterDataset"}


def is_movable(node: Any) -> bool:
    """Return whether :func:`on_top_of` can put ``node`` on another parent."""
    if is_batch(node) or _name(node) == "RepeatMapDataset":
        return True
    return not is_random_access(node) or not {"_length", "_parent_length"} & set(vars(node))


def is_divisible(node: Any) -> bool:
    """Return whether ``node`` over the parts of a dataset yields, part by part, what it yields over the whole.

    Nodes that take the first 100 elements, or that get the numbers of elements, do not; nor does an endless repetition,
    as the parts after the first would never come.
    """
    known = _READERS | _SEEDS | _MAPS | _FILTERS | _SHUFFLES | _REPEATS | _BATCHES | _FLAT_MAPS | _PACKS
    is_endless = is_repeat(node) and getattr(node, "_num_epochs", None) is None
    return _name(node) in known and is_movable(node) and not is_endless


def sets_size(node: Any) -> bool:
    """Return whether the elements of ``node`` have a size of their own, whatever batches its parent yields."""
    return _name(node) in _BATCHES | _PACKS


def stacks_examples(node: Any) -> bool:
    """Return whether a batch node makes one row of each example, for any examples."""
    function = node._batch_fn
    return (getattr(function, "__module__", None) or type(function).__module__).split(".")[0] == "grain"


def batch_size(node: Any) -> int:
    """The size of a batch node."""
    return int(node._batch_size)


def batch_sizes(nodes: Sequence[Any]) -> list[int]:
    """The sizes of all batch nodes among ``nodes`` and their ancestors."""
    return [batch_size(node) for node in _with_parents(nodes) if is_batch(node)]


def drops_remainder(node: Any) -> bool:
    """Return whether a batch node drops a last batch that is not full."""
    return bool(node._drop_remainder)


def batched(parent: Any, like: Any, size: int) -> Any:
    """``parent`` in batches of ``size``, made like those of the batch node ``like``.

    A last batch that is not full is dropped only if ``like`` does so with batches of this size.
    """
    drops = size == like._batch_size and like._drop_remainder
    return parent.batch(size, drop_remainder=drops, batch_fn=like._batch_fn)


def only_selects(nodes: Sequence[Any]) -> bool:
    """Return whether ``nodes``, whose last is a root, pass on the elements of a random-access source unchanged."""
    *above, root = nodes
    return _name(root) == "SourceMapDataset" and all(_name(node) in _SELECTIONS for node in above)


def is_in_memory(dataset: Any) -> bool:
    """Return whether reading ``dataset`` only copies rows of arrays."""
    nodes = [node for node in chain(dataset) if not (is_batch(node) and stacks_examples(node))]
    if not only_selects(nodes):
        return False
    source = nodes[-1]._source  # exactly these types: subclasses may read files, like np.memmap
    return type(source) in (np.ndarray, list, tuple) or getattr(source, "is_in_memory", False)


def seeds(dataset: Any) -> list[tuple[str, int]]:
    """The seeds of all shuffles and random functions, with the names of their nodes."""
    found = [(_name(n), getattr(n, "_seed", getattr(n, "_seed_rng_seed", None))) for n in _with_parents([dataset])]
    return [(name, int(seed)) for name, seed in found if name and isinstance(seed, int | np.integer)]


def on_top_of(nodes: list[Any], parent: Any) -> Any:
    """The movable ``nodes``, the last of which is the lowest, on top of another parent."""
    for node in reversed(nodes):
        if is_batch(node):
            parent = batched(parent, node, node._batch_size)
        elif _name(node) == "RepeatMapDataset":
            parent = parent.repeat(node._num_epochs, reseed_each_epoch=node._reseed_each_epoch)
        else:
            moved = copy.copy(node)
            moved._parents = (parent,)
            moved.__dict__.pop("_stats", None)
            parent = moved
    return parent


def _name(node: Any) -> str:
    """The class of one of Grain's own nodes; empty for unknown nodes."""
    return type(node).__name__ if not STRUCTURE_LACKS and type(node).__module__.split(".")[0] == "grain" else ""


# --- files ----------------------------------------------------------------------------------------------


def file_source(root: Any) -> Any:
    """The object with the ``files`` of a root node; ``None`` if it reads no files.

    It is the root itself, or its random-access source.
    """
    for candidate in (root, getattr(root, "_source", None)):
        if hasattr(candidate, "files") and hasattr(candidate, "with_files"):
            return candidate
    return None


def with_files(root: Any, files: tuple[str, ...]) -> Any:
    """The root node over other files."""
    source = file_source(root)
    other = source.with_files(files)
    return other if source is root else grain.MapDataset.source(other)
