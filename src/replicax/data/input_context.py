"""Which worker a dataset is made for, and which rows of a batch belong to whom."""

from __future__ import annotations

import dataclasses


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


def shares(rows: int, replicas: int) -> list[int]:
    """How many of ``rows`` each replica gets: the first ones their fill, the last ones what is left, maybe nothing.

    >>> from replicax.data.input_context import shares
    >>> shares(5, 4)
    [2, 2, 1, 0]
    """
    fill = -(-rows // replicas)
    return [min(fill, max(0, rows - i * fill)) for i in range(replicas)]
