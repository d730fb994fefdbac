"""Saved runs: what a run adds to the checkpoints of its manager, and going on from them."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.loop.callbacks import Callback
from replicax.loop.endless_input import EndlessInput
from replicax.pytrees import is_leaf, registered

if TYPE_CHECKING:
    from replicax.checkpoint import Checkpoint, CheckpointManager

NAME = "train"
"""What the loop's own objects are called in a checkpoint."""

_extended: weakref.WeakSet[Checkpoint] = weakref.WeakSet()


class SavedRuns:
    """The checkpoints of a run: besides the user's objects they have the place in the input and the callbacks' state.

    Args:
      manager: of the checkpoints; ``None``: there are none, and nothing is ever saved.
      input: of the run.
      metrics: those of the run, which are saved unless they are among the user's objects.
      callbacks: that may have something to remember.

    Attributes:
      evaluated: the step of the last evaluation; ``None`` if there was none.

    Raises:
      TypeError: it is no manager.
      ValueError: the checkpoint has an object of the user's whose name the loop needs.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        input: EndlessInput,
        metrics: Mapping[str, Any],
        callbacks: Sequence[Callback],
    ) -> None:
        self.evaluated: int | None = None
        self._manager = manager
        self._at: int | None = None  # the step that is restored or saved
        self._input = input
        self._callbacks = {f"{i} {type(c).__name__}": c for i, c in enumerate(callbacks)}
        if manager is None:
            return
        objects = manager.checkpoint._objects
        if NAME in objects and manager.checkpoint not in _extended:
            raise ValueError(
                f"replicax.train keeps what it needs to go on in the checkpoint, under the name {NAME!r}, and "
                f"{manager.checkpoint!r} has an object of that name already: call it something else"
            )
        objects.pop(NAME, None)
        there = {id(leaf) for leaf in jax.tree_util.tree_leaves(registered(objects), is_leaf=is_leaf)}
        own: dict[str, Any] = {"state": ""}
        if id(input.iterator) not in there:
            own["input"] = input.iterator
        own["metrics"] = {name: metric for name, metric in metrics.items() if id(metric) not in there}
        objects[NAME] = own
        _extended.add(manager.checkpoint)

    @property
    def is_on(self) -> bool:
        """Whether there are checkpoints."""
        return self._manager is not None

    @property
    def every_steps(self) -> int | None:
        """After which number of steps, and its multiples, there may be a checkpoint; ``None`` if at no fixed ones."""
        if self._manager is None:
            return None
        if self._manager._every_steps is None and self._manager._alarm is None:
            return 1
        return self._manager._every_steps

    @property
    def directory(self) -> str | None:
        """Where they are."""
        return None if self._manager is None else self._manager.directory

    def restore(self) -> int | None:
        """Go on from the newest whole one; its step, or ``None`` if there is none."""
        if self._manager is None:
            return None
        step = self._manager.restore_latest()
        if step is None:
            return None
        self._at = step
        self._input.restored()
        state = json.loads(self._manager.checkpoint._objects[NAME]["state"])
        self.evaluated = state["evaluated"]
        for name, callback in self._callbacks.items():
            if state["callbacks"].get(name) is not None:
                callback.set_state(state["callbacks"][name])
        return step

    def is_due(self, step: int) -> bool:
        """Whether it is time to save."""
        return self._manager is not None and self._at != step and self._manager._is_time(step)

    def save(self, step: int, evaluation: Mapping[str, float] | None) -> bool:
        """Save; whether it is being saved, which it is not if it has been already.

        Args:
          step: how many steps have been run.
          evaluation: the numbers of an evaluation of this step, if there was one.
        """
        manager = self._manager
        if manager is None or self._at == step:
            return False
        callbacks = {name: callback.get_state() for name, callback in self._callbacks.items()}
        manager.checkpoint._objects[NAME]["state"] = json.dumps({"evaluated": self.evaluated, "callbacks": callbacks})
        metrics = dict(evaluation or {})
        if manager._best is not None:
            metrics.setdefault(manager._best[0], math.nan)  # not evaluated, so it is not the best
        self._at = step
        return manager.save(step, metrics, force=True)

    def wait(self) -> None:
        """Wait until all that was saved is written."""
        if self._manager is not None:
            self._manager.wait()
