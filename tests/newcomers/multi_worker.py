"""Someone from TensorFlow with several workers, who are told of each other by TF_CONFIG."""

import json
import os

import numpy as np
import optax

import replicax

tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])
strategy = replicax.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver


def is_chief():
    return resolver.task_type == "worker" and resolver.task_id == 0


x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 3.0], np.float32)


def dataset_fn(context):
    batch = context.get_per_replica_batch_size(32)
    mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    return strategy.make_numpy_dataset((x[mine], y[mine])).repeat(10).batch(batch)


with strategy.scope():
    w = replicax.Variable(np.zeros(3, np.float32), name="w")
    optimizer = replicax.Optimizer(optax.sgd(0.1))


def train_step(batch):
    features, labels = batch
    share, gradients = replicax.value_and_grad(
        lambda: replicax.compute_average_loss((features @ w - labels) ** 2), [w]
    )()
    optimizer.apply_gradients(zip(gradients, [w], strict=True))
    return share


for batch in strategy.distribute_datasets_from_function(dataset_fn):
    share = strategy.run(train_step, args=(batch,))
checkpoint = replicax.Checkpoint(w=w)
checkpoint.save("model")
if is_chief():
    print(f"{num_workers} workers, {strategy.num_replicas_in_sync} replicas: w = {np.round(w.numpy(), 2).tolist()}")
