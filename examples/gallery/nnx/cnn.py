"""Flax NNX: a convolutional network with batch normalisation and dropout, on handwritten digits.

After Flax's tutorial "MNIST". It shows objects that a step changes in place: the model with its batch statistics and
its random streams, the optimizer, the metrics. Two lines of the training are Replicax's, marked so; and the model's
normalisation is over all replicas (``axis_name=``), so that it is that of one device.

    python examples/gallery/nnx/cnn.py

prints loss and accuracy of every epoch, and the accuracy on images that it has not seen: 0.95 or more. Needs
scikit-learn.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import replicax

BATCH = 64


class CNN(nnx.Module):
    def __init__(self, dropout, *, rngs):
        normalisation = functools.partial(nnx.BatchNorm, momentum=0.9, axis_name=replicax.REPLICA_AXIS, rngs=rngs)
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = normalisation(16)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = normalisation(32)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.linear1 = nnx.Linear(2 * 2 * 32, 64, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        x = self.dropout(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))
        return self.linear2(x)


def train_step(model, optimizer, metrics, batch):
    def loss_fn(model):
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return replicax.compute_average_loss(losses), logits  # Replicax

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def main(strategy, epochs=6, steps=None, dropout=0.1):
    """Train, and return the loss of each epoch and the accuracy; with ``steps``, epochs are so short."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)

    model = CNN(dropout, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    losses = []
    for epoch in range(epochs):
        rows = np.random.default_rng(epoch).permutation(1500)[: 1500 // BATCH * BATCH].reshape(-1, BATCH)[:steps]
        data = [{"image": images[r], "label": labels[r]} for r in rows]
        for batch in strategy.distribute_dataset(data):
            strategy.run(train_step, args=(model, optimizer, metrics, batch))  # Replicax
        losses.append(float(metrics.compute()["loss"]))
        print(f"epoch {epoch}: " + ", ".join(f"{name} {float(v):.4f}" for name, v in metrics.compute().items()))
        metrics.reset()
    model.eval()
    predict = jax.jit(lambda model, x: nnx.merge(*model)(x).argmax(-1))
    for norm in (model.norm1, model.norm2):
        norm.axis_name = None  # outside of steps there are no replicas
    accuracy = (predict(nnx.split(model), images[1500:]) == labels[1500:]).mean()
    return losses, float(accuracy)


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    print(f"accuracy {main(replicax.MirroredStrategy())[1]:.3f}")
