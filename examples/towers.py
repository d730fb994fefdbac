"""Train on handwritten digits with a script of 2018: towers, merge_call, tower-local variables, steps on a dataset.

    python examples/towers.py

It is ``examples/towers_tensorflow.py``, a script for ``tf.contrib.distribute`` of TensorFlow 1.x in the words of 1.9
(``fetch``, tower-local scopes) and of 1.10 to 1.12 (``run_steps_on_dataset``, ``VariableAggregation``), with nothing
changed but

- the imports;
- the names of tensor operations, one for one: docs/towers.md has the table, and a test applies it;
- one line, which prepares TensorFlow: it runs eagerly, and takes a CPU for four devices. Here only that is to be done.

Every call of a ``distribution``, a tower, a context or a variable stands as it did. All steps of an epoch are one
dispatch of one compiled program for all towers. Needs scikit-learn for the data.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax.compat import v1 as distribute, v1 as tf, v1 as training

TOWERS = 4
BATCH = 128  # of all towers together
EPOCHS = 20
LEARNING_RATE = 0.5
CLIP_NORM = 1.0


def load_data():
    """The 1797 images that scikit-learn ships, 64 numbers from 0 to 1 each, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int32)


class Model:
    """Two dense layers."""

    def __init__(self):
        with tf.variable_scope("hidden"):
            self.kernel = tf.get_variable("kernel", shape=[64, 32])
            self.bias = tf.get_variable("bias", shape=[32], initializer=jnp.zeros)
        with tf.variable_scope("logits"):
            self.logits_kernel = tf.get_variable("kernel", shape=[32, 10])
            self.logits_bias = tf.get_variable("bias", shape=[10], initializer=jnp.zeros)

    def __call__(self, images):
        hidden = jax.nn.relu(jnp.matmul(images, self.kernel) + self.bias)
        return jnp.matmul(hidden, self.logits_kernel) + self.logits_bias


class TowerLocalMean:
    """A metric: each tower adds to its own sums, which are combined when they are fetched."""

    def __init__(self, distribution, name):
        self.distribution = distribution
        with distribution.tower_local_var_scope("sum"), tf.variable_scope(name):
            self.total = tf.get_variable("total", shape=[], initializer=jnp.zeros)
            self.count = tf.get_variable("count", shape=[], initializer=jnp.zeros)

    def update(self, values):
        self.total.assign_add(jnp.sum(values))
        self.count.assign_add(jnp.float32(jnp.size(values)))

    def result(self):
        return self.distribution.fetch(self.total) / self.distribution.fetch(self.count)

    def reset(self):
        self.total.assign(0.0)
        self.count.assign(0.0)


def clip_by_global_norm(distribution, gradients):
    """Called once for all towers, with what each has: scale by the norm of the sum of their gradients."""
    pairs = [(gradient, gradient) for gradient in gradients]
    sums = distribution.batch_reduce(tf.VariableAggregation.SUM, pairs)
    norm = jnp.sqrt(sum(jnp.sum(total**2) for total in sums))
    return CLIP_NORM / jnp.maximum(norm, CLIP_NORM)


def make_step(distribution):
    model = Model()
    optimizer = training.GradientDescentOptimizer(LEARNING_RATE)
    accuracy = TowerLocalMean(distribution, "accuracy")
    global_step = training.get_or_create_global_step()

    def tower_fn(images, labels):
        def loss_fn():  # the mean over this tower's examples; compute_gradients scales it by the number of towers
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels)
            return jnp.mean(losses)

        predictions = jnp.astype(jnp.argmax(model(images), axis=-1), jnp.int32)
        accuracy.update(jnp.float32(jnp.equal(predictions, labels)))
        grads_and_vars = optimizer.compute_gradients(loss_fn)
        gradients = [gradient for gradient, _ in grads_and_vars]
        scale = distribute.get_tower_context().merge_call(clip_by_global_norm, gradients)
        optimizer.apply_gradients([(scale * g, v) for g, v in grads_and_vars], global_step=global_step)
        return loss_fn()

    def step_fn(context, images, labels):
        losses = distribution.call_for_each_tower(tower_fn, images, labels)
        context.set_last_step_output("loss", losses, tf.VariableAggregation.MEAN)

    return step_fn, accuracy, global_step


def train(distribution, epochs=EPOCHS):
    """What is printed, epoch by epoch: the loss of the last step, and the accuracy in training."""
    images, labels = load_data()
    steps = len(images) // BATCH

    def dataset_fn():  # a tower's batches
        dataset = distribution.strategy.make_numpy_dataset((images[: steps * BATCH], labels[: steps * BATCH]))
        return dataset.batch(BATCH // distribution.num_towers)

    history = []
    with distribution.scope():
        step_fn, accuracy, global_step = make_step(distribution)
        dataset = distribution.distribute_dataset(dataset_fn)
        for _ in range(epochs):
            distribution.call_for_each_tower(accuracy.reset)
            iterator = dataset.make_one_shot_iterator()
            context = distribution.run_steps_on_dataset(
                step_fn, iterator, iterations=steps, initial_loop_values={"loss": 0.0}
            )
            loss = context.last_step_outputs["loss"]
            history.append((int(distribution.fetch(global_step)), float(loss), float(accuracy.result())))
    return history


def main():
    replicax.use_cpu_devices(TOWERS)
    distribution = distribute.MirroredStrategy([f"/device:CPU:{i}" for i in range(TOWERS)])
    for step, loss, accuracy in train(distribution):
        print(f"step {step:4d}: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
