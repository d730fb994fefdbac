"""A step of 1.14 in a session, with optimizers, losses and metrics of its time."""

import numpy as np
import tensorflow.compat.v1 as tf

strategy = tf.distribute.MirroredStrategy()
points = tf.data.Dataset.from_tensor_slices((np.ones((32, 2), np.float32), np.zeros(32, np.int64))).batch(8)
distributed = strategy.experimental_distribute_dataset(points)

with strategy.scope():
    layer = tf.keras.layers.Dense(2)
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    mean = tf.keras.metrics.Mean()


def step(batch):
    features, labels = batch
    logits = layer(features)
    losses = tf.losses.sparse_softmax_cross_entropy(labels, logits, reduction=tf.losses.Reduction.NONE)
    losses += tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
    slopes = tf.gradients(loss, layer.trainable_variables)
    update = optimizer.apply_gradients(zip(slopes, layer.trainable_variables, strict=True))
    right, count = tf.metrics.accuracy(labels, tf.cast(logits[:, 1] > logits[:, 0], tf.int64))
    with tf.control_dependencies([update, mean.update_state(losses), right, count]):
        return tf.cast(loss, tf.float32)


with tf.Session() as session:
    iterator = distributed.make_initializable_iterator()
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(next(iterator),)), axis=None)
    session.run([tf.global_variables_initializer(), iterator.initializer])
    print(session.run(total))
