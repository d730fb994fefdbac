"""What differs between replicas, what is combined and how, and that Keras is itself again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src.losses import loss as loss_module

import replicax

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 1)).astype("float32")


def two() -> replicax.MirroredStrategy:
    return replicax.MirroredStrategy(["cpu:0", "cpu:1"])


def check_losses_and_weights(trained: Callable[[], Any], atol: float = 0.0) -> None:
    """Raise unless a function that trains a model gives the same losses and weights on one device and on replicas."""
    expected = trained()
    with two().scope():
        found = trained()
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


class Noise(layers.Layer):
    """Replaces its input by random numbers, as dropout draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        return keras.random.uniform(ops.shape(x), seed=self.seeds)


def test_each_replica_draws_numbers_of_its_own() -> None:
    alone = keras.Sequential([keras.Input((3,)), Noise()])
    with replicax.OneDeviceStrategy("cpu:0").scope():
        one = keras.Sequential([keras.Input((3,)), Noise()])
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), Noise()])
    x = np.zeros((4, 3), "float32")
    np.testing.assert_array_equal(one.predict(x, verbose=0), alone.predict(x, verbose=0))
    first, second = model.predict(x, verbose=0), model.predict(x, verbose=0)
    rows = np.concatenate([first, second])
    assert len(np.unique(rows.round(6), axis=0)) == 8
    np.testing.assert_array_equal(model.layers[0].seeds.state.numpy(), [3, 2])


class Places(layers.Layer):
    """Gives each row the same vector, which is a weight."""

    def build(self, shape: Any) -> None:
        self.vector = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x: Any) -> Any:
        return x, ops.broadcast_to(self.vector, (ops.shape(x)[0], 2))


@pytest.mark.parametrize("batch", [12, 5, 11])
def test_predictions_that_do_not_depend_on_the_input(batch: int) -> None:
    inputs = keras.Input((3,))
    with two().scope():
        model = keras.Model(inputs, Places()(inputs))
    given, places = model.predict(X, batch_size=batch, verbose=0)
    np.testing.assert_array_equal(given, X)
    np.testing.assert_array_equal(places, np.ones((12, 2)))


