"""Someone from TensorFlow with Keras: the program of before, with three lines changed."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import replicax

replicax.use_cpu_devices(4)
keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_bfloat16")
strategy = replicax.MirroredStrategy()

rng = np.random.default_rng(0)
x = rng.normal(size=(700, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
x_train, y_train, x_test, y_test = x[:600], y[:600], x[600:], y[600:]

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 100)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=5,
    validation_data=(x_test, y_test),
    verbose=0,
    callbacks=[
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        keras.callbacks.CSVLogger("log.csv"),
    ],
)
again = keras.models.load_model("best.keras")
loss, accuracy = again.evaluate(x_test, y_test, verbose=0)
print(f"accuracy {accuracy:.2f}, {again.predict(x_test[:8], verbose=0).shape}")
