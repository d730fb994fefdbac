"""``CheckpointManager``: manages the checkpoints of a run in one folder."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from replicax import _jax
from replicax.argument_checks import checked_folder, checked_integer, is_number
from replicax.checkpoint.background_save import wait_for_all
from replicax.checkpoint.checkpoint import Checkpoint, check_outside
from replicax.checkpoint.complete_checkpoint import find_complete
from replicax.checkpoint.retention import Best, Folder, best_of
from replicax.errors import CheckpointError
from replicax.name_hints import NameHints
from replicax.system.folders import make_folder
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase
from replicax.workers.lockstep import Lockstep

log = logging.getLogger("replicax")

_MOST_LINES = 20


@_jax.hiding_frames_of
class CheckpointManager(NameHints):
    """The checkpoints of a run in one folder: when to save, which one to restore, and how long to keep each.

    Call :meth:`save` after every step, and :meth:`restore_latest` before the first. Checkpoints are written in the
    background. Each has its own folder, such as ``step-00000120``.

    With several workers all create the same manager, and call its methods together. It detects whether they share a
    disk; if they don't, each disk has its own folder.

    Args:
      checkpoint: the objects to save.
      directory: the folder; created if necessary.
      max_to_keep: the number of newest checkpoints to keep; ``None`` for all. Only checkpoints that this manager has
        written, in this run or an earlier one with the same folder, are ever deleted.
      every_steps: save when so many steps, or more, have been made; at multiples of it if steps come one by one.
      every_seconds: save when so many seconds have passed. With both, whichever comes first; with neither, each call
        of :meth:`save` saves.
      best: the name of a metric, and ``"min"`` or ``"max"``: the best checkpoint is kept, too, however old it is.

    Raises:
      ValueError: numbers that are not positive; a ``best`` that is not as described; an empty ``directory``.
      TypeError: ``checkpoint`` is not a :class:`Checkpoint`, or ``directory`` not a path.
      OSError: the folder can't be created, or not be written to.

    >>> import tempfile, replicax
    >>> w = replicax.Variable(0.0)
    >>> checkpoint = replicax.Checkpoint(model=w)
    >>> with replicax.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2, every_steps=10) as manager:
    ...     start = manager.restore_latest() or 0
    ...     for step in range(start + 1, 36):
    ...         _ = w.assign_add(1.0)
    ...         _ = manager.save(step)
    >>> start, manager.steps
    (0, (20, 30))
    >>> manager.restore_latest(), float(w.value)
    (30, 30.0)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 5,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        best: Best | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"CheckpointManager: checkpoint must be a replicax.Checkpoint, got {checkpoint!r}")
        self.checkpoint = checkpoint
        self._max_to_keep = _count(max_to_keep, "max_to_keep")
        self._every_steps = _count(every_steps, "every_steps")
        if every_seconds is not None and not (is_number(every_seconds) and every_seconds > 0):
            raise ValueError(f"CheckpointManager: every_seconds must be a positive number, got {every_seconds!r}")
        self._best = _checked_best(best)
        self._folder = Folder(checked_folder(directory, "CheckpointManager: directory"))
        self._lockstep = checkpoint._lockstep
        self._alarm = None if every_seconds is None else _Alarm(every_seconds, self._lockstep)
        self._prepare()
        self._last = 0
        self._damaged: set[int] = set()

    def _prepare(self) -> None:
        """Create the folder, and find its checkpoints."""
        wait_for_all()  # another manager of this folder may be saving there still, as that of a run that has failed
        path, lockstep = self._folder.path, self._lockstep
        with lockstep.failing_together("CheckpointManager"):
            make_folder(path)
            self._leads = lockstep.workers.index in {group[0] for group in self.checkpoint._groups_at(path)}
            if self._leads:
                self._folder.own()
            lockstep.exchange("looks whose the folder is", None, path)
            self._folder.own()  # which the first worker on its disk has created
            complete = self._folder.complete()
        found = lockstep.exchange("lists its checkpoints", complete, path)
        self._steps = {step: theirs[step] for theirs in reversed(found) for step in theirs}
        self._elsewhere = self._steps.keys() - complete.keys()  # only on disks of other workers

    @property
    def directory(self) -> str:
        """The folder."""
        return self._folder.path

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete checkpoint, the newest last."""
        return tuple(sorted(self._steps.keys() & {*self._folder.steps(), *self._elsewhere}))

    @property
    def latest_step(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps, default=None)

    @property
    def best(self) -> Best | None:
        """The metric by which a checkpoint is the best, and ``"min"`` or ``"max"``; ``None`` if none was given."""
        return self._best

    @property
    def best_step(self) -> int | None:
        """The latest step with the best metric; ``None`` without ``best``, or if no step was saved with it."""
        return best_of({step: self._steps[step] for step in self.steps}, self._best)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None, force: bool = False) -> bool:
        """Save if a save is due.

        Args:
          step: the number of steps so far.
          metrics: numbers by name, stored with the checkpoint.
          force: save even if none is due, as at the end of a run.

        Returns:
          Whether a save has begun.

        Raises:
          ValueError: there is a checkpoint of this step, or of a later one: restore the latest first, or use another
            folder. Metrics that are not numbers, or lack that of ``best``.
          TypeError: ``metrics`` is not a dict.
          CheckpointError: the previous save failed. It is raised once.
          OSError, ContextError: as :meth:`Checkpoint.save`.
        """
        self.checkpoint._background.check()
        step = checked_integer(step, "CheckpointManager.save: step", 0)
        if not self._is_due(step) and not force:
            return False
        self._save(step, self._checked_metrics(metrics))
        return True

    @heartbeat.phase(Phase.SAVING)
    def _save(self, step: int, metrics: dict[str, float]) -> None:
        """Save; ``replicax.train`` has no metrics at a step without an evaluation."""
        self.checkpoint.wait()
        latest = max(self._steps, default=None)  # the same on all workers
        if latest is not None and step <= latest:
            what = "there is a checkpoint of this step" if step in self._steps else f"the latest is of step {latest}"
            raise ValueError(
                f"CheckpointManager.save({step}): {what} in {self.directory}; a run goes on from restore_latest(), "
                "and a new run needs a folder of its own"
            )
        room = functools.partial(self._folder.make_room, step, step in self._damaged)
        self.checkpoint._begin_save(
            self._folder.path_of(step),
            manager=self._folder.id,
            step=step,
            metrics=metrics,
            first=room if self._leads else None,
            then=functools.partial(self._note_finished, step, metrics),
        )
        self._last = step
        if self._alarm is not None:
            self._alarm.restart()

    @heartbeat.phase(Phase.RESTORING)
    def restore_latest(self) -> int | None:
        """Restore the newest complete checkpoint.

        It checks every byte. It skips checkpoints that are damaged or unfinished; the log (``replicax``, of Python's
        ``logging``) names them and what is wrong with them.

        Returns:
          Its step; ``None`` if there is no checkpoint at all, so that the run starts from the beginning.

        Raises:
          CheckpointError: there are checkpoints, but none is complete.
          ValueError, ContextError: as :meth:`Checkpoint.restore`.
        """
        self.checkpoint.wait()
        own = self._folder.steps()
        everyones = {*itertools.chain(*self._lockstep.exchange("lists its checkpoints", own, self.directory))}
        self._elsewhere = everyones.difference(own)
        problems: list[str] = []
        for step in sorted(everyones, reverse=True):
            if self._restore_step(step, problems):
                _log_more(len(problems), "checkpoints were passed over")
                self._steps = {known: metrics for known, metrics in self._steps.items() if known <= step}
                self._steps.setdefault(step, {})
                return step
        if problems:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} is whole, and to begin anew would lose them all: "
                + "; ".join(problems[:_MOST_LINES])
                + (f"; and {len(problems) - _MOST_LINES} more" if len(problems) > _MOST_LINES else "")
            )
        unfinished = self._folder.unfinished()
        for name in unfinished[:_MOST_LINES]:
            log.warning("%s was never finished, and there is no other: the run begins", name)
        _log_more(len(unfinished), "were never finished")
        self._steps, self._last = {}, 0
        return None

    @heartbeat.phase(Phase.RESTORING)
    def restore(self, step: int) -> None:
        """Restore the checkpoint of one step, such as ``best_step``.

        Raises:
          CheckpointError: there is none, or it is not complete.
          ValueError: ``step`` is not an integer of at least 0.
          ValueError, ContextError: as :meth:`Checkpoint.restore`.
        """
        step = checked_integer(step, "CheckpointManager.restore: step", 0)
        self.checkpoint.wait()
        problems: list[str] = []
        if not self._restore_step(step, problems):
            raise CheckpointError(f"the checkpoint of step {step} in {self.directory} can't be restored: {problems[0]}")

    @heartbeat.phase(Phase.SAVING)
    def wait(self) -> None:
        """Wait until the current save is written.

        Raises:
          CheckpointError: it could not be written.
        """
        self.checkpoint.wait()

    def close(self) -> None:
        """Wait as :meth:`wait` does, at the end of the run."""
        self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.error("%s", failure)  # the error that is being raised says more

    def _is_due(self, step: int) -> bool:
        """Return whether a save is due; all workers call it together, as ``replicax.train`` does."""
        if self._every_steps is None and self._alarm is None:
            return True
        is_time = self._every_steps is not None and step // self._every_steps > self._last // self._every_steps
        return is_time or (self._alarm is not None and self._alarm.is_over())

    def _steps_between_saves(self) -> int | None:
        """The number of steps between saves, for ``replicax.train``; ``None`` if they are not at fixed steps."""
        return 1 if self._every_steps is None and self._alarm is None else self._every_steps

    def _checked_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        if not isinstance(metrics, Mapping | None):
            raise TypeError(f"CheckpointManager.save: metrics must be a dict of numbers by name, got {metrics!r}")
        numbers = {}
        for name, value in (metrics or {}).items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"CheckpointManager.save: the metric {name!r} is no number: {value!r}") from None
        if self._best is not None and self._best[0] not in numbers:
            raise ValueError(
                f"CheckpointManager: best={self._best!r} needs the metric {self._best[0]!r}, got {sorted(numbers)}"
            )
        return numbers

    def _best_saved(self) -> int | None:
        """``best_step``, even if its checkpoint was deleted since, for ``replicax.train``: all workers agree on it."""
        return best_of(self._steps, self._best)

    def _metrics_of(self, step: int) -> dict[str, float]:
        """The metrics of a checkpoint that was restored, with those that were added later; for ``replicax.train``."""
        return self._steps[step]

    def _add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a checkpoint that was saved or restored; all workers call it together."""
        self.wait()
        with self._lockstep.failing_together("writing metrics"):
            if self._leads:
                self._folder.add_metrics(step, metrics)
        self._lockstep.exchange("writes metrics", None, self.directory)
        self._steps[step] = {**self._steps[step], **metrics}

    def _note_finished(self, step: int, metrics: dict[str, float]) -> None:
        """Called in the background after a checkpoint has been written."""
        self._steps = {**self._steps, step: metrics}  # replaced, as the run may be reading it
        if not self._leads:
            return
        try:
            self._folder.keep(self._max_to_keep, self._best)
        except OSError as error:
            raise CheckpointError(f"old checkpoints in {self.directory} can't be deleted: {error}") from error

    def _restore_step(self, step: int, problems: list[str]) -> bool:
        check_outside("CheckpointManager.restore")
        path = self._folder.path_of(step)
        source, problem = find_complete(path, self._lockstep)
        if source is None:
            if len(problems) < _MOST_LINES:
                log.warning("passed over the checkpoint %s: %s", path, problem)
            problems.append(f"{os.path.basename(path)}: {problem}")
            self._steps.pop(step, None)
            self._damaged.add(step)
            return False
        self.checkpoint._restore_from(source)
        self._last = step
        return True