def test_batch_statistics_are_a_replicas_own_and_their_averages_are_kept() -> None:
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(momentum=0.0), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X[:9], Y[:9], batch_size=9, verbose=0, shuffle=False)  # 5 rows and 4
    norm = model.layers[0]
    np.testing.assert_allclose(norm.moving_mean.numpy(), X[:9].mean(0), rtol=1e-5, atol=1e-6)
    own = (5 * X[:5].var(0) + 4 * X[5:9].var(0)) / 9
    np.testing.assert_allclose(norm.moving_variance.numpy(), own, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Layer 'flatten")  # does not support masking
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [12, 9])
def test_synchronized_batch_normalization_is_that_of_one_device(rows: int, masked: bool) -> None:
    words = (2 * np.abs(X)).astype("int32")  # of which zeros are masked

    def trained(synchronized: bool) -> Any:
        keras.utils.set_random_seed(0)
        norm = layers.BatchNormalization(synchronized=synchronized)
        first = layers.Embedding(9, 5, "orthogonal", mask_zero=True) if masked else layers.Dense(5, activation="tanh")
        last = [layers.Flatten()] if masked else []
        model = keras.Sequential([keras.Input((3,)), first, norm, *last, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001 if masked else 0.1), "mse")
        model.fit((words if masked else X)[:rows], Y[:rows], batch_size=rows, epochs=3, verbose=0, shuffle=False)
        return model.get_weights()

    expected = trained(False)
    with two().scope():
        found = trained(True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Largest(keras.metrics.Metric):
    """A metric that is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self) -> Any:
        return self.value.value


def one_number(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


@pytest.mark.parametrize("eagerly", [False, True])
def test_metrics_of_all_kinds(eagerly: bool) -> None:
    def logs(**compile: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        metrics = [Largest(), one_number, "mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
        model.compile("sgd", "mse", metrics=metrics, **compile)
        return model.fit(X, Y, batch_size=5, epochs=2, verbose=0, shuffle=False).history

    expected = logs()
    with two().scope():
        found = logs(run_eagerly=eagerly)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_half_precision_with_a_loss_scale() -> None:
    def history() -> Any:
        keras.utils.set_random_seed(0)
        policy = keras.DTypePolicy("mixed_float16")
        model = keras.Sequential([keras.Input((3,)), layers.Dense(8, dtype=policy), layers.Dense(1, dtype="float32")])
        inner = keras.optimizers.SGD(0.05)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=256, dynamic_growth_steps=3), "mse")
        history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False).history
        return [*history["loss"], float(model.optimizer.dynamic_scale.numpy())]

    expected = history()
    with two().scope():
        found = history()
    assert found == pytest.approx(expected, rel=2e-3)
    assert expected[-1] == 1024  # it has grown twice


class Applies(keras.Model):
    """A step of its own, which calls the optimizer as Keras' other backends do."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, slots, metrics = state
        x, y = data

        def loss_of(trainable: Any) -> Any:
            return ops.mean(ops.square(self.stateless_call(trainable, others, x)[0] - y))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        optimizer = self.optimizer
        variables = [*self.trainable_variables, *optimizer.variables]
        known = list(zip(variables, [*trainable, *slots], strict=True))
        with keras.StatelessScope(state_mapping=known) as scope:
            optimizer.apply(gradients)
        new = [[scope.get_current_value(v) for v in vs] for vs in (self.trainable_variables, optimizer.variables)]
        return {"loss": loss}, (new[0], others, new[1], metrics)


@pytest.mark.parametrize("rows", [12, 9])
def test_an_optimizer_that_is_applied_by_hand_and_a_log_that_nobody_has_combined(rows: int) -> None:
    def trained() -> Any:
        keras.utils.set_random_seed(0)
        model = Applies()
        model.compile(keras.optimizers.Adam(0.1))
        history = model.fit(X[:rows], Y[:rows], batch_size=12, epochs=3, verbose=0, shuffle=False).history
        return history["loss"], model.get_weights()

    check_losses_and_weights(trained)


class TwoOptimizers(keras.Model):
    """A step with an optimizer for each half of the weights, and a metric whose weight is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(4, activation="tanh"), layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.other = keras.optimizers.SGD(0.3, clipnorm=0.1)

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, slots, metrics = state
        x, y = data

        def loss_of(trainable: Any) -> Any:
            return ops.mean((self.stateless_call(trainable, others, x)[0] - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        first, slots = self.optimizer.stateless_apply(slots, gradients[:2], trainable[:2])
        own = [v.value for v in self.other.variables]
        second, _ = self.other.stateless_apply(own, gradients[2:], trainable[2:])
        metrics = self.tracker.stateless_update_state(metrics, loss, sample_weight=3.0)
        return {"loss": self.tracker.stateless_result(metrics)}, (first + second, others, slots, metrics)


@pytest.mark.parametrize("batch", [4, 11])  # the last has 1 row, for 2 replicas
def test_two_optimizers_and_a_constant_weight(batch: int) -> None:
    def trained() -> Any:
        keras.utils.set_random_seed(0)
        model = TwoOptimizers()
        model(X)
        model.compile(keras.optimizers.SGD(0.1))
        model.optimizer.build(model.trainable_variables[:2])
        model.other.build(model.trainable_variables[2:])
        history = model.fit(X, Y, batch_size=batch, epochs=3, verbose=0, shuffle=False).history
        return history["loss"], model.get_weights()

    check_losses_and_weights(trained, atol=1e-6)


def test_keras_is_itself_again() -> None:
    stateless_apply = keras.optimizers.Optimizer.stateless_apply
    before = loss_module.reduce_weighted_values, keras.random.SeedGenerator.next, layers.BatchNormalization._moments
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    model.fit(X, Y, epochs=1, verbose=0)
    after = loss_module.reduce_weighted_values, keras.random.SeedGenerator.next, layers.BatchNormalization._moments
    assert before == after
    assert "_losses_override" not in vars(layers.Layer)
    assert keras.optimizers.Optimizer.stateless_apply is stateless_apply
    assert all("update_state" not in vars(metric) for metric in model.metrics)
    alone = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    alone.compile("sgd", "mse")
    assert "make_train_function" not in vars(alone)
