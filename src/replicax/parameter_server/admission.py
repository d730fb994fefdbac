"""Whether a function may be sent to a worker, beside what is running."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax.parameter_server.scheduled import Scheduled, WorkerAtWork

_LEAST_SECONDS = 1e-4
"""What takes less time than this is not told apart."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """What a function waits for.

    Attributes:
      groups: how many functions are a step; 1 if each is for itself.
      max_staleness: how many other functions may change variables while one runs; ``None`` for any number.
    """

    groups: int
    max_staleness: int | None

    def may_begin(self, scheduled: Scheduled, running: Sequence[Scheduled]) -> bool:
        """Whether a function may run beside these."""
        if not all(value.is_finished for value in scheduled.inputs):
            return False  # these were scheduled before, so they don't wait for this one
        if self.groups > 1:
            step = scheduled.number // self.groups
            return all(other.number // self.groups == step for other in running)
        if self.max_staleness is None:
            return True
        return len(running) <= self.max_staleness and all(other.beside < self.max_staleness for other in running)

    def may_have_next(
        self, worker: WorkerAtWork, workers: Sequence[WorkerAtWork], waiting: Sequence[Scheduled]
    ) -> bool:
        """Whether a worker that runs a function may have the next one, so that it pulls while it computes.

        Not if another worker would begin it sooner; nor where one of the two may be what has ended a process; nor in
        steps of several functions, as the next step reads what this one changes.
        """
        if len(worker.in_flight) != 1 or self.groups > 1:
            return False
        running, scheduled = worker.in_flight[0], waiting[0]
        seconds = worker.seconds.get(running.digest)
        if seconds is None or scheduled.digest not in worker.seconds or running.deaths or scheduled.deaths:
            return False
        others = [other.seconds.get(running.digest, seconds) for other in workers]
        return len(waiting) >= sum(seconds / max(other, _LEAST_SECONDS) for other in others)
