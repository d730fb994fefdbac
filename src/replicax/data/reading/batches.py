"""Batches: how the batches of a dataset come to be, so that workers can share them and go on from any place.

Three kinds of dataset, by what is known of them:

- *numbered*: batches of examples that can be had by number. Any range of them can be read by anybody.
- *filed*: records that come one after the other out of files. Files can be read by anybody.
- *whole*: nothing is known but the order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import grain
from grain import experimental

from replicax._grain import graph, nodes
from replicax.data.reading.pass_iterators import Replayed, SequenceIterator
from replicax.data.reading.remaining_parts import (
    PARTS,
    Part,
    between,
    check_count,
    dealt_by_file,
    dealt_evenly,
    find,
    size_of,
)
from replicax.data.reading.sources import Source

State = dict[str, Any]
"""Of a stream: ``parts`` (see :mod:`replicax.data.reading.remaining_parts`), ``native`` (of Grain's iterator over them;
``None`` at the start), ``rows`` (how many examples a batch of the stream is made of, where that is known) and ``of``
(what the dataset is known by)."""

Own = Callable[[int], tuple[int, int]]
"""Of a batch of so many rows: where the worker's own begin, and how many they are."""

READ_AHEAD = grain.ReadOptions(num_threads=8, prefetch_buffer_size=16)
"""How random-access datasets are read: Grain would keep 500 batches."""
READ_NOTHING_AHEAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Reading(abc.ABC):
    """How to read one kind of dataset.

    Args:
      source: the dataset.
      above: its nodes after the batch, the last one first; all of them if there is no batch.
      batch: the node that makes batches; ``None`` if there is none.

    Attributes:
      examples: how many a batch is made of; ``None`` if it can't be seen.
      batch_size: how many rows it then has; ``None`` if that can't be seen, as of a function that makes them.
      drops_remainder: whether a last batch that is not full is left out.
      length: how many batches there are; ``None`` if it can't be seen.
      files: those that the dataset is made from; ``None`` if workers can't read some of them only.
      gives_new_arrays: whether each batch is in arrays that were made for it, and that nobody else has.
      reads_own_rows: whether a worker needs to read only its own rows of a batch.
      known_by: what tells the dataset from others, whose states are no use to it; goes into JSON.
    """

    files: tuple[str, ...] | None = None
    reads_own_rows = False
    known_by: dict[str, Any]

    def __init__(self, source: Source, above: list[Any], batch: Any) -> None:
        self._above, self._batch = above, batch
        self._is_in_memory = graph.is_in_memory(source.dataset)
        self.length = source.length
        self.examples: int | None = None if batch is None else graph.batch_size(batch)
        self.drops_remainder = batch is not None and graph.drops_remainder(batch)
        stacks = batch is not None and graph.stacks_examples(batch)
        self.batch_size = self.examples if stacks and all(map(graph.keeps_elements, above)) else None
        # Elements are then what Grain itself makes of the examples of a batch.
        self.gives_new_arrays = stacks and all(graph.is_repeat(node) or graph.is_reader(node) for node in above)

    @abc.abstractmethod
    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        """The state of a stream at the start.

        Args:
          files: those that are the stream's own; ``None`` for the whole dataset.
          rows: of how many examples to make each batch; ``None`` for what the dataset says.
        """

    def opened(self, state: State, own: Own | None = None, ahead: Any = None) -> Any:
        """A Grain iterator over the batches of a stream, from where it was.

        Args:
          state: of the stream.
          own: which rows are this worker's, if those of others need not be read. Batches are then
            :class:`~replicax._grain.nodes.OwnRows` if ``reads_own_rows``, and whole otherwise.
          ahead: how a random-access dataset is read, if it does not say so itself; by default with threads, except for
            what is in memory, where they would only contend for Python's lock.
        """
        dataset, rows = self._batches(state, own)
        if graph.is_random_access(dataset):
            usual = READ_NOTHING_AHEAD if self._is_in_memory else READ_AHEAD
            dataset = dataset.to_iter_dataset(read_options=ahead or usual)
        iterator = iter(dataset if rows is None else experimental.RebatchIterDataset(dataset, rows))
        if state["native"] is not None:
            iterator.set_state(state["native"])
        return iterator

    @abc.abstractmethod
    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        """A Grain dataset of what is the stream's, and the size of batches that has yet to be made of it."""

    def check(self, state: State) -> None:
        """Raise unless a stream with this state has come to a place in the dataset.

        Raises:
          ValueError: it has not, as far as can be told without reading; the message says what is wrong.
        """
        return  # opening the stream says the rest

    def most_elements(self, states: Sequence[State]) -> int | None:
        """How many elements a pass can have given that has come to these states; ``None`` if that can't be told."""
        return None

    def regrouped(self, states: Sequence[State], rows: Sequence[int | None]) -> list[State]:
        """What is left of all streams, dealt out anew to streams with batches of these sizes.

        Raises:
          ValueError: that can't be done; the message says why.
        """
        if why := self.why_not_regrouped():
            raise ValueError(why)
        hands = self._dealt(states, len(rows))
        return [{**self.fresh(None, r), "parts": h} for h, r in zip(hands, rows, strict=True)]

    @abc.abstractmethod
    def _dealt(self, states: Sequence[State], count: int) -> list[list[Part]]:
        """What is left of all streams, for ``count`` others."""

    def why_not_regrouped(self) -> str | None:
        """Why a state can't go on with another number of streams; ``None`` if it can."""
        odd = [node for node in self._above if not graph.keeps_order(node)]
        return f"{odd[0]} comes after the batch, so what is left to read can't be told" if odd else None