def _log_more(count: int, what: str) -> None:
    """Log how many of ``count`` have not been logged one by one."""
    if count > _MOST_LINES:
        log.warning("%d more %s", count - _MOST_LINES, what)


class _Alarm:
    """A timer of all workers: the chief decides, and is asked as rarely as its clock allows."""

    def __init__(self, seconds: float, lockstep: Lockstep) -> None:
        self._seconds = seconds
        self._lockstep = lockstep
        self.restart()

    def restart(self) -> None:
        """Start the time."""
        self._start = time.monotonic()
        self._calls, self._ask_at = 0, 1

    def is_over(self) -> bool:
        """Return whether the time has passed."""
        if not self._lockstep.several:
            return time.monotonic() - self._start >= self._seconds
        self._calls += 1
        if self._calls < self._ask_at:
            return False
        passed = time.monotonic() - self._start
        left = (self._seconds - passed) * self._calls / max(passed, 1e-6) / 2
        ask_in = max(1, min(self._calls, int(left)))
        over, ask_in = self._lockstep.from_chief("asks whether to save", (passed >= self._seconds, ask_in))
        self._ask_at = self._calls + ask_in
        return bool(over)


def _count(value: int | None, name: str) -> int | None:
    return None if value is None else checked_integer(value, f"CheckpointManager: {name}", note=", or None")


def _checked_best(best: Any) -> Best | None:
    if best is None:
        return None
    if isinstance(best, tuple | list) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max"):
        return best[0], best[1]
    raise ValueError(
        f"CheckpointManager: best names a metric and 'min' or 'max', as in best=('accuracy', 'max'), got {best!r}"
    )
