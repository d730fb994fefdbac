"""The input pipeline of a worker: its streams of batches, and the elements from any place in them.

This module imports Grain, so it is imported only when a dataset is created.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax

from replicax.data.batches.agreed_batches import AgreedBatches
from replicax.data.batches.announcements import Announcement, check_read
from replicax.data.batches.global_batches import WHY_EMPTY, GlobalBatches
from replicax.data.batches.local_batches import Division, LocalBatches
from replicax.data.batches.rows import BatchRows, Checker, own_rows
from replicax.data.options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.reading.batches import READ_NOTHING_AHEAD, Reading, State, reading_of
from replicax.data.reading.sources import as_source
from replicax.data.same_dataset import check_same_dataset
from replicax.data.workers import InputWorkers
from replicax.extended.described_arguments import PaddedShapeDtypeStruct


class InputPipeline:
    """This worker's way of reading a dataset. The arguments are those of ``DistributedDataset``."""

    def __init__(
        self,
        dataset: Any,
        options: InputOptions,
        workers: InputWorkers,
        method: str,
        whole: bool,
        examples: bool,
    ) -> None:
        self.workers = workers
        self.options = options
        self.whole = whole  # each batch is for one replica, rather than for all
        self.examples = examples  # a batch is one example of a replica, whose arrays need have no rows
        self.source = as_source(dataset, method)
        self.reading = reading_of(self.source)
        policy = options.auto_shard_policy
        assert isinstance(policy, AutoShardPolicy)
        if not self.whole and policy is not AutoShardPolicy.OFF:
            check_same_dataset(self.source, self.reading, policy.value, workers.lockstep, method)
        if self.whole:
            self.sharding = DatasetSharding(AutoShardPolicy.OFF, "each worker has a dataset of its own")
        else:
            self.sharding = sharding_of(self.reading, policy, workers)
        if self.reading.length == 0:
            raise ValueError(f"{method}: the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        self._numbers = itertools.count()
        self._exchanges_of_sizes = itertools.count()
        self._batch: int | None = 1 if examples else self.reading.batch_size  # rows of a full batch, for all workers
        self._examples: int | None = None  # of a full batch, once workers have agreed on it

    # --- the form of a batch ----------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """See ``DistributedDataset.element_spec``."""
        return self._look[0]

    @property
    def batch(self) -> int:
        """The number of rows of a full batch; reads one if necessary."""
        return self._look[1] if self._batch is None else self._batch

    @property
    def cardinality(self) -> int | None:
        """See ``DistributedDataset.cardinality``."""
        is_one_stream = self.sharding.one_stream or (self.workers.count == 1 and not self.whole)
        return self.reading.length if is_one_stream and not self._drops else None

    @property
    def _drops(self) -> bool:
        """Return whether partial batches are left out."""
        drops = self.reading.drops_remainder and not self.sharding.one_stream
        return drops or self.options.partial_batch is PartialBatch.DROP

    @functools.cached_property
    def _look(self) -> tuple[Any, int]:
        """The form of one replica's part of a batch, and the number of its rows; reads this worker's first batch."""
        first = self._first_batch()
        if first is None:
            raise ValueError(f"the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        tree, rows = first
        batch = rows.size if self._batch is None else self._batch
        share = batch if self.whole else max(self.workers.rows_of_replicas(batch, self.sharding.one_stream))
        pads = self.options.partial_batch is PartialBatch.PAD
        kind: type[Any] = PaddedShapeDtypeStruct if pads else jax.ShapeDtypeStruct
        dims = () if self.examples else (share,)
        leaves = [kind((*dims, *shape), jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in rows.kinds()]
        return jax.tree_util.tree_unflatten(tree, leaves), rows.size

    def _first_batch(self) -> tuple[Any, BatchRows] | None:
        """The structure and the rows of this worker's first batch, if there is one."""
        batches = self.reading.opened(self.reading.fresh(None, None), ahead=READ_NOTHING_AHEAD)
        try:
            batch = next(batches)
        except StopIteration:
            return None
        finally:
            batches.close()
        checker = Checker(self.workers.replicas, self.examples, self.source.kind)
        rows = checker.rows(batch, "element 0")
        return checker.tree, rows

    # --- streams ----------------------------------------------------------------------------------------

    def files_of(self, worker: int) -> tuple[str, ...] | None:
        """The files that only this worker reads; ``None`` if there are none."""
        files = self.reading.files if self.sharding.policy is AutoShardPolicy.FILE else None
        return None if files is None else files[worker :: self.workers.count]

    def fresh(self) -> list[State]:
        """The states of all streams at the start: one for each worker, or the one that all workers read."""
        if self.sharding.one_stream:
            return [self.reading.fresh(None, None)]
        return [self.reading.fresh(self.files_of(worker), rows) for worker, rows in enumerate(self._rows_of_streams())]

    def _rows_of_streams(self) -> list[int | None]:
        """The sizes of the batches of each worker's stream; ``None``: the dataset's own."""
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
        """The size of a full batch, agreed on by all workers, which read different datasets."""
        everyones = self._everyones_batches(self.reading.examples)
        examples_of_workers = [examples for examples, _ in everyones]
        sizes = {examples for examples in examples_of_workers if examples is not None}
        if len(sizes) > 1:
            raise ValueError(f"the workers' datasets have global batches of different sizes: {examples_of_workers}")
        largest = max(rows for _, rows in everyones)
        if not sizes and not largest:
            raise ValueError(f"the dataset, {self.source.kind}, is empty. {WHY_EMPTY}")
        if sizes:
            return int(sizes.pop())
        self._batch = largest if all(self.workers.rows_of_workers(largest)) else self.workers.replicas
        return self._batch

    def _everyones_batches(self, size: int | None) -> list[tuple[int | None, int]]:
        """Gather each worker's ``size`` of a batch and, where it is ``None``, the number of rows of its first batch."""
        rows, error = 0, None
        if size is None:
            try:
                first = self._first_batch()
                rows = 0 if first is None else first[1].size
            except Exception as e:  # tell the others, which would wait
                error = e
        why = None if error is None else Announcement.of_error(error).error
        series = self.workers.series(f"batch size {next(self._exchanges_of_sizes)}")
        told = [json.loads(theirs) for theirs in series.exchange(json.dumps([size, rows, why]).encode())]
        if error is not None:
            raise error
        check_read([Announcement(error=why) for _, _, why in told], "element 0")
        return [(size, rows) for size, rows, _ in told]

    def everyones_streams(self, streams: list[State], native: Any) -> list[State]:
        """The states of all streams, where this worker's Grain iterator has reached ``native``."""
        if self.sharding.one_stream:
            return [{**streams[0], "native": native}]
        mine = {**streams[self.workers.index], "native": native}
        everyone = self.workers.series(f"state {next(self._numbers)}").exchange(json.dumps(mine).encode())
        return [json.loads(state) for state in everyone]

    # --- elements ---------------------------------------------------------------------------------------

    def opened(self, streams: list[State], position: int, batch: int | None) -> GlobalBatches:
        """The elements from the given places of the streams; ``batch`` is a full batch's size if it is not known."""
        workers, one_stream = self.workers, self.sharding.one_stream
        own, division = None, self._division(batch)
        if one_stream and workers.count > 1:
            own = functools.partial(own_rows, replicas=workers.replicas, mine=workers.mine)
        batches = self.reading.opened(streams[0 if one_stream else workers.index], own)
        # If all workers read one stream, and its length was compared before, they need not agree on each element.
        agrees = (self.whole or workers.count > 1) and not (one_stream and self.reading.length is not None)
        place = workers.placer()
        if not agrees:
            return GlobalBatches(LocalBatches(batches, division), division, place, position)
        exchange = workers.series(f"pass {next(self._numbers)}, element")
        ahead = self.options.prefetch > 0 and workers.count > 1
        local_batches = LocalBatches(batches, division, one_stream, ahead)
        return AgreedBatches(exchange, one_stream, ahead, local_batches, division, place, position)

    def _division(self, batch: int | None) -> Division:
        partial = PartialBatch.DROP if self._drops else self.options.partial_batch
        assert isinstance(partial, PartialBatch)
        if batch is not None and partial is not PartialBatch.EXACT:
            # The state may be of batches of another size, and what is left of one may come first.
            batch = max(size or rows for size, rows in self._everyones_batches(self._batch)) or batch
        elif self._batch is not None and not self.whole:
            batch = self._batch
        workers, rows = self.workers, None
        if batch is not None:
            rows = (
                (batch,) * workers.replicas if self.whole else workers.rows_of_replicas(batch, self.sharding.one_stream)
            )
        own = () if self._examples is None else tuple(workers.rows_of_workers(self._examples))
        new = self.reading.gives_new_arrays
        kind = self.source.kind
        return Division(kind, workers.replicas, workers.mine, partial, self.whole, self.examples, rows, own, new)


# --- how workers divide a dataset -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DatasetSharding:
    """The division of a dataset among workers."""

    policy: AutoShardPolicy  # FILE, DATA or OFF
    why: str  # the reason

    @property
    def one_stream(self) -> bool:
        """Return whether all workers read the same stream of batches."""
        return self.policy is AutoShardPolicy.DATA


def sharding_of(reading: Reading, policy: AutoShardPolicy, workers: InputWorkers) -> DatasetSharding:
    """Choose how ``workers`` divide the dataset that ``reading`` reads."""
    files, count = reading.files, workers.count
    enough = files is not None and len(files) >= count
    if policy is AutoShardPolicy.AUTO:
        if files is None:
            return DatasetSharding(AutoShardPolicy.DATA, f"AUTO: {reading.why_no_files}")
        if not enough:
            return DatasetSharding(AutoShardPolicy.DATA, f"AUTO: {len(files)} file(s) are too few for {count} workers")
        if reading.examples is not None and not all(workers.rows_of_workers(reading.examples)):
            return DatasetSharding(
                AutoShardPolicy.DATA, f"AUTO: batches of {reading.examples} are too small for {count} workers"
            )
        return DatasetSharding(AutoShardPolicy.FILE, f"AUTO: there are {len(files)} files for {count} worker(s)")
    if policy is AutoShardPolicy.FILE and not enough:
        have = reading.why_no_files if files is None else f"there are {len(files)} file(s)"
        raise ValueError(
            f"auto_shard_policy='file' gives each of {count} workers at least one file, but {have}. Make more files, "
            "or share by 'data'."
        )
    return DatasetSharding(policy, "as asked for")
