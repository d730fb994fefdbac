"""Reading: how to read the batches of a dataset, so that workers can divide them and continue from any place.

There are three kinds of dataset:

- *numbered*: batches of examples with random access. Any worker can read any range of them.
- *filed*: records from files, in order. Any worker can read any file.
- *whole*: only the order is known.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import numpy as np

from replicax._grain import graph, nodes
from replicax.data.reading.pass_iterators import Replayed, SequenceIterator
from replicax.data.reading.remaining_parts import (
    PARTS,
    Part,
    between,
    check_count,
    divided_by_file,
    divided_evenly,
    find,
    names_of,
    size_of,
)
from replicax.data.reading.sources import Source
from replicax.pytrees import registered

State = dict[str, Any]
"""The state of a stream: ``parts`` (see :mod:`replicax.data.reading.remaining_parts`), ``native`` (of Grain's iterator
over them; ``None`` at the start), ``rows`` (the number of examples of each batch of the stream, if known) and ``of``
(the identity of the dataset)."""

Own = Callable[[int], tuple[int, int]]
"""For a batch of so many rows: the first row of this worker, and the number of its rows."""

READ_AHEAD = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
"""Read options for random-access datasets: Grain's default would keep 500 batches."""
READ_NOTHING_AHEAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Reading(abc.ABC):
    """A way to read one kind of dataset.

    ``batch`` is the node that makes batches, if there is one, and ``above`` the nodes after it, the last one first; all
    of them if there is no batch.
    """

    files: tuple[str, ...] | None = None  # of the dataset; ``None`` if workers can't read only some of them
    reads_own_rows = False  # whether a worker needs to read only its own rows of a batch
    known_by: dict[str, Any]  # identifies the dataset, whose states fit no other; JSON, ``None`` for what is unknown

    def __init__(self, source: Source, above: list[Any], batch: Any) -> None:
        self._above, self._batch = above, batch
        self._is_in_memory = graph.is_in_memory(source.dataset)
        self.why_no_files = why_no_files(source)
        self.length = source.length  # the number of batches
        self.examples: int | None = None if batch is None else graph.batch_size(batch)  # of a batch, if known
        self.drops_remainder = batch is not None and graph.drops_remainder(batch)
        stacks = batch is not None and graph.stacks_examples(batch)
        # The number of rows of a batch; unknown if a function makes batches.
        self.batch_size = self.examples if stacks and all(map(graph.keeps_elements, above)) else None
        # If Grain itself makes the elements from the examples of a batch, no other code holds their arrays.
        self.gives_new_arrays = stacks and all(graph.is_repeat(node) or graph.is_reader(node) for node in above)

    @functools.cached_property
    def name_of(self) -> dict[str, str]:
        """The name of each file in states."""
        files = self.files or ()
        return dict(zip(files, names_of(files), strict=True))

    @functools.cached_property
    def path_of(self) -> dict[str, str]:
        """The path of each file by its name in states."""
        return {name: path for path, name in self.name_of.items()}

    @abc.abstractmethod
    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        """The state of a stream at the start.

        It reads ``files``, or the whole dataset, in batches of so many ``rows``, or in the dataset's own.
        """

    def opened(self, state: State, own: Own | None = None, ahead: Any = None) -> Any:
        """A Grain iterator over the batches of a stream, from its present place.

        With ``own``, the rows of this worker, batches are :class:`~replicax._grain.nodes.OwnRows` if it
        ``reads_own_rows``, and whole otherwise. ``ahead`` are Grain's read options for a random-access dataset without
        its own; by default threads, except for data in memory, where threads would only contend for Python's lock.
        """
        dataset, rows = self._batches(state, own)
        if graph.is_random_access(dataset):
            usual = READ_NOTHING_AHEAD if self._is_in_memory else READ_AHEAD
            dataset = dataset.to_iter_dataset(read_options=ahead or usual)
        if rows is not None:
            # Grain keeps views of a batch, which the source may fill again, when it reads the next one. It refuses
            # batches without rows, and after a restore at the end it makes one.
            dataset = nodes.rebatched(dataset.filter(_has_rows).map(_copied_batch), rows).filter(_has_rows)
        iterator = iter(dataset)
        if state["native"] is not None:
            iterator.set_state(state["native"])
        return iterator

    @abc.abstractmethod
    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        """A Grain dataset of the stream's parts, and the size of batches that have yet to be made of it."""

    def check(self, state: State) -> None:
        """Raise a ValueError if a stream surely can't have reached the place in this state."""
        return  # opening the stream checks the rest

    def most_elements(self, states: Sequence[State]) -> int | None:
        """The largest number of elements that a pass can have returned before these states; ``None`` if unknown."""
        return None

    def regrouped(self, states: Sequence[State], rows: Sequence[int | None]) -> list[State]:
        """Divide the rest of all streams among new streams with batches of these sizes, or raise a ValueError."""
        begun = any(state["rows"] is not None for state in states)
        if why := self.why_not_regrouped(begun):
            raise ValueError(why)
        divided = self._divided_parts(states, len(rows))
        return [{**self.fresh(None, r), "parts": parts} for parts, r in zip(divided, rows, strict=True)]

    @abc.abstractmethod
    def _divided_parts(self, states: Sequence[State], count: int) -> list[list[Part]]:
        """The rest of all streams, divided among ``count`` new ones."""

    def why_not_regrouped(self, own_batches: bool = False) -> str | None:
        """The reason why a state fits only as many streams; ``None`` if it fits other numbers, too.

        Streams may have begun to give batches of their workers' own sizes (``own_batches``).
        """
        odd = [node for node in self._above if not graph.keeps_order(node)]
        return f"{odd[0]} comes after the batch, so what is left to read can't be told" if odd else None


