"""Options of distributed datasets: what each worker reads, and what happens to partial batches."""

from __future__ import annotations

import dataclasses
import enum

from replicax.argument_checks import checked_integer, parse_enum
from replicax.name_hints import with_hints


class AutoShardPolicy(enum.Enum):
    """The part of a dataset that each worker reads. Strings in any case work in place of an ``AutoShardPolicy``.

    >>> import replicax
    >>> replicax.InputOptions(auto_shard_policy="file").auto_shard_policy
    <AutoShardPolicy.FILE: 'file'>
    """

    AUTO = "auto"
    """FILE if the source consists of files, with at least one of them and a row of each batch for each worker; else
    DATA. The plan shows the choice."""
    FILE = "file"
    """Each worker reads files of its own."""
    DATA = "data"
    """Each worker takes its replicas' rows of every global batch."""
    OFF = "off"
    """Each worker reads all of the dataset that it was given, which has only its own examples; a step takes as many of
    them as the worker's part of a global batch."""


class PartialBatch(enum.Enum):
    """The treatment of a batch that does not give every replica as much as a full one does, such as the first.

    With PAD and DROP a larger one is an error.

    >>> import replicax
    >>> replicax.InputOptions(partial_batch="pad").partial_batch
    <PartialBatch.PAD: 'pad'>
    """

    EXACT = "exact"
    """Each replica gets the rows that there are. One compiled program for each size of a batch."""
    PAD = "pad"
    """The batch is padded and masked: losses, metrics and reductions ignore the padding. One compiled program."""
    DROP = "drop"
    """The batch is left out."""


@with_hints
@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of ``distribute_dataset`` and ``distribute_datasets_from_function``.

    Args:
      auto_shard_policy: what each of several workers reads; see :class:`AutoShardPolicy`.
      partial_batch: what to do with a last batch that is not full; see :class:`PartialBatch`.
      prefetch: how many elements wait on the devices, at least 0; with 0 there is no background thread. Where
        several workers agree on each element, up to 32 more (of 16 MiB together) wait on each worker's host.

    Raises:
      ValueError: an unknown policy or mode; a prefetch depth that is not a natural number.

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
        prefetch = checked_integer(self.prefetch, "InputOptions: prefetch", 0, " (0 for none)")
        object.__setattr__(self, "prefetch", prefetch)


def checked_input_options(options: InputOptions | None, method: str) -> InputOptions:
    """``options``, or the default ones."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"{method}: options must be InputOptions or None, got {options!r}")
    return options
