"""Keras' callbacks with several workers: only the chief reads and writes files, and the others get what it reads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
from keras.src.utils import file_utils

from replicax.models.keras.model_state import GROUPS, StateCell, keras_variables
from replicax.strategy import Strategy


def silence(callback: Any) -> None:
    """Make a Keras callback write nothing; otherwise it works as on the chief."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        callback._save_model = functools.partial(_see_model, callback)
        callback.delete_checkpoint = False
    elif isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.devnull
    elif isinstance(callback, keras.callbacks.ModelCheckpoint):
        callback.filepath = os.path.basename(callback.filepath)  # it creates the folder; two workers would collide
    elif isinstance(callback, keras.callbacks.TensorBoard):
        if not isinstance(callback.summary, _NoSummaries):
            callback._summary_module = _NoSummaries(callback.summary)
        callback._configure_embeddings = lambda: None
        callback._should_trace = False


class _NoSummaries:
    """``tensorflow.summary``, whose writers write nothing."""

    def __init__(self, summary: Any) -> None:
        self._summary = summary

    def create_file_writer(self, *args: Any, **kwargs: Any) -> Any:
        """A writer without a file."""
        return self._summary.create_noop_writer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._summary, name)


def _see_model(callback: Any) -> None:
    """Gather the model's sharded variables, on all workers together."""
    assert callback.model is not None


def restore_together(callback: Any, restore: Callable[[], None], strategy: Strategy) -> None:
    """Begin ``fit`` with a ``BackupAndRestore`` as on the chief, the only worker that needs the files.

    ``restore`` reads the backup, if there is one, and sets the model and its epoch.
    """
    lockstep = strategy.extended.replicas.lockstep
    model, path = callback.model, str(callback.backup_dir)
    is_there = file_utils.exists(callback._weights_path)
    if lockstep.workers.index == 0:
        with lockstep.failing_together(f"BackupAndRestore({path!r})"):
            restore()
    told = lockstep.exchange("begins with BackupAndRestore", (is_there, model._initial_epoch, path))
    chief_has_it, epoch, place = told[0]
    if chief_has_it:
        model._initial_epoch = epoch
        _take_chiefs_state(model, strategy)
        return
    others = [(worker, where) for worker, (has_it, _, where) in enumerate(told) if has_it]
    if others:
        worker, where = others[0]
        raise lockstep.everywhere(
            ValueError(
                f"BackupAndRestore: the chief, worker 0, reads the backup for all workers, and has none in {place!r}; "
                f"but worker {worker} has one in {where!r}. To go on from it, copy that folder to worker 0's, or use a "
                "folder that every worker sees; to begin anew, delete it."
            )
        )


def _take_chiefs_state(model: Any, strategy: Strategy) -> None:
    """Assign the chief's value to each variable of the model, on all workers."""
    if not model.optimizer.built:  # reading the backup has built the chief's optimizer
        model.optimizer.build(model.trainable_variables)
    for variable in [v for group in GROUPS for v in keras_variables(model, group)]:
        with strategy.scope():
            chiefs = StateCell(variable, variable.value)
        variable.assign(chiefs.show())
