"""The input plan: a description of what each worker and replica will read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from replicax.data.options import AutoShardPolicy, PartialBatch

if TYPE_CHECKING:
    from replicax.data.pipeline import InputPipeline

_PARTIAL = {
    PartialBatch.EXACT: "exact: each replica gets what there is",
    PartialBatch.PAD: "pad: filled up, and masked",
    PartialBatch.DROP: "drop: a batch that is not full is left out",
}


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """The part of a dataset that one worker reads.

    Attributes:
      worker: its number.
      reads: a description.
      files: the files that only it reads; ``None`` if there are none.
      replicas: the number of each of its replicas, and a description of its rows of a batch.
    """

    worker: int
    reads: str
    files: tuple[str, ...] | None
    replicas: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class InputPlan:
    """The parts of a dataset that each worker and replica will read; get one with ``DistributedDataset.plan``.

    Attributes:
      policy: FILE, DATA or OFF.
      why: the reason for this policy.
      source: a description of the dataset.
      partial: what happens to partial batches.
      resume: what may change when a saved state is restored.
      workers: what each worker reads.

    >>> import replicax, numpy as np
    >>> strategy = replicax.OneDeviceStrategy("cpu:0")
    >>> plan = strategy.distribute_dataset([np.zeros(4)] * 2).plan()
    policy   DATA (AUTO: the source does not consist of files)
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


def planned(pipeline: InputPipeline) -> InputPlan:
    """The plan of a dataset; see :class:`InputPlan`."""
    reading, sharding, workers, batch = pipeline.reading, pipeline.sharding, pipeline.workers, pipeline.batch
    partial = pipeline.options.partial_batch
    assert isinstance(partial, PartialBatch)
    count = f", {reading.length} batches" if reading.length is not None else ", batches"
    kind = pipeline.source.kind + (f"{count} of {batch}" if batch else "")
    plans = []
    for worker, mine in enumerate(workers.ranges):
        files = pipeline.files_of(worker)
        if files is not None:
            reads = f"{len(files)} of {len(reading.files or ())} file(s)"
        elif not sharding.one_stream:
            reads = "its own dataset"
        elif workers.count == 1:
            reads = "all batches"
        elif reading.reads_own_rows:
            reads = "its own rows of each batch"
        else:
            reads = "all batches, and keeps its own rows"
        plans.append(WorkerPlan(worker, reads, files, tuple(zip(mine, _rows(mine, pipeline), strict=True))))
    resume = how_to_resume(pipeline)
    return InputPlan(sharding.policy, sharding.why, kind, _PARTIAL[partial], resume, tuple(plans))


def _rows(mine: range, pipeline: InputPipeline) -> list[str]:
    one_stream, batch = pipeline.sharding.one_stream, pipeline.batch
    if pipeline.whole:
        return ["whole batches, in turn"] * len(mine)
    split = pipeline.workers.rows_of_replicas(batch, one_stream)
    first = 0 if one_stream else mine.start
    of = "of each batch" if one_stream else f"of each {sum(split[mine.start : mine.stop])} of the worker's"
    rows = []
    for replica in mine:
        start = sum(split[first:replica])
        rows.append(f"rows {start} to {start + split[replica] - 1} {of}" if split[replica] else "nothing")
    return rows


def how_to_resume(pipeline: InputPipeline) -> str:
    """Return what may change when a saved state is restored, in words."""
    if pipeline.source.unrepeatable:
        return f"no: {pipeline.source.unrepeatable}"
    if pipeline.sharding.policy is AutoShardPolicy.OFF:
        return "with as many workers: each has a dataset of its own"
    own_batches = pipeline.workers.count > 1 and not pipeline.sharding.one_stream
    why = pipeline.reading.why_not_regrouped(own_batches)
    if why is None:
        return "with any number of workers and replicas, and other batch sizes"
    if pipeline.sharding.one_stream:
        return f"with any number of workers and replicas, but not with another batch size: {why}"
    return f"with as many workers only: {why}"
