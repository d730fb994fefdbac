"""Someone from TensorFlow with a loop of their own: tape, metrics, checkpoints, a counter, summaries."""

import sys

import jax
import numpy as np
import optax

import replicax

replicax.use_cpu_devices(4)
strategy = replicax.MirroredStrategy()
GLOBAL_BATCH = 16 * strategy.num_replicas_in_sync

rng = np.random.default_rng(0)
features = rng.normal(size=(1000, 8)).astype(np.float32)
labels = (features.sum(1) > 0).astype(np.int32)
train = strategy.make_numpy_dataset((features[:900], labels[:900])).seed(0).shuffle().batch(GLOBAL_BATCH)
test = strategy.make_numpy_dataset((features[900:], labels[900:])).batch(GLOBAL_BATCH)
dist_train, dist_test = strategy.distribute_dataset(train), strategy.distribute_dataset(test)

with strategy.scope():
    hidden = replicax.Variable(rng.normal(size=(8, 16)).astype(np.float32) * 0.3, name="hidden")
    output = replicax.Variable(rng.normal(size=(16, 2)).astype(np.float32) * 0.3, name="output")
    optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    train_accuracy = replicax.Accuracy()
    test_loss = replicax.Mean()
    step_counter = replicax.Variable(0, aggregation=replicax.Aggregation.ONLY_FIRST_REPLICA, name="step")
variables = [hidden, output]
checkpoint = replicax.Checkpoint(hidden=hidden, output=output, optimizer=optimizer, step=step_counter)
manager = replicax.CheckpointManager(checkpoint, sys.argv[2], max_to_keep=3)
restored = manager.restore_latest()


def logits_of(x):
    return jax.nn.relu(x @ hidden) @ output


def train_step(inputs):
    x, y = inputs

    def loss_fn():
        logits = logits_of(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return replicax.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH), logits

    (loss, logits), gradients = replicax.value_and_grad(loss_fn, variables, has_aux=True)()
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    train_accuracy.update(y, logits)
    step_counter.assign_add(1)
    return loss


def test_step(inputs):
    x, y = inputs
    test_loss.update(optax.softmax_cross_entropy_with_integer_labels(logits_of(x), y))


for epoch in range(0 if restored is None else restored + 1, int(sys.argv[1])):
    total, batches = 0.0, 0
    for inputs in dist_train:
        total += strategy.reduce(replicax.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)
        batches += 1
    for inputs in dist_test:
        strategy.run(test_step, args=(inputs,))
    manager.save(epoch)
    print(
        f"epoch {epoch}: loss {total / batches:.3f}, accuracy {train_accuracy.result():.2f}, {test_loss.result():.3f}"
    )
    train_accuracy.reset()
    test_loss.reset()
manager.wait()
print(f"{step_counter.numpy()} steps, saved {manager.latest_step}")
