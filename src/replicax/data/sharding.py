"""Divide a dataset among workers: by files, by rows of its batches, or not at all."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from replicax.data.options import AutoShardPolicy

if TYPE_CHECKING:
    from replicax.data.reading.batches import Reading
    from replicax.data.workers import InputWorkers


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
