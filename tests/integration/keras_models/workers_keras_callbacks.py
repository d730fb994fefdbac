"""What the workers do in ``test_keras_workers_callbacks.py``."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.integration.keras_models.workers_keras import STRATEGIES, X, Y

BACKUP = "backup"


def build(seed: int) -> keras.Model:
    """A model that is compiled."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Notes(keras.callbacks.Callback):
    """Notes what the model is before its first step."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.begin = [np.asarray(v.numpy()) for v in (*self.model.variables, *self.model.optimizer.variables)]


def resumed(folder: pathlib.Path, seed: int) -> dict[str, Any]:
    """What becomes of a model whose program ends after two epochs, and begins again with another model."""
    found: dict[str, Any] = {}
    for run, epochs in enumerate((2, 4)):
        model, notes = build(seed + run), Notes()
        callbacks = [keras.callbacks.BackupAndRestore(folder / BACKUP, delete_checkpoint=False), notes]
        fit = {"batch_size": 16, "verbose": 0, "shuffle": False, "callbacks": callbacks}
        history = model.fit(X, Y, epochs=epochs, **fit).history
        found |= {f"loss {run}": np.asarray(history["loss"]), f"begin {run}": notes.begin}
    # The same model again, which has had its steps: it is as the backup of its last epoch was.
    found["loss 2"] = np.asarray(model.fit(X, Y, epochs=5, **fit).history["loss"])
    return found | {"weights": model.get_weights()}


def resume(kind: str, folder: pathlib.Path) -> dict[str, Any]:
    """The same on several workers, each of which has a disk of its own, and begins with random numbers of its own."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Keras' own
    with STRATEGIES[kind]().scope() as strategy:
        index = strategy.extended.workers.index
        return resumed(folder / str(index), seed=7 + 10 * index)


def fails_to_resume(folder: pathlib.Path) -> tuple[str, list[np.ndarray]]:
    """The error, and the model's weights after it."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Keras' own
    with STRATEGIES["mirrored"]().scope() as strategy:
        model = build(7)
        path = folder / str(strategy.extended.workers.index) / BACKUP
    try:
        model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(path)])
    except Exception as error:
        return f"{type(error).__name__}: {error}", model.get_weights()
    return "no error", []


def write(kind: str, folder: pathlib.Path) -> Sequence[float]:
    """The losses of a model, of which callbacks write all that they can."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Keras' and TensorFlow's own
    with STRATEGIES[kind]().scope() as strategy:
        model = build(7)
    own = folder / str(strategy.extended.workers.index)
    callbacks = [
        keras.callbacks.ModelCheckpoint(own / "made" / "model.keras"),
        keras.callbacks.CSVLogger(own / "log.csv"),
        keras.callbacks.TensorBoard(
            own / "board", histogram_freq=1, update_freq=1, write_images=True, write_steps_per_second=True
        ),
    ]
    fit = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    losses: Sequence[float] = model.fit(X, Y, validation_data=(X, Y), **fit).history["loss"]
    return losses
