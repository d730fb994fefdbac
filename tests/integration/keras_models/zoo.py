"""Ten small models in Keras' idiom, each with its data and what is special about it; none knows of Replicax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

ROWS = 44  # in batches of 16 the last has 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and what it is given.

    Attributes:
      build: makes the model.
      compile: keyword arguments of ``compile``, made anew for each model.
      data: ``x`` and ``y``.
      fit: further keyword arguments of ``fit``.
      on_replicas: what ``build`` is given on replicas, to be the same model there.
    """

    build: Callable[[], keras.Model]
    compile: Callable[[], dict[str, Any]]
    data: Callable[[], tuple[Any, Any]]
    fit: Callable[[], dict[str, Any]] = dict
    on_replicas: dict[str, Any] = dataclasses.field(default_factory=dict)


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def _classes(count: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(ROWS, *shape)).astype("int32")


def _mlp() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)])


def _cnn(synchronized: bool = False) -> keras.Model:
    """A convolutional network with batch normalization."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=synchronized),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def _recurrent() -> keras.Model:
    """Sequences of different lengths, which are masked; an LSTM and a GRU."""
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.LSTM(8, return_sequences=True),
            layers.GRU(8, return_sequences=True),
            layers.Dense(5),  # for each word of the sequence, so the mask counts in the loss
        ]
    )


def _words() -> tuple[Any, Any]:
    x = _classes(20, 7, seed=2)
    x[:, 0] += 1
    lengths = np.random.default_rng(3).integers(1, 8, size=ROWS)
    x[np.arange(7) >= lengths[:, None]] = 0
    return x, _classes(5, 7)


def _transformer() -> keras.Model:
    x = inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(x)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.0)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.0)(attended))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(x)))


class Recommender(keras.Model):
    """Two towers of embeddings, whose product is the rating."""

    def __init__(self) -> None:
        super().__init__()
        self.users = layers.Embedding(30, 6, embeddings_regularizer=keras.regularizers.L2(1e-3))
        self.items = layers.Embedding(40, 6)
        self.bias = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        user, item = self.users(inputs["user"]), self.items(inputs["item"])
        return ops.sum(user * item, axis=-1, keepdims=True) + self.bias(user)


def _two_ways() -> keras.Model:
    """Two inputs, and two outputs whose losses have weights."""
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    x = layers.Concatenate()([layers.Dense(8, activation="tanh")(a), layers.Dense(8, activation="tanh")(b)])
    return keras.Model(
        {"a": a, "b": b}, {"price": layers.Dense(1, name="price")(x), "kind": layers.Dense(3, name="kind")(x)}
    )


class WithLosses(keras.Model):
    """Losses that layers add: of the model's own making, of activities and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8, activation="relu", kernel_regularizer="l2", activity_regularizer="l1")
        self.outer = layers.Dense(1, bias_regularizer=keras.regularizers.L1L2(0.1, 0.1))

    def call(self, x: Any) -> Any:
        x = self.inner(x)
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return self.outer(x)


class OwnStep(keras.Model):
    """A ``train_step`` of its own, as Keras' guide for JAX writes one, with a loss and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="tanh"), layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.loss_tracker, self.mae]

    def _loss(self, trainable: Any, others: Any, x: Any, y: Any, training: bool) -> Any:
        prediction, others = self.stateless_call(trainable, others, x, training=training)
        return ops.mean(ops.abs(prediction - y) ** 1.5), (prediction, others)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, others, slots, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (prediction, others)), grads = gradient(trainable, others, x, y, training=True)
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        logs, metrics = self._measured(metrics, loss, y, prediction, len(x))
        return logs, (trainable, others, slots, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, others, metrics = state
        x, y = data
        loss, (prediction, others) = self._loss(trainable, others, x, y, training=False)
        logs, metrics = self._measured(metrics, loss, y, prediction, len(x))
        return logs, (trainable, others, metrics)

    def _measured(self, metrics: Any, loss: Any, y: Any, prediction: Any, rows: int) -> Any:
        logs, new = {}, []
        for metric in self.metrics:
            own = metrics[len(new) : len(new) + len(metric.variables)]
            if metric is self.loss_tracker:
                own = metric.stateless_update_state(own, loss, rows)
            else:
                own = metric.stateless_update_state(own, y, prediction)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, new


class Autoencoder(keras.Model):
    """A loss of its own making: ``compute_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(3, activation="tanh")])
        self.decoder = keras.Sequential([layers.Dense(8)])

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.square(x - y_pred)) + 0.01 * ops.mean(ops.abs(self.encoder(x)))


