"""Keras: a convolutional network with batch normalization and dropout, on handwritten digits.

After Keras' example "Simple MNIST convnet". The model is made and compiled in the strategy's scope, and ``fit``, with a
validation and callbacks, and ``evaluate`` do the rest. One line is Replicax's, marked so; and the normalization is over
all replicas (``synchronized=True``), so that it is that of one device.

    KERAS_BACKEND=jax python examples/gallery/keras/cnn.py

prints loss and accuracy of every epoch, and the accuracy on images that it has not seen: 0.9 or more. Needs
scikit-learn.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import replicax

BATCH = 64


def build(dropout):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(10),
        ]
    )


def load_data():
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels.astype(np.int32)


def main(strategy, epochs=12, rows=1500, dropout=0.2, verbose=2):
    """Train on the first ``rows`` images, and return the loss of each epoch and the accuracy on unseen ones."""
    images, labels = load_data()
    keras.utils.set_random_seed(0)
    with strategy.scope():  # Replicax
        model = build(dropout)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(5e-3), loss, metrics=["accuracy"])
    slower = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5)
    history = model.fit(
        images[:rows],
        labels[:rows],
        batch_size=BATCH,
        epochs=epochs,
        validation_split=0.1,
        callbacks=[slower],
        verbose=verbose,
    )
    _, accuracy = model.evaluate(images[1500:], labels[1500:], batch_size=100, verbose=0)
    return history.history["loss"], float(accuracy)


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    print(f"accuracy {main(replicax.MirroredStrategy())[1]:.3f}")
