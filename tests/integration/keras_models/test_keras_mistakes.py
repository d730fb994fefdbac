"""Mistakes with Keras models, each with an error that says what to do."""

from __future__ import annotations

import random
import subprocess
import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
from jax.experimental import sparse
from keras import layers, ops

import replicax
from replicax.models.keras import callbacks, multi_worker
from replicax.models.keras.batches import Feed

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def two() -> replicax.MirroredStrategy:
    return replicax.MirroredStrategy(["cpu:0", "cpu:1"])


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.Dense(1)])


def test_two_strategies() -> None:
    with two().scope():
        model = dense()
    with two().scope(), pytest.raises(ValueError, match="was made in the scope of .* and is compiled in that of"):
        model.compile("sgd", "mse")


def test_a_distribution_of_keras() -> None:
    with two().scope():
        model = dense()
        model.compile("sgd", "mse")
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with pytest.raises(RuntimeError, match=r"set_distribution\(None\)"):
            model.fit(X, Y, verbose=0)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize("loop", ["fit", "evaluate", "predict"])
def test_a_loop_of_keras_on_parameter_servers(loop: str) -> None:
    pytest.importorskip("ray")
    from tests.parameter_server.thread_actors import coordinator_of

    strategy = replicax.ParameterServerStrategy(num_workers=1)

    def run() -> None:
        model = dense()
        model.compile("sgd", "mse")
        getattr(model, loop)(X, *([Y] if loop != "predict" else []), verbose=0)

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(run)
        with pytest.raises(replicax.errors.WorkerError, match=f"Keras' {loop} of the model .* MirroredStrategy"):
            coordinator.join(100.0)


def test_variables_of_keras_that_a_step_assigns() -> None:
    strategy = two()
    with strategy.scope():
        model, optimizer, mean = dense(), keras.optimizers.SGD(), keras.metrics.Mean()
        unbuilt = layers.Dense(1)
        optimizer.build(model.trainable_variables)
    before = model.get_weights()

    def trains() -> None:
        optimizer.apply_gradients((v.value, v) for v in model.trainable_variables)

    def keeps_statistics() -> None:
        mean.update_state(1.0)

    def builds() -> None:
        unbuilt(X)

    kernel = r".*dense\w*/kernel"
    for step, path in ((trains, kernel), (keeps_statistics, r"mean\w*/total"), (builds, kernel)):
        for _ in range(2):  # a second call would run what the first has compiled
            with pytest.raises(replicax.errors.ContextError, match=rf"'{path}' was made or assigned .* build the"):
                strategy.run(step)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    mean.update_state(1.0)
    assert float(mean.result()) == 1


class Counts(layers.Layer):
    """Keeps something of the last batch, and does not say how the replicas' are combined."""

    def __init__(self, **weight: Any) -> None:
        super().__init__()
        self.last = self.add_weight(shape=(), initializer="zeros", trainable=False, name="last", **weight)

    def call(self, x: Any) -> Any:
        self.last.assign(ops.mean(x))
        return x


def test_state_that_replicas_disagree_about() -> None:
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), Counts(), layers.Dense(1)])
        model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(replicax.errors.LocalityError, match=r"variable '.*last'.* differs between replicas"):
        model.fit(X, Y, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):  # which the loop has given back
        np.testing.assert_array_equal(a, b)


def test_state_that_says_how_it_is_combined() -> None:
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), Counts(aggregation="mean"), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(24, dtype="float32").reshape(8, 3)
    model.fit(x, Y, verbose=0, shuffle=False)
    assert float(model.layers[0].last.numpy()) == pytest.approx(11.5)


def test_arrays_that_have_not_the_same_rows_or_are_sparse() -> None:
    feed = Feed(two().extended.replicas)
    with pytest.raises(ValueError, match=r"same dim 0; got batch\[0\]: float32\[8, 3\], batch\[1\]: float32\[6, 1\]"):
        feed.batch((X, Y[:6]))
    with pytest.raises(ValueError, match=r"dense arrays .* got batch\[0\]: a BCOO, batch\[1\]: float32\[8, 1\]"):
        feed.batch((sparse.BCOO.fromdense(X), Y))


def test_a_worker_that_is_not_the_chief_shuffles_as_it_and_says_once_that_it_writes_nothing(caplog: Any) -> None:
    chiefs, drawn = (random.getstate(), np.random.get_state()), []
    lockstep = types.SimpleNamespace(several=True, workers=types.SimpleNamespace(index=1))
    lockstep.from_chief = lambda what, own: chiefs
    model: Any = types.SimpleNamespace(fit=lambda: drawn.append((random.random(), np.random.random())))
    for name in multi_worker.WRITERS:
        setattr(model, name, getattr(keras.Model, name))
    expected = random.random(), np.random.random()
    multi_worker.adapt(model, types.SimpleNamespace(lockstep=lockstep))  # type: ignore[arg-type]
    model.fit()
    for _ in range(2):
        model.save("never")
    assert drawn == [expected]
    backup = keras.callbacks.BackupAndRestore("never")
    callbacks.silence(backup)
    assert not backup.delete_checkpoint
    [told] = caplog.messages
    assert told == "worker 1: model.save writes nothing here; the chief, worker 0, writes the file for all workers"


def test_fit_inside_another_scope() -> None:
    with two().scope():
        model = dense()
        model.compile("sgd", "mse")
    with two().scope(), pytest.raises(replicax.errors.ContextError):
        model.fit(X, Y, verbose=0)


def test_a_function_of_the_models_own_making() -> None:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            raise AssertionError("not called")

    with two().scope():
        model = Own([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="override train_step instead"):
        model.fit(X, Y, verbose=0)


def test_batches_of_ever_other_sizes() -> None:
    with two().scope():
        model = dense()
        model.compile("sgd", "mse")
    x = np.ones((40, 3), "float32")
    for size in range(2, 22, 2):
        model.train_on_batch(x[:size], x[:size, :1])
    with pytest.warns(
        replicax.errors.RetraceWarning, match=r"train_step has been traced 11 times.*\(10, 10\).*now .*\(11, 11\)"
    ) as warned:
        model.train_on_batch(x[:22], x[:22, :1])
    assert [w.filename for w in warned] == [__file__]


IMPORTED_LATE = """
import sys
import warnings

import replicax

replicax.use_cpu_devices(2)
before = list(sys.meta_path)
strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with strategy.scope():
        import keras
print(sum("keras was first imported inside a strategy's scope" in str(w.message) for w in caught))
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
print(type(model.make_train_function.__self__).__module__, [f for f in sys.meta_path if "replicax" in repr(f)])
"""


def test_imported_in_a_scope() -> None:
    command = [sys.executable, "-c", IMPORTED_LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "replicax.models.keras.scoped_models", "[]"]
