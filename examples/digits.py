"""Train a small convolutional network on handwritten digits, on eight replicas.

    python examples/digits.py

The step below is written for ONE replica. The strategy decides how many there are and where they run; nothing
else in this file changes between one CPU and a machine full of accelerators. Needs scikit-learn for the data.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

REPLICAS = 8
BATCH = 128  # the GLOBAL batch, which the replicas share: 16 images for each of eight
EPOCHS = 30
LEARNING_RATE = 0.01
TEST_SIZE = 3 * BATCH  # a multiple of the batch, so that whatever number of replicas splits one splits the other


def load_data():
    """The 1797 images of 8×8 pixels that scikit-learn ships, as ``(train, test)``; the split is always the same."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)  # NHWC, from 0 to 1
    labels = labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=TEST_SIZE, stratify=labels, random_state=0)
    return (x, y), (x_test, y_test)


def shift(batch, rng):
    """Move each image by up to one pixel each way: there are few images, and these are as good as new ones."""
    images, labels = batch
    image = np.arange(len(images))[:, None, None]
    rows, columns = rng.integers(3, size=(2, len(images), 1)) + np.arange(8)
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)])
    return padded[image, rows[:, :, None], columns[:, None, :]], labels


def global_batches(strategy, train, seed, epochs):
    """The same batches for any number of replicas: a strategy divides them, and has no say in what they are."""
    examples = strategy.make_numpy_dataset(train).seed(seed).shuffle()  # in another order each epoch
    # The few examples that do not fill a batch sit out this epoch: other ones will the next time.
    return examples.batch(BATCH, drop_remainder=True).random_map(shift).repeat(epochs)


def build(seed, steps):
    """The variables and the two steps. Call it in ``strategy.scope()``, which places what is created here."""
    key1, key2, key3 = jax.random.split(jax.random.key(seed), 3)
    he_normal = jax.nn.initializers.he_normal()

    # Given a function, a variable is initialised right where it will live: on every replica's device.
    kernel1 = replicax.Variable(lambda: he_normal(key1, (3, 3, 1, 32)), name="conv1/kernel")
    bias1 = replicax.Variable(lambda: jnp.zeros(32), name="conv1/bias")
    kernel2 = replicax.Variable(lambda: he_normal(key2, (3, 3, 32, 64)), name="conv2/kernel")
    bias2 = replicax.Variable(lambda: jnp.zeros(64), name="conv2/bias")
    kernel3 = replicax.Variable(lambda: he_normal(key3, (4 * 4 * 64, 10)), name="dense/kernel")
    bias3 = replicax.Variable(lambda: jnp.zeros(10), name="dense/bias")
    variables = [kernel1, bias1, kernel2, bias2, kernel3, bias3]

    # Any Optax transformation will do. The warm-up keeps Adam's first, uncertain steps small.
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup_steps=steps // 10, decay_steps=steps)
    optimizer = replicax.Optimizer(optax.adam(schedule))

    def conv(x, kernel, stride):
        # jax.lax wants arrays: `.value` is a variable's. Operators and jax.numpy take the variable itself.
        return jax.lax.conv_general_dilated(
            x, kernel.value, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def model(images):
        x = jax.nn.gelu(conv(images, kernel1, stride=1) + bias1)
        x = jax.nn.gelu(conv(x, kernel2, stride=2) + bias2)
        return x.reshape(len(x), -1) @ kernel3 + bias3

    def train_step(batch):
        images, labels = batch  # this replica's slice of the global batch

        def loss_fn():
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            # This replica's share of the mean over the GLOBAL batch. A plain mean would be over the slice
            # only, and the sum of the replicas' gradients would come out REPLICAS times too large.
            return replicax.compute_average_loss(losses)

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        # The one place where replicas meet: all gradients are summed over them in one all-reduce.
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def count_correct(batch):
        images, labels = batch
        return jnp.sum(jnp.argmax(model(images), axis=-1) == labels)

    return variables, train_step, count_correct


def evaluate(strategy, count_correct, test):
    """The accuracy on the whole test set: each replica counts its slice, and each example counts once."""
    [batch] = strategy.distribute_dataset([test])
    correct = strategy.run(count_correct, args=(batch,))
    return int(strategy.reduce("sum", correct)) / TEST_SIZE


def plan(strategy):
    """What ``replicax plan examples/digits.py --topology v5e:4x4`` plans: the training step, and what it takes."""
    with strategy.scope():
        _, train_step, _ = build(seed=0, steps=1000)
    share = max(1, BATCH // strategy.num_replicas_in_sync)  # the images of one replica
    return train_step, (jax.ShapeDtypeStruct((share, 8, 8, 1), np.float32), jax.ShapeDtypeStruct((share,), np.int32))


def main():
    replicax.use_cpu_devices(REPLICAS)  # emulated on this CPU; leave this line out where there are accelerators
    strategy = replicax.MirroredStrategy()  # a replica on each device there is

    train, test = load_data()
    steps_per_epoch = len(train[0]) // BATCH
    with strategy.scope():
        _, train_step, count_correct = build(seed=0, steps=EPOCHS * steps_per_epoch)

    losses, start = [], time.perf_counter()
    batches = strategy.distribute_dataset(global_batches(strategy, train, seed=0, epochs=EPOCHS))
    for step, batch in enumerate(batches, start=1):
        losses.append(strategy.run(train_step, args=(batch,)))
        if step % steps_per_epoch == 0:
            # The shares add up to the mean losses of the epoch's steps. Looking at them only now lets the
            # devices run ahead of Python.
            loss = np.mean(strategy.reduce("sum", losses))
            rate = len(losses) * BATCH / (time.perf_counter() - start)
            accuracy = evaluate(strategy, count_correct, test)
            print(
                f"epoch {step // steps_per_epoch:2}   loss {loss:.4f}   test accuracy {accuracy:7.2%}   "
                f"{rate:6,.0f} examples/s"
            )
            losses, start = [], time.perf_counter()


if __name__ == "__main__":
    main()
