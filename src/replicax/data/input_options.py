"""How a dataset is shared by workers and divided over replicas."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from replicax.enums import parse_enum

if TYPE_CHECKING:
    from replicax.data.input_workers import InputWorkers
    from replicax.data.reading.batches import Reading


class AutoShardPolicy(enum.Enum):
    """What each worker reads. Strings in any case work wherever an ``AutoShardPolicy`` does.

    >>> import replicax
    >>> replicax.InputOptions(auto_shard_policy="file").auto_shard_policy
    <AutoShardPolicy.FILE: 'file'>
    """

    AUTO = "auto"
    """FILE where the source is files, with at least one, and a row of each batch, for each worker; else DATA. The plan
    says which."""
    FILE = "file"
    """Whole files of its own."""
    DATA = "data"
    """Of every global batch, the rows of its own replicas."""
    OFF = "off"
    """All of the dataset that it was given: its own examples already, of which a step takes the worker's share."""


class PartialBatch(enum.Enum):
    """What becomes of a batch that does not give every replica as much as a full one does.

    >>> import replicax
    >>> replicax.InputOptions(partial_batch="pad").partial_batch
    <PartialBatch.PAD: 'pad'>
    """

    EXACT = "exact"
    """Each replica gets what there is. One compiled program for each size of a batch."""
    PAD = "pad"
    """Filled up, and masked: losses, metrics and reductions leave the filling out. One compiled program."""
    DROP = "drop"
    """Left out."""


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How ``distribute_dataset`` and ``distribute_datasets_from_function`` feed the replicas.

    Args:
      auto_shard_policy: what each of several workers reads; see :class:`AutoShardPolicy`.
      partial_batch: what to do with a last batch that is not full; see :class:`PartialBatch`.
      prefetch: how many elements wait on the devices, at least 0; with 0 nothing happens in the background.

    Raises:
      ValueError: an unknown policy or mode; a prefetch depth that is no natural number.

    >>> import replicax
    >>> replicax.InputOptions(partial_batch="drop").prefetch
    2
    """

    auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO
    partial_batch: PartialBatch | str = PartialBatch.EXACT
    prefetch: int = 2

    def __post_init__(self) -> None:
        policy = parse_enum(AutoShardPolicy, self.auto_shard_policy, "InputOptions: auto_shard_policy")
        partial = parse_enum(PartialBatch, self.partial_batch, "InputOptions: partial_batch")
        object.__setattr__(self, "auto_shard_policy", policy)
        object.__setattr__(self, "partial_batch", partial)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"InputOptions: prefetch must be a natural number (0 for none), got {self.prefetch!r}")


def checked_input_options(options: InputOptions | None, method: str) -> InputOptions:
    """``options``, or the usual ones.

    Raises:
      TypeError: it is something else.
    """
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"{method}: options must be InputOptions or None, got {options!r}")
    return options


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


def sharing_of(reading: Reading, policy: AutoShardPolicy, workers: InputWorkers) -> Sharing:
    """How ``workers`` share what ``reading`` reads.

    Raises:
      ValueError: FILE, and there are fewer files than workers, or none at all.
    """
    files, count = reading.files, workers.count
    enough = files is not None and len(files) >= count
    if policy is AutoShardPolicy.AUTO:
        if files is None:
            return Sharing(AutoShardPolicy.DATA, "AUTO: the source is no files that workers could share")
        if not enough:
            return Sharing(AutoShardPolicy.DATA, f"AUTO: {len(files)} file(s) are too few for {count} workers")
        if reading.examples is not None and not all(workers.rows_of_workers(reading.examples)):
            return Sharing(
                AutoShardPolicy.DATA, f"AUTO: batches of {reading.examples} are too small for {count} workers"
            )
        return Sharing(AutoShardPolicy.FILE, f"AUTO: there are {len(files)} files for {count} worker(s)")
    if policy is AutoShardPolicy.FILE and not enough:
        have = "the source is no files that workers could share" if files is None else f"there are {len(files)} file(s)"
        raise ValueError(
            f"auto_shard_policy='file' gives each of {count} workers at least one file, but {have}. Make more files, "
            "or share by 'data'."
        )
    return Sharing(policy, "as asked for")
