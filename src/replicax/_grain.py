"""Grain's graphs: what Grain does not promise of them is known here.

A Grain dataset is a chain of nodes, each of which knows its parent. What a dataset is made of, and the same dataset
with another source or batch size, is found out by the names of nodes and by attributes that Grain keeps to itself. When
a new Grain moves one of them, this file changes; `tests/data/test_graph.py` runs all kinds of graphs on the installed
Grain, and `pyproject.toml` bounds the version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np


def chain(dataset: Any) -> list[Any]:
    """The nodes of ``dataset``, itself first, as far as each has one parent."""
    nodes = [dataset]
    while len(getattr(nodes[-1], "_parents", ())) == 1:
        nodes.append(nodes[-1]._parents[0])
    return nodes


def parent(node: Any) -> Any:
    """What a node with one parent is made from."""
    [only] = node._parents
    return only


def source_of(root: Any) -> Any:
    """What a root node has been made from; ``None`` if it does not say."""
    return getattr(root, "_source", None)


def is_random_access(node: Any) -> bool:
    """Whether any element can be had by its number."""
    return isinstance(node, grain.MapDataset)


def is_batch(node: Any) -> bool:
    """Whether ``node`` is Grain's own ``batch``."""
    return _name(node) in ("BatchMapDataset", "BatchIterDataset")


def is_repeat(node: Any) -> bool:
    """Whether ``node`` goes through its parent several times."""
    return _name(node) in _REPEATS


def is_reader(node: Any) -> bool:
    """Whether ``node`` hands on what its parent has, element by element, only sooner."""
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
    """``nodes``, and all that they are made from."""
    found = list(nodes)
    for node in found:  # grows
        found += getattr(node, "_parents", ())
    return found


def keeps_order(node: Any) -> bool:
    """Whether the elements of ``node`` come from its parent's in their order, so that a place in one is one in both."""
    return _name(node) in _READERS | _SEEDS | _MAPS | _INDEXED_MAPS | {"FilterIterDataset"}


def keeps_elements(node: Any) -> bool:
    """Whether the elements of ``node`` are its parent's, in whatever order and however often."""
    return _name(node) in _READERS | _SEEDS | _FILTERS | _SHUFFLES | _REPEATS


def length(dataset: Any) -> int | None:
    """How many elements a pass has; ``None`` if that can't be told without going through it, or if there is no end."""
    nodes = chain(dataset)
    at = next((i for i, node in enumerate(nodes) if is_random_access(node)), None)
    one_by_one = _READERS | _SEEDS | _MAPS | _INDEXED_MAPS | _SHUFFLES
    if at is None or not all(_name(node) in one_by_one for node in nodes[:at]):
        return None
    if any(_name(node) in _FILTERS | _FLAT_MAPS for node in _with_parents([nodes[at]])):
        return None
    elements = len(nodes[at])
    return elements if elements < _ENDLESS else None


_ENDLESS = 1 << 48
"""Grain says that what repeats for ever has ``sys.maxsize`` elements; batches of it are fewer."""


def has_parents_state(node: Any) -> bool:
    """Whether the state of an iterator over ``node`` is that of its parent's."""
    return _name(node) in {"MapIterDataset", "FilterIterDataset", "WithOptionsIterDataset", "_WithSeedIterDataset"}


def is_movable(node: Any) -> bool:
    """Whether :func:`on_top_of` can put ``node`` on top of something else."""
    if is_batch(node) or _name(node) == "RepeatMapDataset":
        return True
    if len(getattr(node, "_parents", ())) != 1:
        return False
    return not is_random_access(node) or not {"_length", "_parent_length"} & set(vars(node))


def is_divisible(node: Any) -> bool:
    """Whether ``node`` over parts of a dataset gives, part by part, what it gives over the whole.

    Not so, for example, what takes the first 100 elements, or is told their numbers.
    """
    known = _READERS | _SEEDS | _MAPS | _FILTERS | _SHUFFLES | _REPEATS | _BATCHES | _FLAT_MAPS | _PACKS
    return _name(node) in known and is_movable(node)


def stacks_examples(node: Any) -> bool:
    """Whether a batch node makes of each example one row, and does so with any examples."""
    function = node._batch_fn
    return (getattr(function, "__module__", None) or type(function).__module__).split(".")[0] == "grain"


def batch_size(node: Any) -> int:
    """Of a batch node."""
    return int(node._batch_size)


def batch_sizes(nodes: Sequence[Any]) -> list[int]:
    """Of all batch nodes among ``nodes`` and in what these are made from."""
    return [batch_size(node) for node in _with_parents(nodes) if is_batch(node)]