def _weights() -> np.ndarray:
    return np.random.default_rng(5).uniform(0.2, 2.0, size=ROWS).astype("float32")


CASES: dict[str, Case] = {
    "mlp": Case(
        _mlp,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        },
        lambda: (_numbers(8), _classes(3)),
    ),
    "cnn": Case(
        _cnn,
        lambda: {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]},
        lambda: (_numbers(8, 8, 1), _classes(3)),
        on_replicas={"synchronized": True},
    ),
    "recurrent": Case(
        _recurrent,
        lambda: {
            "optimizer": keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "weighted_metrics": ["accuracy"],
        },
        _words,
    ),
    "transformer": Case(
        _transformer,
        lambda: {
            "optimizer": keras.optimizers.AdamW(1e-3, weight_decay=0.1, use_ema=True),
            "loss": "binary_crossentropy",
            "metrics": ["accuracy", keras.metrics.AUC(name="auc")],
        },
        lambda: (_classes(20, 6), _classes(2, 1)),
    ),
    "recommender": Case(
        Recommender,
        lambda: {"optimizer": keras.optimizers.Adagrad(0.1), "loss": "mse", "metrics": ["mae"]},
        lambda: ({"user": _classes(30), "item": _classes(40, seed=7)}, _numbers(1)),
    ),
    "two ways": Case(
        _two_ways,
        lambda: {
            "optimizer": keras.optimizers.RMSprop(1e-2, clipnorm=0.3),
            "loss": {"price": "huber", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            "loss_weights": {"price": 0.3, "kind": 1.5},
            "metrics": {"price": ["mae"], "kind": ["accuracy"]},
        },
        lambda: ({"a": _numbers(4), "b": _numbers(3, seed=4)}, {"price": _numbers(1, seed=5), "kind": _classes(3)}),
    ),
    "with losses": Case(
        WithLosses,
        lambda: {"optimizer": keras.optimizers.Adam(1e-2), "loss": "mse", "metrics": [keras.metrics.R2Score()]},
        lambda: (_numbers(8), _numbers(1, seed=6)),
    ),
    "own step": Case(
        OwnStep, lambda: {"optimizer": keras.optimizers.Nadam(1e-2)}, lambda: (_numbers(8), _numbers(1, seed=6))
    ),
    "autoencoder": Case(Autoencoder, lambda: {"optimizer": keras.optimizers.Lion(1e-3)}, lambda: (_numbers(8), None)),
    "weighted": Case(
        _mlp,
        lambda: {
            "optimizer": keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")],
        },
        lambda: (_numbers(8), _classes(3)),
        lambda: {"class_weight": {0: 0.5, 1: 1.0, 2: 3.0}},
    ),
    "weighted rows": Case(
        _mlp,
        lambda: {
            "optimizer": "sgd",
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
            "weighted_metrics": ["accuracy"],
        },
        lambda: (_numbers(8), _classes(3)),
        lambda: {"sample_weight": _weights()},
    ),
}


def trained(case: Case, *, replicated: bool, epochs: int = 2, **compile: Any) -> tuple[Any, Any, Any]:
    """The history of ``epochs`` with a validation after each, an evaluation, and predictions."""
    keras.utils.set_random_seed(7)
    model = case.build(**case.on_replicas if replicated else {})
    model.compile(**case.compile(), **compile)
    x, y = case.data()
    fit = {"batch_size": 16, "epochs": epochs, "verbose": 0, "shuffle": False, "validation_data": (x, y), **case.fit()}
    history = model.fit(x, y, **fit).history
    evaluated = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    return history, evaluated, model.predict(x, batch_size=20, verbose=0)
