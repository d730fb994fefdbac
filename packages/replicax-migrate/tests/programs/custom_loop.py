"""A program with a loop of its own: tape, function, metrics, checkpoints, summaries."""

import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

strategy = tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.NcclAllReduce())
GLOBAL_BATCH = 32 * strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensor_slices((tf.random.normal([1024, 8]), tf.zeros([1024], tf.int32))).batch(
    GLOBAL_BATCH
)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(3)])
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    step_counter = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model, step=step_counter)
manager = tf.train.CheckpointManager(checkpoint, "ckpt", max_to_keep=3)
checkpoint.restore(manager.latest_checkpoint).expect_partial()
writer = tf.summary.create_file_writer("logs")


def compute_loss(labels, predictions):
    per_example = loss_object(labels, predictions)
    loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses or [0.0]))


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
        scaled = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(gradients)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    step_counter.assign_add(1)
    tf.print("replica", tf.distribute.get_replica_context().replica_id_in_sync_group)
    return loss


@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function(jit_compile=True, reduce_retracing=True)
def many_steps(iterator, steps):
    for _ in tf.range(steps):
        strategy.run(train_step, args=(next(iterator),))


for epoch in range(3):
    total, batches = 0.0, 0
    for x in dist_dataset:
        total += distributed_train_step(x)
        batches += 1
    with writer.as_default():
        tf.summary.scalar("loss", total / batches, step=epoch)
        tf.summary.scalar("accuracy", train_accuracy.result(), step=epoch)
    writer.flush()
    manager.save()
    train_accuracy.reset_states()
tf.saved_model.save(model, "exported")
tf.profiler.experimental.start("logs")
tf.profiler.experimental.stop()
