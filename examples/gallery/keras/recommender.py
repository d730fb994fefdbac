"""Keras: a recommender that learns from ratings what people like.

After Keras' example "Collaborative Filtering for Movie Recommendations". The ratings are made up: each person and each
film has three tastes. It shows a model with several inputs by name, embeddings with regularizers, sample weights, and
predictions in the order of the input, whatever the number of replicas.

    KERAS_BACKEND=jax python examples/gallery/keras/recommender.py

prints the loss of every epoch, and the root of the mean squared error on ratings that it has not seen: 0.25 or less,
where the ratings' deviation is 1.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

import replicax

PEOPLE, FILMS, TASTES, BATCH = 200, 100, 3, 256


class Recommender(keras.Model):
    """Rates a film for a person by the product of what is known of both."""

    def __init__(self, width=8):
        super().__init__()
        table = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.L2(1e-6)}
        self.people, self.films = layers.Embedding(PEOPLE, width, **table), layers.Embedding(FILMS, width, **table)
        self.fame = layers.Embedding(FILMS, 1)

    def call(self, inputs):
        product = self.people(inputs["person"]) * self.films(inputs["film"])
        return ops.sum(product, axis=-1, keepdims=True) + self.fame(inputs["film"])


def load_data(rows):
    """``rows`` ratings ``[rows, 1]`` of deviation 1, who gave them to which film, and how sure they were."""
    rng = np.random.default_rng(0)
    person, film = rng.integers(0, PEOPLE, rows), rng.integers(0, FILMS, rows)
    tastes, looks = rng.normal(size=(PEOPLE, TASTES)), rng.normal(size=(FILMS, TASTES))
    sure = rng.uniform(0.5, 1.5, rows)
    ratings = ((tastes[person] * looks[film]).sum(-1) + 0.2 * rng.normal(size=rows) / sure) / np.sqrt(TASTES)
    inputs = {"person": person.astype("int32"), "film": film.astype("int32")}
    return inputs, ratings.astype("float32")[:, None], sure.astype("float32")


def main(strategy, epochs=15, rows=16384, verbose=2):
    """Train on ``rows`` ratings, and return the loss of each epoch and the error on unseen ones."""
    inputs, ratings, sure = load_data(rows + 1000)
    keras.utils.set_random_seed(0)
    with strategy.scope():  # Replicax
        model = Recommender()
        model.compile(keras.optimizers.Adam(2e-2), "mse")
    seen = {name: ids[:rows] for name, ids in inputs.items()}
    unseen = {name: ids[rows:] for name, ids in inputs.items()}
    history = model.fit(
        seen, ratings[:rows], sample_weight=sure[:rows], batch_size=BATCH, epochs=epochs, verbose=verbose
    )
    error = model.predict(unseen, batch_size=300, verbose=0) - ratings[rows:]
    return history.history["loss"], float(np.sqrt((error**2).mean()))


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    print(f"error {main(replicax.MirroredStrategy())[1]:.3f}")
