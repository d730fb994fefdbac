"""Someone from Accelerate: a loader, accumulation, bf16, clipping, a schedule, evaluation, checkpoints, logs."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(20, 64, dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


class Loader:
    """Such as a DataLoader: batches of the whole global batch."""

    def __init__(self, x, y, batch_size, shuffle):
        self.x, self.y, self.batch_size, self.shuffle = x, y, batch_size, shuffle

    def __len__(self):
        return len(self.x) // self.batch_size

    def __iter__(self):
        order = np.random.default_rng(0).permutation(len(self.x)) if self.shuffle else np.arange(len(self.x))
        for i in range(len(self)):
            rows = order[i * self.batch_size : (i + 1) * self.batch_size]
            yield {"x": self.x[rows], "y": self.y[rows]}


replicax.use_cpu_devices(4)
strategy = replicax.MirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 20)).astype(np.float32)
y = np.argmax(x[:, :4], axis=1)
train_batches = strategy.distribute_dataset(Loader(x, y, 128, shuffle=True))
eval_batches = strategy.distribute_dataset(Loader(x, y, 256, shuffle=False))

with strategy.scope():
    model = Net(rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 60)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), wrt=nnx.Param)


def train_step(model, optimizer, batch):
    def loss_fn(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return replicax.compute_average_loss(losses)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def eval_step(model, batch):
    right = jnp.argmax(model(batch["x"]), -1) == batch["y"]
    return {"accuracy": replicax.compute_average_loss(right.astype(jnp.float32))}


run = replicax.train(
    functools.partial(train_step, model, optimizer),
    train_batches,
    steps=60,
    accumulate=2,
    evaluate=(functools.partial(eval_step, model), eval_batches),
    evaluate_every=30,
    logs="logs",
    checkpoints=replicax.CheckpointManager(
        replicax.Checkpoint(model=model, optimizer=optimizer), "ckpt", every_steps=30
    ),
)
print(f"step {run.step}: {run.evaluation['accuracy']:.2f}")
