"""Keras' loop as it is: callbacks, single batches, input of any kind and size."""

from __future__ import annotations

import functools
import gc
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras.src.utils import python_utils

import replicax
from replicax import _jax
from replicax.models.keras.model_state import StateCell
from replicax.models.keras.step_functions import StepFunction
from tests.interrupting import interrupted_at

X = np.random.default_rng(0).normal(size=(35, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=35)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(**compile: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    model.compile(**{"optimizer": "adam", "loss": LOSS, "metrics": ["accuracy"], **compile})
    return model


def check(use: Callable[[keras.Model], Any], replicas: int = 4, **compile: Any) -> None:
    """Raise unless ``use(model)`` gives the same on one device and on replicas."""
    expected = use(classifier(**compile))
    with replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        model = classifier(**compile)
    found = use(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_callbacks_of_keras(tmp_path: pathlib.Path) -> None:
    def use(model: keras.Model) -> Any:
        seen: list[float] = []
        path = tmp_path / "model.keras"
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1)),
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True, monitor="val_loss"),
            keras.callbacks.ModelCheckpoint(path, save_freq=2),
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))),
        ]
        fit = {"batch_size": 16, "epochs": 3, "verbose": 0, "validation_split": 0.2, "callbacks": callbacks}
        history = model.fit(X, Y, **fit).history
        restored = keras.models.load_model(path)
        return history, seen, model.get_weights(), restored.get_weights(), model.optimizer.iterations.numpy()

    check(use)


def test_a_model_saved_in_a_scope_is_an_ordinary_one(tmp_path: pathlib.Path) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = classifier()
    model.fit(X, Y, epochs=1, verbose=0)
    model.save(tmp_path / "m.keras")
    alone = keras.models.load_model(tmp_path / "m.keras")
    with strategy.scope():
        together = keras.models.load_model(tmp_path / "m.keras")
    histories = [m.fit(X, Y, epochs=1, verbose=0, shuffle=False).history for m in (alone, together, model)]
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], abs=1e-6)
    assert histories[0]["loss"] == pytest.approx(histories[2]["loss"], abs=1e-6)
    np.testing.assert_allclose(alone.predict(X, verbose=0), together.predict(X, verbose=0), atol=1e-6)


def test_single_batches() -> None:
    check(
        lambda model: [
            model.train_on_batch(X, Y, return_dict=True),
            model.train_on_batch(X, Y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
            model.test_on_batch(X, Y),
            model.predict_on_batch(X[:6]),
        ]
    )


@pytest.mark.parametrize("batch", [16, 11, 34])  # the last has 3 rows, 2 and 1, for 4 replicas
@pytest.mark.parametrize("steps", [1, 3])
def test_last_batches_of_any_size(batch: int, steps: int) -> None:
    def use(model: keras.Model) -> Any:
        history = model.fit(X, Y, batch_size=batch, epochs=2, verbose=0, shuffle=False).history
        return history, model.evaluate(X, Y, batch_size=batch, verbose=0), model.predict(X, batch_size=batch, verbose=0)

    check(use, steps_per_execution=steps)


class Interrupted:
    """A number that devices compute, for which somebody does not want to wait."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def block_until_ready(self) -> Any:
        raise self.error


def test_an_interrupt_while_keras_waits_for_its_logs() -> None:
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        classifier()
    with pytest.raises(KeyboardInterrupt):
        python_utils.pythonify_logs({"loss": Interrupted(KeyboardInterrupt())})
    failed = Interrupted(RuntimeError("a device is gone"))  # which the next step finds out
    assert python_utils.pythonify_logs({"loss": failed, "a": {"b": jax.numpy.ones(())}}) == {"b": 1.0, "loss": failed}


# An interrupt may come where Python frees a generator of Keras, which swallows it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pieces", [False, True], ids=["mirrored", "in pieces"])
def test_an_interrupt_leaves_a_model_its_arrays(monkeypatch: pytest.MonkeyPatch, pieces: bool) -> None:
    """From when its first step begins: before, Keras itself takes the arrays from the model's variables."""
    strategy = replicax.ShardedStrategy if pieces else replicax.MirroredStrategy
    with strategy(["cpu:0", "cpu:1"]).scope():
        model = classifier()
    model.fit(X, Y, epochs=1, verbose=0)
    moment, is_over = 2, False
    while not is_over:
        before = int(model.optimizer.iterations.value)
        work = functools.partial(model.fit, X, Y, epochs=1, verbose=0)
        is_over = not interrupted_at(moment, work, StepFunction.__call__.__code__)
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert int(model.optimizer.iterations.value) >= before
        moment += 97


def test_compiled_again_with_layers_that_are_frozen() -> None:
    def use(model: keras.Model) -> Any:
        first = model.fit(X, Y, epochs=1, verbose=0, shuffle=False).history
        model.layers[0].trainable = False
        model.compile("sgd", LOSS)
        return first, model.fit(X, Y, epochs=1, verbose=0, shuffle=False).history, model.get_weights()

    check(use)


def test_compiled_again_it_keeps_nothing_of_the_last_optimizer() -> None:
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4096)])
    held = []
    for _ in range(3):
        model.compile("adam", LOSS)
        model.fit(X, Y, epochs=1, verbose=0)
        gc.collect()
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert held[2] <= held[1] < held[0] + 4096 * 8 * 4


