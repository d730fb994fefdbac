"""``TrainingRun``: the facts of a run for callbacks and the caller of ``replicax.train``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from replicax.loop.wall_time import WallTime, table

if TYPE_CHECKING:
    from replicax.strategy import Strategy


class TrainingRun:
    """A run of :func:`replicax.train`: callbacks get it while it goes on, and the caller when it is over.

    Attributes:
      strategy: the one whose replicas run the steps.
      steps: how many steps there are to be.
      step: how many have been run, those before a resume included.
      resumed_at: the step that this run went on from; ``None`` if it began anew.
      numbers: what was logged last, before a resume too, by name: floats.
      evaluation: what the last evaluation gave, before a resume too, by name: floats; ``None`` if there was none yet.
      stopped: why the run ended before its last step, in words; ``None`` if it did not.
      restored: the step whose checkpoint was restored at the end (``restore_best``); ``None`` if none was.
      examples: how many examples this process's steps have had, on all replicas.
      examples_per_second: over the last few logging intervals, without compilation, evaluation and saving.
      attempts: how many attempts there were, this one included, as far as is known.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset([np.arange(4.0)])
    >>> run = replicax.train(lambda x: x.sum(), dataset, steps=3, progress=False)
    >>> run.step, run.numbers["loss"], run.stopped
    (3, 6.0, None)
    """

    def __init__(self, strategy: Strategy, steps: int, wall: WallTime, request: Callable[[str], None]) -> None:
        self.strategy = strategy
        self.steps = steps
        self.step = 0
        self.resumed_at: int | None = None
        self.numbers: dict[str, float] = {}
        self.evaluation: dict[str, float] | None = None
        self.stopped: str | None = None
        self.restored: int | None = None
        self.examples = 0
        self.examples_per_second = 0.0
        self.attempts = 1
        self._wall = wall
        self._all: Callable[[], dict[str, float]] = lambda: wall.seconds
        self._request = request

    @property
    def is_chief(self) -> bool:
        """Return whether this is the worker that writes files and shows what goes on; all workers run the callbacks."""
        return self.strategy.extended.replicas.lockstep.workers.index == 0

    @property
    def wall_time(self) -> dict[str, float]:
        """The seconds that this attempt has spent on each kind of work, until now; they add up to its wall time."""
        return self._wall.seconds

    @property
    def wall_time_of_all_attempts(self) -> dict[str, float]:
        """:attr:`wall_time` of this and earlier attempts, with ``"lost work"``: what they did in vain."""
        return self._all()

    def stop(self, why: str) -> None:
        """End the run after the step that is going on, as if it had come to its end: with all saved.

        Args:
          why: in words, for :attr:`stopped`.

        With several workers a call on one of them is enough; all end after the same step.
        """
        self._request(str(why))

    def time_table(self) -> str:
        """A table of where the time went, as text; it adds up to the wall time of all attempts."""
        return table(self.wall_time_of_all_attempts, self.attempts)

    def __repr__(self) -> str:
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"TrainingRun(step {self.step} of {self.steps}{stopped})"
