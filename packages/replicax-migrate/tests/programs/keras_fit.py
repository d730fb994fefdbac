"""A program of a user of Keras: compile, fit, callbacks, mixed precision."""

import tensorflow as tf
from tensorflow import keras

keras.mixed_precision.set_global_policy("mixed_float16")
tf.random.set_seed(0)
strategy = tf.distribute.MirroredStrategy()
BATCH = 64 * strategy.num_replicas_in_sync

(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
train = tf.data.Dataset.from_tensor_slices((x_train[..., None] / 255.0, y_train)).shuffle(10_000).batch(BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
train = train.with_options(options).prefetch(tf.data.AUTOTUNE)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, 1000)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=True,
        steps_per_execution=10,
    )

model.fit(
    train,
    epochs=3,
    validation_data=(x_test[..., None] / 255.0, y_test),
    callbacks=[
        keras.callbacks.ModelCheckpoint("ckpt/{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.TensorBoard("logs"),
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.ReduceLROnPlateau(),
    ],
)
model.save("model.keras")
with strategy.scope():
    again = keras.models.load_model("model.keras")
    again.load_weights(tf.train.latest_checkpoint("ckpt"))
print(again.evaluate(x_test, y_test), again.predict(x_test[:8]))