def test_weights_that_somebody_sets_between_steps() -> None:
    def use(model: keras.Model) -> Any:
        model.fit(X, Y, epochs=1, verbose=0, shuffle=False)
        model.set_weights([w * 0.5 for w in model.get_weights()])
        model.optimizer.learning_rate = 0.1
        return model.fit(X, Y, epochs=1, verbose=0, shuffle=False).history, model.get_weights()

    check(use)


def test_variables_in_pieces_are_put_together_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = StateCell._whole_value
    monkeypatch.setattr(
        StateCell, "_whole_value", lambda self, stored: made.append(self.keras.path) or whole(self, stored)
    )
    with replicax.ShardedStrategy(["cpu:0", "cpu:1"]).scope():
        model = classifier()
    kernel, seen = model.layers[0].kernel.path, []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                seen.append(self.model.get_weights()[0])

    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, callbacks=[Looks()])  # 5 batches
    assert made.count(kernel) == 2
    assert seen[0].shape == (8, 16)
    assert not np.array_equal(seen[0], model.get_weights()[0])


def test_one_replica() -> None:
    y = Y.astype("int32")  # as devices have it: so a batch is looked at only once

    def use(model: keras.Model) -> Any:
        first = model.fit(X, y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
        with replicax.debug():
            debugged = model.evaluate(X[:20], y[:20], verbose=0)
        compiled = model.evaluate(X[:20], y[:20], verbose=0)
        model.layers[0].trainable = False
        model.compile("sgd", LOSS)
        last = model.fit(X, y, batch_size=11, epochs=2, verbose=0, shuffle=False).history
        return first, debugged, compiled, last, model.predict(X, verbose=0), model.get_weights()

    check(use, replicas=1)


def noted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **options: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **options)

    return wrapper


def test_an_execution_of_many_steps_is_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the variables of all metrics, which Keras resets at the beginning of an epoch, are one more."""
    with replicax.OneDeviceStrategy("cpu:0").scope():
        model = classifier(steps_per_execution=4)
    x, y = np.concatenate([X[:32]] * 2), np.concatenate([Y[:32]] * 2).astype("int32")
    model.fit(x, y, batch_size=8, verbose=0)
    transfers = []
    for name in ("put_alone", "copies"):
        monkeypatch.setattr(_jax, name, noted(getattr(_jax, name), transfers))
    model.fit(x, y, batch_size=8, verbose=0)  # two executions
    assert sorted(transfers) == ["copies", "put_alone", "put_alone"]


@pytest.mark.parametrize("replicas", [1, 4])
def test_batches_of_several_kinds_in_one_execution(replicas: int) -> None:
    """Each step has its own rows, whatever the shapes and dtypes of those around it are."""
    kinds = [(8, "float32", np.asarray), (8, "float32", np.asarray), (8, "float16", np.asarray)]
    kinds += [(4, "float16", np.asarray), (8, "float32", jax.numpy.asarray), (8, "float32", np.asarray)]
    kinds += [(4, "float32", jax.numpy.asarray)]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(kinds)

        def __getitem__(self, index: int) -> Any:
            rows, dtype, array = kinds[index]
            start = index * 5
            return array(X[start : start + rows].astype(dtype)), array(Y[start : start + rows].astype("int32"))

    def use(model: keras.Model) -> Any:
        return model.fit(Batches(), epochs=2, verbose=0, shuffle=False).history, model.get_weights()

    check(use, replicas=replicas, steps_per_execution=7)