def _has_rows(batch: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(registered(batch))
    return not leaves or any(np.shape(leaf)[:1] != (0,) for leaf in leaves)


def _copied_batch(batch: Any) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(registered(batch))
    copies = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return jax.tree_util.tree_unflatten(tree, copies)


def why_no_files(source: Source) -> str | None:
    """The reason why workers can't read only some files of ``source``; ``None`` if they can."""
    *nodes, root = graph.chain(source.dataset)
    if graph.file_source(root) is None:
        return "the source does not consist of files"
    # Smaller batches for each worker must become smaller elements.
    after = nodes[: next((i for i, node in enumerate(nodes) if graph.is_batch(node)), 0)]
    odd = [*filter(graph.sets_size, after), *(node for node in nodes if not graph.is_divisible(node))]
    return f"{odd[0]} can't be divided by files" if odd else None


def reading_of(source: Source) -> Reading:
    """The way to read ``source``."""
    chain = graph.chain(source.dataset)
    at = next((i for i, node in enumerate(chain) if graph.is_batch(node)), None)
    above, batch, below = (chain, None, []) if at is None else (chain[:at], chain[at], chain[at + 1 :])
    if batch is not None and graph.is_random_access(batch) and all(map(graph.is_movable, above)):
        return Numbered(source, above, batch, below)
    if why_no_files(source) is None and not graph.is_random_access(chain[0]):
        return Filed(source, above, batch, below)
    return Whole(source, above, batch)


class Numbered(Reading):
    """Batches of examples with random access; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any, below: list[Any]) -> None:
        super().__init__(source, above, batch)
        self._below = below
        self._batched = graph.only_selects(below)
        self.files = tuple(graph.file_source(below[-1]).files) if self.why_no_files is None else None
        self.known_by = {"examples": len(self.examples_of(None))}
        if (epoch := graph.epoch_of_endless(below)) is not None:
            self.known_by["examples of an epoch"] = epoch
        # A user's function may make batches that depend on all of their examples, such as padded ones.
        self.reads_own_rows = self.gives_new_arrays

    def examples_of(self, files: Sequence[str] | None) -> Any:
        """The examples from some of the files, by names in states or paths; ``None`` for all."""
        root = self._below[-1]
        if files is not None:
            root = graph.with_files(root, tuple(self.path_of[file] for file in files))
        return graph.on_top_of(self._below[:-1], nodes.with_batched_reads(root))

    def _count(self, files: Sequence[str] | None) -> int:
        return len(self.examples_of(files)) if files or files is None else 0

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        files = None if files is None else [self.name_of[file] for file in files]
        part = {"files": files, "start": 0, "stop": self._count(files)}
        return {"parts": [part], "native": None, "rows": rows or self.examples, "of": self.known_by}

    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        examples = [self._examples_in(part) for part in state["parts"] if part["start"] < part["stop"]]
        if not examples:
            return grain.MapDataset.source([]), None
        parent = examples[0] if len(examples) == 1 else grain.MapDataset.concatenate(examples)
        batch = graph.batched(parent, self._batch, state["rows"])
        batch = nodes.Batches(batch, own if self.reads_own_rows else None, self._batched)
        return graph.on_top_of(self._above, batch), None

    def check(self, state: State) -> None:
        for part in state["parts"]:
            check_count(part["stop"], "the end of a part in the state", self._count(part["files"]))
            check_count(part["start"], "the start of a part in the state", part["stop"])
        if self.why_not_regrouped() is None:
            batches = -(-size_of(state["parts"]) // state["rows"])
            check_count(find(state["native"], "next_index"), _NEXT, batches)

    def most_elements(self, states: Sequence[State]) -> int | None:
        return None if self.why_not_regrouped() else self.known_by["examples"]

    def _examples_in(self, part: Part) -> Any:
        examples = self.examples_of(part["files"])
        whole = part["start"] == 0 and part["stop"] == len(examples)
        return examples if whole else examples.slice(slice(part["start"], part["stop"]))

    def _divided_parts(self, states: Sequence[State], count: int) -> list[list[Part]]:
        left = []
        for state in states:
            batches = find(state["native"], "next_index")
            left += between(state["parts"], batches * state["rows"], size_of(state["parts"]))
        return divided_evenly(left, count)


class Filed(Reading):
    """Records from files, in order; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any, below: list[Any]) -> None:
        super().__init__(source, above if batch is not None else [], batch)
        self.length = None  # workers divide and resume files by records, and these are not counted
        self._below = below if batch is not None else above
        self._root = self._below[-1]
        self.files = tuple(graph.file_source(self._root).files)
        self.known_by = {"files": len(self.files)}
        has_positions = hasattr(self._root, "with_positions")
        self._can_split = has_positions and all(map(graph.has_parents_state, self._below[:-1]))

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        files = [self.name_of[file] for file in (self.files or () if files is None else files)]
        parts: list[Part] = [{"files": files, "skip": {}, "state": None}] if files else []
        return {"parts": parts, "native": None, "rows": rows or self.examples, "of": self.known_by}

    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        is_ahead = any(map(graph.is_reader, self._below))
        records = nodes.Iterated(SequenceIterator, self._records_in, state["parts"], is_ahead)
        rows = state["rows"]
        if self._batch is None:
            return records, rows
        return graph.on_top_of(self._above, graph.batched(records, self._batch, rows)), None

    def _records_in(self, part: Part) -> Any:
        return graph.on_top_of(self._below[:-1], self._root_of(part))

    def _root_of(self, part: Part) -> Any:
        root = graph.with_files(self._root, tuple(self.path_of[file] for file in part["files"]))
        skip = {self.path_of[file]: records for file, records in part["skip"].items()}
        return root.with_positions(skip) if skip else root

    def why_not_regrouped(self, own_batches: bool = False) -> str | None:
        return _REST if own_batches and self._batch is None else super().why_not_regrouped(own_batches)

    def _divided_parts(self, states: Sequence[State], count: int) -> list[list[Part]]:
        left = []
        for state in states:
            left += find(state["native"], PARTS)
        if self._can_split:
            return divided_by_file([self._by_position(part) for part in left], count)
        return [left[i::count] for i in range(count)]

    def _by_position(self, part: Part) -> Part:
        if part["state"] is None:
            return part
        root = self._root_of(part)
        finished, positions = set(root.finished(part["state"])), root.positions(part["state"])
        left = {self.name_of[file]: positions[file] for file in root.files if file not in finished}
        return {"files": list(left), "skip": left, "state": None}