def reading_of(source: Source) -> Reading:
    """How to read ``source``."""
    chain = graph.chain(source.dataset)
    at = next((i for i, node in enumerate(chain) if graph.is_batch(node)), None)
    above, batch, below = (chain, None, []) if at is None else (chain[:at], chain[at], chain[at + 1 :])
    if batch is not None and graph.is_random_access(batch) and all(map(graph.is_movable, above)):
        return Numbered(source, above, batch, below)
    is_filed = graph.file_source(chain[-1]) is not None and not graph.is_random_access(chain[0])
    if is_filed and all(map(graph.is_divisible, chain[:-1])):
        return Filed(source, above, batch, below)
    return Whole(source, above, batch)


class Numbered(Reading):
    """Batches of examples with numbers; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any, below: list[Any]) -> None:
        super().__init__(source, above, batch)
        self._below = below
        self._together = graph.only_selects(below)
        files = graph.file_source(below[-1])
        can_divide = files is not None and all(map(graph.is_divisible, [*above, batch, *below[:-1]]))
        self.files = tuple(files.files) if can_divide else None
        self.known_by = {"examples": len(self.examples_of(None))}
        # A function of the user's may make batches that depend on all their examples, such as padded ones.
        self.reads_own_rows = self.gives_new_arrays

    def examples_of(self, files: Sequence[str] | None) -> Any:
        """The examples that come from some of the files; ``None`` for all."""
        root = self._below[-1] if files is None else graph.with_files(self._below[-1], tuple(files))
        return graph.on_top_of(self._below[:-1], nodes.asked_together(root))

    def _count(self, files: Sequence[str] | None) -> int:
        return len(self.examples_of(files)) if files or files is None else 0

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        files = None if files is None else list(files)
        part = {"files": files, "start": 0, "stop": self._count(files)}
        return {"parts": [part], "native": None, "rows": rows or self.examples, "of": self.known_by}

    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        examples = [self._examples_in(part) for part in state["parts"] if part["start"] < part["stop"]]
        if not examples:
            return grain.MapDataset.source([]), None
        parent = examples[0] if len(examples) == 1 else grain.MapDataset.concatenate(examples)
        batch = graph.batched(parent, self._batch, state["rows"])
        batch = nodes.Batches(batch, own if self.reads_own_rows else None, self._together)
        return graph.on_top_of(self._above, batch), None

    def check(self, state: State) -> None:
        for part in state["parts"]:
            check_count(part["stop"], "the end of a part in the state", self._count(part["files"]))
            check_count(part["start"], "the start of a part in the state", part["stop"])
        if state["native"] is not None and self.why_not_regrouped() is None:
            batches = -(-size_of(state["parts"]) // state["rows"])
            check_count(find(state["native"], "next_index"), _NEXT, batches)

    def most_elements(self, states: Sequence[State]) -> int | None:
        return None if self.why_not_regrouped() else self.known_by["examples"]

    def _examples_in(self, part: Part) -> Any:
        examples = self.examples_of(part["files"])
        whole = part["start"] == 0 and part["stop"] == len(examples)
        return examples if whole else examples.slice(slice(part["start"], part["stop"]))

    def _dealt(self, states: Sequence[State], count: int) -> list[list[Part]]:
        left = []
        for state in states:
            batches = 0 if state["native"] is None else find(state["native"], "next_index")
            left += between(state["parts"], batches * state["rows"], size_of(state["parts"]))
        return dealt_evenly(left, count)


class Filed(Reading):
    """Records out of files, one after the other; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any, below: list[Any]) -> None:
        super().__init__(source, above if batch is not None else [], batch)
        self.length = None  # files are shared and resumed by their records, which nobody has counted
        self._below = below if batch is not None else above
        self._root = self._below[-1]
        self.files = tuple(graph.file_source(self._root).files)
        self.known_by = {"files": len(self.files)}
        has_positions = hasattr(self._root, "with_positions")
        self._can_split = has_positions and all(map(graph.has_parents_state, self._below[:-1]))

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        files = list((self.files or ()) if files is None else files)
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
        root = graph.with_files(self._root, tuple(part["files"]))
        return graph.on_top_of(self._below[:-1], root.with_positions(part["skip"]) if part["skip"] else root)

    def _dealt(self, states: Sequence[State], count: int) -> list[list[Part]]:
        left = []
        for state in states:
            parts = state["parts"]
            if state["native"] is not None:
                parts = find(state["native"], PARTS)
                if parts is None or (self._batch is None and state["rows"] is not None):
                    raise ValueError("the rest of a batch is left over, which can't be given to somebody else")
            left += parts
        if self._can_split:
            return dealt_by_file([self._by_position(part) for part in left], count)
        return [left[i::count] for i in range(count)]

    def _by_position(self, part: Part) -> Part:
        if part["state"] is None:
            return part
        root = graph.with_files(self._root, tuple(part["files"]))
        root = root.with_positions(part["skip"]) if part["skip"] else root
        finished = set(root.finished(part["state"]))
        files = [file for file in part["files"] if file not in finished]
        return {"files": files, "skip": {**part["skip"], **root.positions(part["state"])}, "state": None}


