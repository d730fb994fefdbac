"""What examples/towers.py was: a training script of 2018 for ``tf.contrib.distribute`` of TensorFlow 1.x, run eagerly.

TensorFlow 1.x runs on no Python of today. ``make oracle`` runs this script on the TensorFlow of today, with what has
become of the names that it imports, and finds the same numbers as with examples/towers.py. To compare the two:

    diff examples/towers_tensorflow.py examples/towers.py

``fetch`` and ``tower_local_var_scope`` are words of 1.9, ``run_steps_on_dataset`` and ``VariableAggregation`` of 1.10
to 1.12. No release had them all; the script has them to show that the words of each carry over.
"""

import numpy as np
import tensorflow as tf
from tensorflow import train as training
from tensorflow.contrib import distribute

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
            self.bias = tf.get_variable("bias", shape=[32], initializer=tf.zeros_initializer)
        with tf.variable_scope("logits"):
            self.logits_kernel = tf.get_variable("kernel", shape=[32, 10])
            self.logits_bias = tf.get_variable("bias", shape=[10], initializer=tf.zeros_initializer)

    def __call__(self, images):
        hidden = tf.nn.relu(tf.matmul(images, self.kernel) + self.bias)
        return tf.matmul(hidden, self.logits_kernel) + self.logits_bias


class TowerLocalMean:
    """A metric: each tower adds to its own sums, which are combined when they are fetched."""

    def __init__(self, distribution, name):
        self.distribution = distribution
        with distribution.tower_local_var_scope("sum"), tf.variable_scope(name):
            self.total = tf.get_variable("total", shape=[], initializer=tf.zeros_initializer)
            self.count = tf.get_variable("count", shape=[], initializer=tf.zeros_initializer)

    def update(self, values):
        self.total.assign_add(tf.reduce_sum(values))
        self.count.assign_add(tf.to_float(tf.size(values)))

    def result(self):
        return self.distribution.fetch(self.total) / self.distribution.fetch(self.count)

    def reset(self):
        self.total.assign(0.0)
        self.count.assign(0.0)


def clip_by_global_norm(distribution, gradients):
    """Called once for all towers, with what each has: scale by the norm of the sum of their gradients."""
    pairs = [(gradient, gradient) for gradient in gradients]
    sums = distribution.batch_reduce(tf.VariableAggregation.SUM, pairs)
    norm = tf.sqrt(sum(tf.reduce_sum(total**2) for total in sums))
    return CLIP_NORM / tf.maximum(norm, CLIP_NORM)


def make_step(distribution):
    model = Model()
    optimizer = training.GradientDescentOptimizer(LEARNING_RATE)
    accuracy = TowerLocalMean(distribution, "accuracy")
    global_step = training.get_or_create_global_step()

    def tower_fn(images, labels):
        def loss_fn():  # the mean over this tower's examples; compute_gradients scales it by the number of towers
            logits = model(images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
            return tf.reduce_mean(losses)

        predictions = tf.cast(tf.argmax(model(images), axis=-1), tf.int32)
        accuracy.update(tf.to_float(tf.equal(predictions, labels)))
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
        dataset = tf.data.Dataset.from_tensor_slices((images[: steps * BATCH], labels[: steps * BATCH]))
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
    tf.enable_eager_execution(config=tf.ConfigProto(device_count={"CPU": TOWERS}))
    distribution = distribute.MirroredStrategy([f"/device:CPU:{i}" for i in range(TOWERS)])
    for step, loss, accuracy in train(distribution):
        print(f"step {step:4d}: loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
