"""The workers that a dataset is for, and the replicas of each."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.data.elements.batch_rows import shares
from replicax.data.elements.to_devices import placer
from replicax.workers.exchange import Series
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.data.elements.chunks import Staged
    from replicax.data.elements.elements import Element


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Which worker a dataset is made for; see ``Strategy.distribute_datasets_from_function``.

    Attributes:
      num_input_pipelines: how many workers there are, each with a dataset of its own.
      input_pipeline_id: this worker's number, from 0.
      num_replicas_in_sync: how many replicas all workers have together.

    >>> import replicax
    >>> context = replicax.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_input_pipelines < 1 or self.num_replicas_in_sync < 1:
            raise ValueError(f"an InputContext has at least one input pipeline and one replica, got {self!r}")
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be at least 0 and below num_input_pipelines ({self.num_input_pipelines}), got "
                f"{self.input_pipeline_id}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """How many examples of a global batch each replica gets.

        Raises:
          ValueError: the global batch does not divide by the number of replicas.
        """
        n = self.num_replicas_in_sync
        if global_batch_size % n:
            raise ValueError(
                f"a global batch of {global_batch_size} does not divide over {n} replicas ({global_batch_size} = "
                f"{n} × {global_batch_size // n} + {global_batch_size % n})"
            )
        return global_batch_size // n


@dataclasses.dataclass(frozen=True)
class InputWorkers:
    """The workers that a dataset is for.

    Attributes:
      lockstep: how they tell each other things, in one order.
      ranges: which replicas each worker feeds.
      placer: makes the function that puts elements on the devices.
      name: to tell the dataset from others, the same on all workers.
      owner: the replicas that the elements are for.
    """

    lockstep: Lockstep
    ranges: tuple[range, ...]
    placer: Callable[[], Callable[[Element | Staged], Any]]
    name: str = "input"
    owner: Replicas | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return self.lockstep.workers.count

    @property
    def index(self) -> int:
        """The number of this one."""
        return self.lockstep.workers.index

    @property
    def replicas(self) -> int:
        """How many there are on all workers."""
        return self.ranges[-1].stop

    @property
    def mine(self) -> range:
        """The replicas that this worker feeds."""
        return self.ranges[self.index]

    @property
    def context(self) -> InputContext:
        """What functions that make datasets are told."""
        return InputContext(self.count, self.index, self.replicas)

    def series(self, topic: str) -> Series:
        """Of exchanges about ``topic`` of this dataset."""
        return self.lockstep.series(f"{self.name}, {topic}")

    def rows_of_workers(self, batch: int) -> list[int]:
        """How many rows of a batch are for each worker, where workers read batches of their own."""
        bounds = [-(-batch * mine.stop // self.replicas) for mine in self.ranges]
        return [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]

    def rows_of_replicas(self, batch: int, shared: bool) -> tuple[int, ...]:
        """How many rows of a full batch each replica gets; ``shared`` if all workers have the same batches."""
        if shared:
            return tuple(shares(batch, self.replicas))
        rows = self.rows_of_workers(batch)
        return tuple(x for size, mine in zip(rows, self.ranges, strict=True) for x in shares(size, len(mine)))


_numbers: weakref.WeakKeyDictionary[Replicas, itertools.count[int]] = weakref.WeakKeyDictionary()


def workers_of(replicas: Replicas) -> InputWorkers:
    """The workers of the next dataset for ``replicas``. All make their datasets in the same order."""
    owners = [device.process_index for device in replicas.devices]
    ranges = []
    for _, group in itertools.groupby(range(len(owners)), owners.__getitem__):
        mine = list(group)
        ranges.append(range(mine[0], mine[-1] + 1))
    number = next(_numbers.setdefault(replicas, itertools.count()))
    return InputWorkers(replicas.lockstep, tuple(ranges), lambda: placer(replicas), f"dataset {number}", replicas)