class Whole(Reading):
    """What nothing is known of but the order; see :class:`Reading`."""

    def __init__(self, source: Source, above: list[Any], batch: Any) -> None:
        super().__init__(source, above, batch)
        self._source = source
        self.examples, self.gives_new_arrays = self.batch_size, False
        # What Grain's iterator over batches remembers is a place in what comes before them.
        is_before = batch is not None and not graph.is_random_access(batch) and all(map(graph.keeps_order, above))
        is_replayed = isinstance(source.dataset, Replayed)
        self._takes_any_batch = is_before or is_replayed
        self.known_by = {
            "order": "replayed" if is_replayed else "Grain's",
            "batches of": graph.batch_sizes([graph.parent(batch) if is_before else source.dataset]),
        }

    def fresh(self, files: Sequence[str] | None, rows: int | None) -> State:
        return {"parts": None, "native": None, "rows": rows, "of": self.known_by}

    def _batches(self, state: State, own: Own | None) -> tuple[Any, int | None]:
        return self._source.dataset, state["rows"]

    def check(self, state: State) -> None:
        if state["native"] is None:
            return
        if isinstance(self._source.dataset, Replayed):
            check_count(find(state["native"], "rows"), "the rows that the state has come past")
        elif self.length is not None and state["rows"] is None and graph.is_random_access(self._source.dataset):
            check_count(find(state["native"], "next_index"), _NEXT, self.length)

    def most_elements(self, states: Sequence[State]) -> int | None:
        if self.length is None or not isinstance(self._source.dataset, Replayed):
            return None
        # The elements before may have been smaller than today's; each had a row, or was one of today's.
        return self.length + sum(find(s["native"], "rows") or 0 for s in states if s["native"] is not None)

    def regrouped(self, states: Sequence[State], rows: Sequence[int | None]) -> list[State]:
        return list(states) if [s["rows"] for s in states] == list(rows) else super().regrouped(states, rows)

    def _dealt(self, states: Sequence[State], count: int) -> list[list[Part]]:
        raise ValueError(f"{_ONLY_ORDER} {self._source.kind}")

    def why_not_regrouped(self) -> str | None:
        return None if self._takes_any_batch else f"{_ONLY_ORDER} {self._source.kind}"


_NEXT = "the number of the next batch in the state"
_ONLY_ORDER = "nothing but the order is known of"
