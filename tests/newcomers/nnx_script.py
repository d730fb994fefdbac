"""Someone with a model in Flax NNX: batch norm, dropout, metrics, an evaluation without dropout."""

import numpy as np
import optax
from flax import nnx

import replicax


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(20, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


replicax.use_cpu_devices(4)
strategy = replicax.MirroredStrategy()
with strategy.scope():
    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def train_step(model, optimizer, metrics, batch):
    x, y = batch

    def loss_fn(model):
        logits = model(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return replicax.compute_average_loss(losses), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=optax.softmax_cross_entropy_with_integer_labels(logits, y), logits=logits, labels=y)
    optimizer.update(model, grads)
    return loss


def eval_step(model, metrics, batch):
    x, y = batch
    logits = model(x)
    metrics.update(loss=optax.softmax_cross_entropy_with_integer_labels(logits, y), logits=logits, labels=y)


rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 20)).astype(np.float32)
y = np.argmax(x[:, :4], axis=1)
examples = strategy.make_numpy_dataset((x[:960], y[:960])).seed(0).shuffle()
for batch in strategy.distribute_dataset(examples.repeat(8).batch(64)):
    strategy.run(train_step, args=(model, optimizer, metrics, batch))
trained = metrics.compute()
metrics.reset()
evaluated = nnx.view(model, deterministic=True, use_running_average=True)
for batch in strategy.distribute_dataset(strategy.make_numpy_dataset((x[960:], y[960:])).batch(64)):
    strategy.run(eval_step, args=(evaluated, metrics, batch))
print(f"train {float(trained['accuracy']):.2f}, test {float(metrics.compute()['accuracy']):.2f}")
