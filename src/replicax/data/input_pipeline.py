"""How a worker reads a dataset: which streams of batches there are, and the elements from any place in them.

This module imports Grain, so it is itself imported only when a dataset is made.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from replicax.data.dataset_agreement import check_same_dataset
from replicax.data.elements.agreed_elements import ElementsOfOneStream, ElementsOfOwnStreams
from replicax.data.elements.announcements import Announcement, check_read
from replicax.data.elements.batch_rows import BatchRows, Checker, own_rows
from replicax.data.elements.elements import WHY_EMPTY, Elements
from replicax.data.elements.portions import Division, PortionsOfOneStream, PortionsOfOwnStream
from replicax.data.input_options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.input_workers import InputContext, InputWorkers
from replicax.data.reading.batches import READ_NOTHING_AHEAD, State, reading_of
from replicax.data.reading.sources import as_source
from replicax.data.sharing import Sharing, sharing_of
from replicax.execution.array_specs import PaddedShapeDtypeStruct


class InputPipeline:
    """How this worker reads a dataset. The arguments are those of ``DistributedDataset``.

    Attributes:
      workers: that the dataset is for.
      options: as the user gave them.
      whole: whether each batch is one replica's, rather than one for all.
      examples: whether it is one example of a replica's, whose arrays need have no rows.
      source: the dataset.
      reading: how its batches come to be.
      sharing: how workers share it.
    """

    def __init__(
        self,
        dataset: Any,
        options: InputOptions,
        workers: InputWorkers,
        method: str,
        dataset_fn: Callable[[InputContext], Any] | None,
        examples: bool = False,
    ) -> None:
        self.workers = workers
        self.options = options
        self.whole = dataset_fn is not None
        self.examples = examples
        self.source = as_source(dataset if dataset_fn is None else dataset_fn(workers.context), method)
        self.reading = reading_of(self.source)
        policy = options.auto_shard_policy
        assert isinstance(policy, AutoShardPolicy)
        if not self.whole and policy is not AutoShardPolicy.OFF:
            check_same_dataset(self.source, self.reading, policy.value, workers.lockstep, method)
        if self.whole:
            self.sharing = Sharing(AutoShardPolicy.OFF, "each worker has a dataset of its own")
        else:
            self.sharing = sharing_of(self.reading, policy, workers)
        if self.reading.length == 0:
            raise ValueError(f"{method}: the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        self._numbers = itertools.count()
        self._spec: Any = None
        self._batch: int | None = 1 if examples else self.reading.batch_size  # rows of a full one
        self._examples: int | None = None  # that a full batch is made of, where workers have agreed on it

    # --- what a batch is like ---------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """See ``DistributedDataset.element_spec``."""
        if self._spec is None:
            self._look()
        return self._spec

    @property
    def batch(self) -> int | None:
        """How many rows a full batch has; read to be seen, if need be."""
        if self._batch is None:
            self._look()
        return self._batch

    @property
    def cardinality(self) -> int | None:
        """See ``DistributedDataset.cardinality``."""
        is_one_stream = self.sharing.shared or (self.workers.count == 1 and not self.whole)
        return self.reading.length if is_one_stream and not self._drops else None

    @property
    def _drops(self) -> bool:
        """Whether a batch that is not full is left out."""
        drops = self.reading.drops_remainder and not self.sharing.shared
        return drops or self.options.partial_batch is PartialBatch.DROP

    def _look(self) -> None:
        """Read one batch, to see what it is like."""
        first = self._first_batch()
        if first is None:
            raise ValueError(f"the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        tree, rows = first
        if self._batch is None:
            self._batch = rows.size
        share = self._batch if self.whole else max(self.workers.rows_of_replicas(self._batch, self.sharing.shared))
        pads = self.options.partial_batch is PartialBatch.PAD
        kind: type[Any] = PaddedShapeDtypeStruct if pads else jax.ShapeDtypeStruct
        dims = () if self.examples else (share,)
        leaves = [kind((*dims, *shape), jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in rows.kinds()]
        self._spec = jax.tree_util.tree_unflatten(tree, leaves)

    def _first_batch(self) -> tuple[Any, BatchRows] | None:
        """The structure and the rows of this worker's first batch, if there is one."""
        batches = self.reading.opened(self.reading.fresh(None, None), ahead=READ_NOTHING_AHEAD)
        try:
            batch = next(batches)
        except StopIteration:
            return None
        finally:
            batches.close()
        checker = Checker(self.workers.replicas, self.examples)
        rows = checker.rows(batch, "element 0")
        return checker.tree, rows

    # --- streams ----------------------------------------------------------------------------------------

    def files_of(self, worker: int) -> tuple[str, ...] | None:
        """The files that only this worker reads; ``None`` if there are none."""
        return self.sharing.files_of(worker, self.workers.count, self.reading.files)

    def fresh(self) -> list[State]:
        """The states of all streams at the start: of each worker's, or of the one that all go through."""
        if self.sharing.shared:
            return [self.reading.fresh(None, None)]
        return [self.reading.fresh(self.files_of(worker), rows) for worker, rows in enumerate(self._rows_of_streams())]

    def _rows_of_streams(self) -> list[int | None]:
        """The sizes of the batches that each worker is to read; ``None``: as they come."""
        workers = self.workers.count
        if self.whole or workers == 1:
            return [None] * workers
        if self._examples is None:
            self._examples = self._agreed_examples()
        rows = self.workers.rows_of_workers(self._examples)
        if not all(rows):
            raise ValueError(
                f"a batch of {self._examples} is too small for {workers} workers that read batches of their own: there "
                f"is nothing for worker {rows.index(0)}. Use larger batches, or auto_shard_policy='data'."
            )
        return list(rows)

    def _agreed_examples(self) -> int:
        """The size of a full batch, one for all workers, which read datasets of their own."""
        examples, rows, error = self.reading.examples, 0, None
        if examples is None:
            try:
                first = self._first_batch()
                rows = 0 if first is None else first[1].size
            except Exception as e:  # the others would wait
                error = e
        why = None if error is None else Announcement.of_error(error).error
        everyone = self.workers.series("batch size").exchange(json.dumps([examples, rows, why]).encode())
        told = [json.loads(theirs) for theirs in everyone]
        if error is not None:
            raise error
        check_read([Announcement(error=why) for _, _, why in told], "element 0")
        found = [examples for examples, _, _ in told]
        sizes = {examples for examples in found if examples is not None}
        if len(sizes) > 1:
            raise ValueError(f"the workers' datasets have global batches of different sizes: {found}")
        largest = max(rows for _, rows, _ in told)
        if not sizes and not largest:
            raise ValueError(f"the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        if sizes:
            return int(sizes.pop())
        self._batch = largest if all(self.workers.rows_of_workers(largest)) else self.workers.replicas
        return self._batch

    def everyones_streams(self, streams: list[State], native: Any) -> list[State]:
        """The states of all streams, now that this worker's Grain iterator has come to ``native``."""
        if self.sharing.shared:
            return [{**streams[0], "native": native}]
        mine = {**streams[self.workers.index], "native": native}
        everyone = self.workers.series(f"state {next(self._numbers)}").exchange(json.dumps(mine).encode())
        return [json.loads(state) for state in everyone]

    # --- elements ---------------------------------------------------------------------------------------

    def opened(self, streams: list[State], position: int, batch: int | None) -> Elements:
        """The elements from where the streams have come; ``batch`` is the size of a full batch, if nothing else is."""
        workers, shared = self.workers, self.sharing.shared
        own = None
        if shared and workers.count > 1:
            own = functools.partial(own_rows, replicas=workers.replicas, mine=workers.mine)
        batches = self.reading.opened(streams[0 if shared else workers.index], own)
        # Where all go through one stream, and its length was compared beforehand, there is nothing to agree on.
        agrees = (self.whole or workers.count > 1) and not (shared and self.reading.length is not None)
        division, place = self._division(batch, agrees), workers.placer()
        if not agrees:
            return Elements(PortionsOfOneStream(batches, division), division, place, position)
        exchange = workers.series(f"pass {next(self._numbers)}, element")
        ahead = self.options.prefetch > 0 and workers.count > 1
        portions = (PortionsOfOneStream if shared else PortionsOfOwnStream)(batches, division, ahead)
        kind = ElementsOfOneStream if shared else ElementsOfOwnStreams
        return kind(exchange, ahead, portions, division, place, position)

    def _division(self, batch: int | None, agrees: bool) -> Division:
        partial = PartialBatch.DROP if self._drops else self.options.partial_batch
        assert isinstance(partial, PartialBatch)
        if self._batch is None and batch is not None and not agrees and partial is not PartialBatch.EXACT:
            self._look()  # what is left of a batch may come first, and the state may be of batches of another size
        batch = batch if self._batch is None or self.whole else self._batch
        workers, rows = self.workers, None
        if batch is not None:
            rows = (batch,) * workers.replicas if self.whole else workers.rows_of_replicas(batch, self.sharing.shared)
        new = self.reading.gives_new_arrays
        kind = self.source.kind
        return Division(kind, workers.replicas, workers.mine, partial, self.whole, self.examples, rows, new)
