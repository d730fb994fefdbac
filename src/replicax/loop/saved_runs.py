"""Saved runs: what a run adds to the checkpoints of its manager, and going on from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.checkpoint.leaves import Leaves
from replicax.errors import shortened
from replicax.loop.callbacks import Callback
from replicax.loop.endless_input import EndlessInput
from replicax.loop.training_run import TrainingRun
from replicax.loop.wrapped_steps.precision import Precision
from replicax.pytrees import is_leaf, registered
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax.checkpoint import CheckpointManager

NAME = "train"
"""What the loop's own objects are called in a checkpoint."""

OWN = "replicax.train/"
"""What the names of the loop's own variables begin with."""


class SavedRuns:
    """The checkpoints of a run: the user's objects, the place in the input, the last numbers, and callbacks' states.

    The metrics and the loss scale of the run are saved, too, unless they are among the user's objects. Without a
    ``manager`` nothing is ever saved. If the loop has found out by itself what to save, ``watched`` are the variables
    of the strategy. Raises a ValueError if the checkpoint has an object of the user's whose name the loop needs.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        run: TrainingRun,
        input: EndlessInput,
        metrics: Mapping[str, Any],
        callbacks: Sequence[Callback],
        precision: Precision | None,
        watched: Iterable[Variable],
    ) -> None:
        self.evaluated: int | None = None  # the step of the last evaluation
        self._manager = manager
        self._run = run
        self._at: int | None = None  # the step that is restored or saved
        self._input = input
        names = [f"{type(c).__name__} {c.state_name}" for c in callbacks]  # numbered, as others may come and go
        self._callbacks = {f"{name} {names[:i].count(name)}": callbacks[i] for i, name in enumerate(names)}
        self._watched = watched
        self._before: list[tuple[Variable, Any]] = []
        if manager is None:
            return
        self._objects = manager.checkpoint._objects
        objects = {name: value for name, value in self._objects.items() if name != NAME}
        leaves = {id(leaf) for leaf in jax.tree_util.tree_leaves(registered(objects), is_leaf=is_leaf)}
        added: dict[str, Any] = {"state": ""}
        if id(input.iterator) not in leaves:
            added["input"] = input.iterator
        added["metrics"] = {name: metric for name, metric in metrics.items() if id(metric) not in leaves}
        if precision is not None and precision.variables and id(precision) not in leaves:
            added["precision"] = precision
        manager.checkpoint._add_loops_objects(NAME, added, (f"{NAME}/metrics/", f"{NAME}/precision/"))

    @property
    def is_on(self) -> bool:
        """Return whether there are checkpoints."""
        return self._manager is not None

    @property
    def every_steps(self) -> int | None:
        """The number of steps between checkpoints; ``None`` if they are not at fixed steps."""
        return None if self._manager is None else self._manager._steps_between_saves()

    @property
    def directory(self) -> str | None:
        """The folder of the checkpoints."""
        return None if self._manager is None else self._manager.directory

    def restore(self) -> int | None:
        """Go on from the newest whole checkpoint; returns its step, or ``None`` if there is none."""
        if self._manager is None:
            return None
        step = self._manager.restore_latest()
        if step is None:
            return None
        self._at = step
        state = json.loads(self._objects[NAME]["state"])
        self.evaluated = state["evaluated"]
        run = self._run
        run.numbers, run.evaluation = state["numbers"], state["evaluation"]
        evaluation = self._manager._metrics_of(step)
        if self.evaluated != step >= run.steps and evaluation:  # by a run that had only the last evaluation to make
            self.evaluated, run.evaluation = step, evaluation
        for name, callback in self._callbacks.items():
            if state["callbacks"].get(name) is not None:
                callback.set_state(state["callbacks"][name])
        return step

    def watch(self) -> None:
        """Watch the first call of the step, which follows."""
        if self._manager is not None:
            self._state()  # raises before anything is trained if it can't be saved
            # The arrays of models are the models'.
            self._before = [(v, v.slot.array) for v in self._watched if v.slot.view is None]

    def check_all_saved(self) -> None:
        """Raise a ValueError if the first call of the step has changed a variable that is not saved."""
        if self._manager is None or not self._before:
            return
        saved = {variable for _, variable in Leaves(self._objects).variables()}
        before, self._before = self._before, []
        for variable, array in before:
            if variable.slot.array is not array and variable not in saved and not variable.name.startswith(OWN):
                raise ValueError(
                    f"replicax.train(checkpoints={self.directory!r}) saves what the step uses by a name, and the "
                    f"step has changed {variable.describe()}, which it reaches in another way. Say what to save: "
                    "checkpoints=replicax.CheckpointManager(replicax.Checkpoint(model=…, optimizer=…), "
                    f"{self.directory!r})"
                )

    def note_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of an evaluation of this step, for its checkpoint, too, if it is saved already.

        Raises a ValueError if they lack that by which the manager finds the best checkpoint.
        """
        self.evaluated = step
        if self._manager is not None:
            metrics = self._manager._checked_metrics(numbers)
            if self._at == step:
                self._manager._add_metrics(step, metrics)

    def is_due(self, step: int) -> bool:
        """Return whether it is time to save."""
        return self._manager is not None and self._manager._is_due(step)

    def save(self, step: int, evaluation: Mapping[str, float] | None) -> bool:
        """Save, with the numbers of an evaluation of this step, unless it is saved already; returns whether it does."""
        manager = self._manager
        if manager is None or self._at == step:
            return False
        self._objects[NAME]["state"] = self._state()
        self._at = step
        manager._save(step, dict(evaluation or {}))
        return True

    def _state(self) -> str:
        """Return what the run and its callbacks have to remember, as JSON."""
        states = {}
        for name, callback in self._callbacks.items():
            states[name] = callback.get_state()
            try:
                json.dumps(states[name])
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{type(callback).__name__}.get_state() returned {shortened(repr(states[name]), 200)}, which a "
                    f"checkpoint keeps as JSON: {error}. Return numbers of Python, strings, lists, and dicts of these."
                ) from error
        run = {"evaluated": self.evaluated, "numbers": self._run.numbers, "evaluation": self._run.evaluation}
        return json.dumps({**run, "callbacks": states})

    def restore_best(self) -> int | None:
        """Go back to the checkpoint with the best evaluation; returns its step, ``None`` if that is the newest."""
        assert self._manager is not None
        best = self._manager._best_saved()
        if best is None or best == self._at:
            return None
        self._manager.restore(best)
        return best

    def wait(self) -> None:
        """Wait until all that was saved is written."""
        if self._manager is not None:
            self._manager.wait()
