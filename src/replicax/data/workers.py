"""The workers of a dataset, and the replicas of each."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.argument_checks import as_integer, checked_integer
from replicax.data.batches.rows import rows_per_replica
from replicax.data.batches.to_devices import placer
from replicax.workers.exchange import Series
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.data.batches.local_batches import BatchGroup, HostBatch


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The worker that a dataset is made for; see ``Strategy.distribute_datasets_from_function``.

    Attributes:
      num_input_pipelines: the number of workers, each with its own dataset.
      input_pipeline_id: this worker's number, from 0.
      num_replicas_in_sync: the number of replicas on all workers.

    >>> import replicax
    >>> context = replicax.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            checked_integer(getattr(self, name), f"InputContext: {name}")
        if as_integer(self.input_pipeline_id) is None or not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be an int of at least 0 and below num_input_pipelines "
                f"({self.num_input_pipelines}), got {self.input_pipeline_id!r}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The number of examples of a global batch for each replica.

        Raises:
          ValueError: the global batch is no positive int, or does not divide by the number of replicas.
        """
        n = self.num_replicas_in_sync
        global_batch_size = checked_integer(global_batch_size, "get_per_replica_batch_size: global_batch_size")
        if global_batch_size % n:
            raise ValueError(
                f"a global batch of {global_batch_size} does not divide over {n} replicas ({global_batch_size} = "
                f"{n} × {global_batch_size // n} + {global_batch_size % n})"
            )
        return global_batch_size // n


@dataclasses.dataclass(frozen=True)
class InputWorkers:
    """The workers of a dataset."""

    lockstep: Lockstep  # the lockstep of the workers
    ranges: tuple[range, ...]  # the replicas that each worker feeds
    # Makes the function that puts elements on the devices.
    placer: Callable[[], Callable[[HostBatch | BatchGroup], Any]]
    name: str  # identifies the dataset, the same on all workers
    owner: Replicas | None = None  # the replicas that the elements are for

    @property
    def count(self) -> int:
        """The number of workers."""
        return self.lockstep.workers.count

    @property
    def index(self) -> int:
        """The number of this worker."""
        return self.lockstep.workers.index

    @property
    def replicas(self) -> int:
        """The number of replicas on all workers."""
        return self.ranges[-1].stop

    @property
    def mine(self) -> range:
        """The replicas that this worker feeds."""
        return self.ranges[self.index]

    @property
    def context(self) -> InputContext:
        """The context for functions that make datasets."""
        return InputContext(self.count, self.index, self.replicas)

    def series(self, topic: str) -> Series:
        """A series of exchanges about ``topic`` of this dataset."""
        return self.lockstep.series(f"{self.name}, {topic}")

    def rows_of_workers(self, batch: int) -> list[int]:
        """The number of rows of a batch for each worker, if workers read separate batches."""
        bounds = [-(-batch * mine.stop // self.replicas) for mine in self.ranges]
        return [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]

    def rows_of_replicas(self, batch: int, one_stream: bool) -> tuple[int, ...]:
        """The number of rows of a full batch for each replica; ``one_stream`` if all workers read the same batches."""
        if one_stream:
            return tuple(rows_per_replica(batch, self.replicas))
        rows = self.rows_of_workers(batch)
        return tuple(x for size, mine in zip(rows, self.ranges, strict=True) for x in rows_per_replica(size, len(mine)))


_numbers: weakref.WeakKeyDictionary[Replicas, itertools.count[int]] = weakref.WeakKeyDictionary()


def workers_of(replicas: Replicas) -> InputWorkers:
    """The workers of the next dataset for ``replicas``. All workers must make their datasets in the same order."""
    owners = [device.process_index for device in replicas.worker_devices]
    ranges = []
    for _, group in itertools.groupby(range(len(owners)), owners.__getitem__):
        mine = list(group)
        ranges.append(range(mine[0], mine[-1] + 1))
    number = next(_numbers.setdefault(replicas, itertools.count()))
    return InputWorkers(replicas.lockstep, tuple(ranges), lambda: placer(replicas), f"dataset {number}", replicas)