def drops_remainder(node: Any) -> bool:
    """Whether a batch node leaves out a last batch that is not full."""
    return bool(node._drop_remainder)


def batched(parent: Any, like: Any, size: int, is_its_own: bool) -> Any:
    """``parent`` in batches of ``size``, made as the batch node ``like`` makes them.

    A last batch that is not full is left out if that is what ``like`` does, and ``is_its_own`` size.
    """
    return parent.batch(size, drop_remainder=is_its_own and like._drop_remainder, batch_fn=like._batch_fn)


def stacked_by(node: Any) -> Callable[[list[Any]], Any]:
    """The function with which a batch node puts examples together."""
    function: Callable[[list[Any]], Any] = node._batch_fn
    return function


def only_selects(nodes: Sequence[Any]) -> bool:
    """Whether ``nodes``, the last of which is a root, hand on what a random-access source has, as it is."""
    *above, root = nodes
    return _name(root) == "SourceMapDataset" and all(_name(node) in _SELECTIONS for node in above)


def is_in_memory(dataset: Any) -> bool:
    """Whether reading ``dataset`` is nothing but copying rows of arrays."""
    nodes = [node for node in chain(dataset) if not (is_batch(node) and stacks_examples(node))]
    if not only_selects(nodes):
        return False
    source = nodes[-1]._source  # of these very types: other ones may read files, as np.memmap does
    return type(source) in (np.ndarray, list, tuple) or getattr(source, "is_in_memory", False)


def seeds(dataset: Any) -> list[tuple[str, int]]:
    """The seeds of all shuffles and random functions, with the names of their nodes."""
    found = [(_name(n), getattr(n, "_seed", getattr(n, "_seed_rng_seed", None))) for n in _with_parents([dataset])]
    return [(name, int(seed)) for name, seed in found if name and isinstance(seed, int | np.integer)]


def examples_at(parent: Any, numbers: range, together: bool) -> list[Any]:
    """Those examples of ``parent``, asked for ``together`` or, as Grain's own batch does it, one after the other.

    Asked together, each node has all of its parent's examples at once; and one that inherits from Grain's may know
    nothing of being asked so.
    """
    if together:
        examples: list[Any] = parent._getitems(list(numbers))
        return examples
    return [_example_at(parent, number) for number in numbers]


def _example_at(parent: Any, number: int) -> Any:
    try:
        return parent[number]
    except Exception as error:
        error.add_note(f"(raised by example {number} of the dataset, counted from 0, in the order that it is read in)")
        raise


def asked_together(root: Any) -> Any:
    """A root node with the same examples, which can be asked for several at once.

    Grain's keeps books on each example, and that takes 10 µs: more than to read it, where it is in memory.
    """
    return _Examples(root._source) if _name(root) == "SourceMapDataset" and not _gives_several(root._source) else root


def _gives_several(source: Any) -> bool:
    """Whether a source has Grain's method for several examples, as sure as it has ``__getitem__``.

    One that it has from a class below that of ``__getitem__``, or from what it wraps, gives the examples of those.
    """
    if isinstance(source, grain.MapDataset):  # of which functions may be a part
        return False
    for base in type(source).__mro__:
        if "_getitems" in vars(base):
            return True
        if "__getitem__" in vars(base):
            return False
    return False


class _Examples(grain.MapDataset):
    """What a random-access source has."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._source[index % len(self._source)]

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        source, length = self._source, len(self._source)
        return [source[i % length] for i in indices]


def on_top_of(nodes: list[Any], parent: Any) -> Any:
    """The movable ``nodes``, the last of which is the lowest, with another parent under them."""
    for node in reversed(nodes):
        if is_batch(node):
            parent = parent.batch(node._batch_size, drop_remainder=node._drop_remainder, batch_fn=node._batch_fn)
        elif _name(node) == "RepeatMapDataset":
            parent = parent.repeat(node._num_epochs, reseed_each_epoch=node._reseed_each_epoch)
        else:
            moved = copy.copy(node)
            moved._parents = (parent,)
            moved.__dict__.pop("_stats", None)
            parent = moved
    return parent


def _name(node: Any) -> str:
    return type(node).__name__ if _is_grains(node) else ""


def _is_grains(node: Any) -> bool:
    return type(node).__module__.split(".")[0] == "grain"


# --- files ----------------------------------------------------------------------------------------------


def file_source(root: Any) -> Any:
    """What has the ``files`` of a root node; ``None`` if it reads no files.

    That is the root itself, or the random-access source under it.
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
