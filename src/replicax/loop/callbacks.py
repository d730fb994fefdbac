"""Callbacks: actions besides training in a run, and early stopping, which is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from replicax.argument_checks import checked_integer, is_number
from replicax.loop.training_run import TrainingRun


class Callback:
    """Actions in a run of :func:`replicax.train`. Override the methods that you need.

    All workers call the same methods in the same order. Write and print only if ``run.is_chief``; to end the run call
    ``run.stop(why)``. An exception ends the run with that exception.

    >>> import replicax, numpy as np
    >>> class Shout(replicax.Callback):
    ...     def on_log(self, run, step, values):
    ...         print("step", step, "loss", values["loss"])
    >>> dataset = replicax.get_strategy().distribute_dataset([np.arange(4.0)])
    >>> run = replicax.train(lambda x: x.sum(), dataset, 4, log_every=2, callbacks=[Shout()], progress=False)
    step 2 loss 6.0
    step 4 loss 6.0
    """

    state_name: str = ""
    """Tells callbacks of one class apart: after a resume each gets the state saved for its class and this name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if name.startswith("on_") and callable(value) and not hasattr(Callback, name):
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: a replicax.Callback has {', '.join(known)}. With "
                    "replicax.train(log_every=1) on_log comes for every step"
                )

    def on_start(self, run: TrainingRun) -> None:
        """Called before the first step of this run, after a checkpoint was restored: ``run.resumed_at`` says which."""

    def on_log(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        """Called for each logging interval, *one interval later*: by then the values are there, and no step waits.

        Args:
          run: ``run.step`` may be further on already.
          step: the step whose numbers these are.
          values: the numbers of that step, the metrics of the interval, and ``examples_per_second``.
        """

    def on_evaluation(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        """Called right after each evaluation, which is of the model after ``step``."""

    def on_save(self, run: TrainingRun, step: int) -> None:
        """Called when a save of ``step`` has begun; the checkpoint may not be written yet."""

    def on_end(self, run: TrainingRun) -> None:
        """Called at the end, if :meth:`on_start` was: also after an error, even in another callback's ``on_end``."""

    def get_state(self) -> Any:
        """Return what the callback has to remember over a resume, as JSON data; it is part of the checkpoint.

        With checkpoints it is also asked for before the first step, to see whether it can be saved.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Go on from a state of :meth:`get_state`; only called with one that is not ``None``."""


class NumbersLog(Callback):
    """Writes numbers in two groups: ``train``, and ``evaluation``."""

    def on_log(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        self._write("train", step, values)

    def on_evaluation(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        self._write("evaluation", step, values)

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step; called on all workers."""


class EarlyStopping(Callback):
    """Ends a run when a number of its evaluations stops improving.

    What it has seen is part of the checkpoint, so that a resumed run stops where an uninterrupted one would.

    Args:
      metric: the name of the number, as the evaluation gives it.
      mode: ``"min"`` if less is better, ``"max"`` if more is.
      patience: how many evaluations in a row may be no better than the best.
      min_delta: by how much a value has to be better to count as better.
      restore_best: at the end of the run, go back to the checkpoint of the best evaluation. It is saved when it is
        found, so it needs ``checkpoints``: a folder, or a manager with ``best=(metric, mode)``.

    Attributes:
      best: the best value so far; ``None`` before the first evaluation.
      best_step: the step of that evaluation.

    Raises:
      ValueError: another ``mode``, a ``patience`` below 1, or a negative ``min_delta``. In the run: there is no
        evaluation, or it gives no such number.

    >>> import replicax, numpy as np
    >>> strategy = replicax.get_strategy()
    >>> losses = iter([3.0, 2.0, 2.5, 2.1, 1.0])
    >>> run = replicax.train(
    ...     lambda x: None,
    ...     strategy.distribute_dataset([np.zeros(2)]),
    ...     steps=50,
    ...     progress=False,
    ...     evaluate=lambda: {"loss": next(losses)},
    ...     evaluate_every=10,
    ...     callbacks=[replicax.EarlyStopping("loss", "min", patience=2)],
    ... )
    >>> run.step, run.stopped
    (40, 'loss was no better than 2 (step 20) in 2 evaluations')
    """

    def __init__(
        self,
        metric: str,
        mode: Literal["min", "max"],
        patience: int = 1,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if not isinstance(metric, str):
            raise TypeError(f"EarlyStopping: metric must be the name of a number, got {metric!r}")
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode must be 'min' (less is better) or 'max', got {mode!r}")
        patience = checked_integer(patience, "EarlyStopping: patience")
        if not (is_number(min_delta) and min_delta >= 0):
            raise ValueError(f"EarlyStopping: min_delta must be a number of 0 or more, got {min_delta!r}")
        self.metric, self.mode, self.patience, self.min_delta = metric, mode, patience, min_delta
        self.restore_best = restore_best
        self.state_name = f"{metric} {mode}"
        self.best: float | None = None
        self.best_step: int | None = None
        self._worse = 0

    def on_start(self, run: TrainingRun) -> None:
        if run.resumed_at is None:
            self.best, self.best_step, self._worse = None, None, 0
        self._stop_if_worse(run)  # a resumed run may have ended here before

    def on_evaluation(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        if self.metric not in values:
            raise ValueError(
                f"EarlyStopping({self.metric!r}): the evaluation gives no such number; it gives "
                f"{', '.join(map(repr, values)) or 'none'}"
            )
        value = values[self.metric]
        if self._is_better(value):
            self.best, self.best_step, self._worse = value, step, 0
            return
        self._worse += 1
        self._stop_if_worse(run)

    def _stop_if_worse(self, run: TrainingRun) -> None:
        """Stop the run if as many evaluations as ``patience`` were no better than the best."""
        if self._worse >= self.patience:
            best = "a number" if self.best is None else f"{self.best:.6g} (step {self.best_step})"
            times = f"{self.patience} evaluations" if self.patience > 1 else "an evaluation"
            run.stop(f"{self.metric} was no better than {best} in {times}")

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def get_state(self) -> Any:
        return {"best": self.best, "best_step": self.best_step, "worse": self._worse}

    def set_state(self, state: Any) -> None:
        self.best, self.best_step, self._worse = state["best"], state["best_step"], state["worse"]

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, {self.mode!r}, patience={self.patience})"


def restoring_callback(callbacks: Sequence[Callback]) -> EarlyStopping | None:
    """The callback whose best evaluation is to be restored at the end; ``None`` if none is."""
    found = [c for c in callbacks if isinstance(c, EarlyStopping) and c.restore_best]
    if len(found) > 1:
        raise ValueError(f"replicax.train(callbacks=…): only one can restore the best checkpoint, got {found}")
    return found[0] if found else None
