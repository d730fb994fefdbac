"""Someone with two machines: the script of the page on several machines, for a run in which a worker is killed."""

import os

import numpy as np
import optax

import replicax

strategy = replicax.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(4096, 3)).astype(np.float32)
examples = strategy.make_numpy_dataset((x, x @ np.array([1.0, -2.0, 3.0], np.float32)))

with strategy.scope():
    w = replicax.Variable(np.zeros(3, np.float32), name="w")
    optimizer = replicax.Optimizer(optax.adam(0.05))


def step(batch):
    features, labels = batch
    share, gradients = replicax.value_and_grad(
        lambda: replicax.compute_average_loss((features @ w - labels) ** 2), [w]
    )()
    optimizer.apply_gradients(zip(gradients, [w], strict=True))
    return {"loss": share}


class Kill(replicax.Callback):
    """Ends worker 1 the hard way, once."""

    def on_log(self, run, step, values):
        if step == 250 and strategy.extended.workers.index == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)


run = replicax.train(
    step,
    strategy.distribute_dataset(examples.seed(0).shuffle().repeat().batch(64)),
    400,
    checkpoints=replicax.CheckpointManager(replicax.Checkpoint(w=w, optimizer=optimizer), "run", every_steps=100),
    callbacks=Kill(),
    log_every=50,
)
if strategy.extended.workers.index == 0:
    print(f"step {run.step} on {strategy.num_replicas_in_sync} replicas: w = {np.round(w.numpy(), 2).tolist()}")
