"""Keras: a transformer that tells documentation from code, by 64 characters of it.

After Keras' example "Text classification with Transformer". The text is Python's own: the topics of its ``help``, and
source code of its standard library. It shows attention, dropout that each replica draws for itself, layers of one's own
making, and steps of which 8 at a time are one program (``steps_per_execution``).

    KERAS_BACKEND=jax python examples/gallery/keras/transformer.py

prints loss and accuracy of every epoch, and the accuracy on text that it has not seen: 0.85 or more.
"""

from __future__ import annotations

import argparse
import pathlib
from pydoc_data import topics

import keras
import numpy as np
from keras import layers, ops

import replicax

LENGTH, WIDTH, BATCH = 64, 32, 64


class Block(layers.Layer):
    """Attention and a small network, each with a residual connection."""

    def __init__(self, dropout, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout)
        self.network = keras.Sequential([layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dropout = layers.Dropout(dropout)

    def call(self, x, training=False):
        y = self.norms[0](x)
        x = x + self.attention(y, y, training=training)
        return x + self.dropout(self.network(self.norms[1](x)), training=training)


class Places(layers.Layer):
    """Adds to each character's vector one for its place."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return x + self.places(ops.arange(LENGTH))


def build(dropout):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Places()(layers.Embedding(128, WIDTH)(inputs))
    x = Block(dropout)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.Dropout(dropout)(x)))


def load_data(rows):
    """``rows`` pieces of text as characters' numbers ``[rows, LENGTH]``, and whether each is code ``[rows, 1]``."""
    library = pathlib.Path(argparse.__file__).parent
    code = "".join((library / f"{name}.py").read_text("utf-8") for name in ("argparse", "tarfile", "typing"))
    texts = ["\n".join(map(topics.topics.get, sorted(topics.topics))), code]
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, rows).astype("int32")
    pieces = np.zeros((rows, LENGTH), "int32")
    for piece, label in zip(pieces, labels, strict=True):
        text = texts[label]
        start = rng.integers(len(text) - LENGTH)
        piece[:] = np.frombuffer(text[start : start + LENGTH].encode("ascii", "replace"), np.uint8) % 128
    return pieces, labels[:, None]


def main(strategy, epochs=6, rows=4096, dropout=0.1, verbose=2):
    """Train on ``rows`` pieces, and return the loss of each epoch and the accuracy on unseen ones."""
    pieces, labels = load_data(rows + 512)
    keras.utils.set_random_seed(0)
    with strategy.scope():  # Replicax
        model = build(dropout)
        optimizer = keras.optimizers.AdamW(2e-3, global_clipnorm=1.0)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], steps_per_execution=8)
    history = model.fit(pieces[:rows], labels[:rows], batch_size=BATCH, epochs=epochs, verbose=verbose)
    _, accuracy = model.evaluate(pieces[rows:], labels[rows:], batch_size=128, verbose=0)
    return history.history["loss"], float(accuracy)


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    print(f"accuracy {main(replicax.MirroredStrategy())[1]:.3f}")
