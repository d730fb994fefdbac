"""What the workers do in ``test_keras_workers.py``."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers

import replicax

ROWS = 44  # in batches of 16 the last has 12
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=ROWS).astype("int32")
BACKUP, BEST, LOG, SAVED = "backup", "best.weights.h5", "log.csv", "model.keras"
STRATEGIES = {"mirrored": replicax.MultiWorkerMirroredStrategy, "sharded": replicax.ShardedStrategy}


def trained(folder: pathlib.Path, seed: int, steps: int = 1) -> dict[str, Any]:
    """Losses and all else of a model, that writes its files to ``folder``."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(synchronized=True) if replicax.has_strategy() else layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"], steps_per_execution=steps)
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / BEST, save_best_only=True, save_weights_only=True),
        keras.callbacks.CSVLogger(folder / LOG),
        keras.callbacks.BackupAndRestore(folder / BACKUP, delete_checkpoint=False),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
    ]
    fit = {"batch_size": 16, "epochs": 3, "verbose": 0, "validation_data": (X, Y), "callbacks": callbacks}
    history = model.fit(X, Y, class_weight={0: 1.0, 1: 0.5, 2: 2.0}, **fit).history
    model.save(folder / SAVED)
    return {
        "history": {name: np.asarray(values, "float64") for name, values in history.items()},
        "evaluated": np.asarray(model.evaluate(X, Y, batch_size=16, verbose=0)),
        "predicted": model.predict(X, batch_size=16, verbose=0),
        "on batch": np.asarray(model.train_on_batch(X[:13], Y[:13])),
        "weights": model.get_weights(),
    }


def train(kind: str, folder: pathlib.Path, steps: int) -> dict[str, Any]:
    """The same on several workers, each of which begins with random numbers of its own and writes to its own folder."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Keras' own
    with STRATEGIES[kind]().scope() as strategy:
        index = strategy.extended.workers.index
        return trained(folder / str(index), seed=7 + index, steps=steps)


def release() -> str:
    """Which Keras this worker runs."""
    return keras.__version__


def train_on_other_data() -> str:
    """The message of the error."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Keras' own
    with replicax.MultiWorkerMirroredStrategy().scope() as strategy:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.full((8, 6), strategy.extended.workers.index, "float32")
    try:
        model.fit(x, x[:, :1], verbose=0)
    except ValueError as error:
        assert all(np.isfinite(w).all() for w in model.get_weights())  # which the loop has given back
        return str(error)
    return "no error"