class Whole(Reading):
    """A dataset of which only the order is known; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any) -> None:
        super().__init__(source, above, batch)
        self._source = source
        self.examples, self.gives_new_arrays = self.batch_size, False
        self.why_no_files = self.why_no_files or f"{_ONLY_ORDER} {source.kind}"
        # Grain's iterator over batches saves a place in the elements before them.
        is_before = batch is not None and not graph.is_random_access(batch) and all(map(graph.keeps_order, above))
        is_replayed = isinstance(source.dataset, Replayed)
        self._takes_any_batch = is_before or is_replayed
        self.known_by = {
            "order": "replayed" if is_replayed else "Grain's",
            "batches of": graph.batch_sizes([graph.parent(batch) if is_before else source.dataset]),
            "rows": source.rows,
        }

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        return {"parts": None, "native": None, "rows": rows, "of": self.known_by}

    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        return self._source.dataset, state["rows"]

    def check(self, state: State) -> None:
        if isinstance(self._source.dataset, Replayed):
            check_count(find(state["native"], "rows"), "the rows that the state has come past")
        elif self.length is not None and state["rows"] is None and graph.is_random_access(self._source.dataset):
            check_count(find(state["native"], "next_index"), _NEXT, self.length)

    def most_elements(self, states: Sequence[State]) -> int | None:
        if self.length is None or not isinstance(self._source.dataset, Replayed):
            return None
        # Earlier elements may have been smaller than present ones; each had a row, or was one of the present ones.
        return self.length + sum(find(s["native"], "rows") or 0 for s in states)

    def _divided_parts(self, states: Sequence[State], count: int) -> list[list[Part]]:
        raise ValueError(f"{_ONLY_ORDER} {self._source.kind}")

    def why_not_regrouped(self, own_batches: bool = False) -> str | None:
        return None if self._takes_any_batch else f"{_ONLY_ORDER} {self._source.kind}"


_NEXT = "the number of the next batch in the state"
_REST = "the rest of a batch is left over, which no other worker can take over"
_ONLY_ORDER = "nothing but the order is known of"
