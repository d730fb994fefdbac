"""A program of several workers, which are told of each other by TF_CONFIG."""

import json
import os

import tensorflow as tf
from tensorflow.keras import layers, models
from tensorflow.keras.callbacks import ModelCheckpoint, TensorBoard

os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": ["localhost:12345", "localhost:23456"]}, "task": {"type": "worker", "index": 0}}
)
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id


def is_chief():
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)


def dataset_fn(input_context):
    batch = input_context.get_per_replica_batch_size(128)
    d = tf.data.Dataset.range(1000).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return d.batch(batch).map(lambda i: (tf.cast(i, tf.float32)[:, None], i % 3))


with strategy.scope():
    model = models.Sequential([layers.Dense(8), layers.Dense(3)])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    dataset = strategy.distribute_datasets_from_function(dataset_fn)

path = "ckpt" if is_chief() else f"worker{task_id}"
model.fit(dataset, epochs=2, steps_per_epoch=10, callbacks=[ModelCheckpoint(path), TensorBoard("logs")])
handler = tf.distribute.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver, tf.train.Checkpoint(model=model), "ckpt"
)
handler.save_checkpoint_if_preempted()
if is_chief():
    model.save(path)
