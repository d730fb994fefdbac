"""Who reads what: the policy that is used, and why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from replicax.data.input_options import AutoShardPolicy

if TYPE_CHECKING:
    from replicax.data.feed import Feed
    from replicax.data.reading.batches import Reading, State


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How workers share a dataset.

    Attributes:
      policy: FILE, DATA or OFF.
      why: in words.
      shared: whether all workers go through one and the same stream of batches.
    """

    policy: AutoShardPolicy
    why: str

    @property
    def shared(self) -> bool:
        return self.policy is AutoShardPolicy.DATA

    def fresh(self, reading: Reading, rows: list[int | None]) -> list[State]:
        """The states of all streams at the start; ``rows`` has the size of each worker's batches."""
        if self.shared:
            return [reading.fresh(None, None)]
        workers = len(rows)
        if self.policy is AutoShardPolicy.FILE and reading.files is not None:
            return [reading.fresh(reading.files[w::workers], rows[w]) for w in range(workers)]
        return [reading.fresh(None, rows[w]) for w in range(workers)]


def sharing_of(reading: Reading, policy: AutoShardPolicy, feed: Feed) -> Sharing:
    """How the workers of ``feed`` share what ``reading`` reads.

    Raises:
      ValueError: FILE, and there are fewer files than workers, or none at all.
    """
    files, workers = reading.files, feed.workers.count
    enough = files is not None and len(files) >= workers
    if policy is AutoShardPolicy.AUTO:
        if files is None:
            return Sharing(AutoShardPolicy.DATA, "AUTO: the source is no files that workers could share")
        if not enough:
            return Sharing(AutoShardPolicy.DATA, f"AUTO: {len(files)} file(s) are too few for {workers} workers")
        if reading.examples is not None and not all(feed.rows_of_workers(reading.examples)):
            return Sharing(
                AutoShardPolicy.DATA, f"AUTO: batches of {reading.examples} are too small for {workers} workers"
            )
        return Sharing(AutoShardPolicy.FILE, f"AUTO: there are {len(files)} files for {workers} worker(s)")
    if policy is AutoShardPolicy.FILE and not enough:
        have = "the source is no files that workers could share" if files is None else f"there are {len(files)} file(s)"
        raise ValueError(
            f"auto_shard_policy='file' gives each of {workers} workers at least one file, but {have}. Make more files, "
            "or share by 'data'."
        )
    return Sharing(policy, "as asked for")
