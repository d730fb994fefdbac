"""What each worker and replica will read, in words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from replicax.data.autoshard import Sharing
from replicax.data.feed import Feed
from replicax.data.input_options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.reading.sources import Source

if TYPE_CHECKING:
    from replicax.data.reading.batches import Reading

_PARTIAL = {
    PartialBatch.EXACT: "exact: each replica gets what there is",
    PartialBatch.PAD: "pad: filled up, and masked",
    PartialBatch.DROP: "drop: what is no full batch is left out",
}


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """What one worker reads.

    Attributes:
      worker: its number.
      reads: what, in words.
      files: the files that are its own; ``None`` if there are none.
      replicas: for each replica that it feeds, its number, and which rows of a batch it gets, in words.
    """

    worker: int
    reads: str
    files: tuple[str, ...] | None
    replicas: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class InputPlan:
    """What each worker and replica will read; get one with ``DistributedDataset.plan``.

    Attributes:
      policy: FILE, DATA or OFF.
      why: why this policy.
      source: what the dataset is.
      partial: what becomes of batches that are not full.
      resume: what a saved state can go on with.
      workers: what each worker reads.

    >>> import replicax, numpy as np
    >>> strategy = replicax.OneDeviceStrategy("cpu:0")
    >>> plan = strategy.distribute_dataset([np.zeros(4)] * 2).plan()
    policy   DATA (AUTO: the source is no files that workers could share)
    source   a list of batches, 2 batches of 4
    partial  exact: each replica gets what there is
    resume   with any number of workers and replicas, and other batch sizes
    worker 0 reads all batches
      replica 0 gets rows 0 to 3 of each batch
    >>> plan.policy
    <AutoShardPolicy.DATA: 'data'>
    """

    policy: AutoShardPolicy
    why: str
    source: str
    partial: str
    resume: str
    workers: tuple[WorkerPlan, ...]

    def __str__(self) -> str:
        lines = [
            f"policy   {self.policy.name} ({self.why})",
            f"source   {self.source}",
            f"partial  {self.partial}",
            f"resume   {self.resume}",
        ]
        for worker in self.workers:
            lines.append(f"worker {worker.worker} reads {worker.reads}")
            lines += [f"  {file}" for file in worker.files or ()]
            lines += [f"  replica {replica} gets {rows}" for replica, rows in worker.replicas]
        return "\n".join(lines)


def planned(
    source: Source,
    reading: Reading,
    sharing: Sharing,
    options: InputOptions,
    feed: Feed,
    batch: int | None,
    whole: bool,
) -> InputPlan:
    """The plan of a dataset; see :class:`InputPlan` and the arguments of ``DistributedDataset``."""
    assert isinstance(options.partial_batch, PartialBatch)
    count = f", {reading.length} batches" if reading.length is not None else ", batches"
    kind = source.kind + (f"{count} of {batch}" if batch else "")
    workers = []
    for worker, mine in enumerate(feed.ranges):
        files = None
        reads = "its own dataset"
        if sharing.policy is AutoShardPolicy.FILE and reading.files is not None:
            files = reading.files[worker :: feed.workers.count]
            reads = f"{len(files)} of {len(reading.files)} file(s)"
        elif sharing.shared:
            reads = "all batches"
            if feed.workers.count > 1:
                own = getattr(reading, "reads_own_rows", False)
                reads = "its own rows of each batch" if own else "all batches, and keeps its own rows"
        replicas = tuple(zip(mine, _rows(mine, sharing, feed, batch, whole), strict=True))
        workers.append(WorkerPlan(worker, reads, files, replicas))
    return InputPlan(
        sharing.policy,
        sharing.why,
        kind,
        _PARTIAL[options.partial_batch],
        how_to_resume(source, reading, sharing),
        tuple(workers),
    )


def _rows(mine: range, sharing: Sharing, feed: Feed, batch: int | None, whole: bool) -> list[str]:
    if whole:
        return ["whole batches, in turn"] * len(mine)
    if batch is None:
        return ["its share of each batch"] * len(mine)
    split = feed.rows_of_replicas(batch, sharing.shared)
    first = 0 if sharing.shared else mine.start
    of = "of each batch" if sharing.shared else f"of each {sum(split[mine.start : mine.stop])} of the worker's"
    rows = []
    for replica in mine:
        start = sum(split[first:replica])
        rows.append(f"rows {start} to {start + split[replica] - 1} {of}" if split[replica] else "nothing")
    return rows


def how_to_resume(source: Source, reading: Reading, sharing: Sharing) -> str:
    """What a saved state can go on with, in words."""
    if source.unrepeatable:
        return f"no: {source.unrepeatable}"
    if sharing.policy is AutoShardPolicy.OFF:
        return "with as many workers: each has a dataset of its own"
    why = reading.why_not_regrouped()
    if why is None:
        return "with any number of workers and replicas, and other batch sizes"
    if sharing.shared:
        return f"with any number of workers and replicas, but not with another batch size: {why}"
    return f"with as many workers only: {why}"
