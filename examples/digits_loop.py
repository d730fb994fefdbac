"""The digits again, as a run that lasts: it resumes, evaluates, logs, saves, and says where the time went.

    python -m examples.digits_loop [--folder runs/digits]

The batches are those of ``digits.py``; the network is a smaller one, so that it can be read at a glance. End the run by
Ctrl-C, SIGTERM or ``kill -9``, and start it again: it goes on where it was. Needs scikit-learn for the data.
"""

from __future__ import annotations

import argparse
import os

import jax
import jax.numpy as jnp
import optax

import replicax

from . import digits

REPLICAS = 4
WIDTH = 128


def build():
    """What is saved, the step, and the step of an evaluation. Call it in ``strategy.scope()``."""
    key1, key2 = jax.random.split(jax.random.key(0))
    he_normal = jax.nn.initializers.he_normal()
    variables = {
        "hidden": replicax.Variable(lambda: he_normal(key1, (64, WIDTH)), name="hidden"),
        "bias": replicax.Variable(lambda: jnp.zeros(WIDTH), name="bias"),
        "output": replicax.Variable(lambda: he_normal(key2, (WIDTH, 10)), name="output"),
    }
    optimizer = replicax.Optimizer(optax.adam(0.002))

    def model(images):
        x = jax.nn.gelu(images.reshape(len(images), -1) @ variables["hidden"] + variables["bias"])
        return x @ variables["output"]

    def train_step(batch):
        images, labels = batch  # this replica's slice of the global batch

        def loss_fn():
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return replicax.compute_average_loss(losses)

        parameters = list(variables.values())
        loss, gradients = replicax.value_and_grad(loss_fn, parameters)()
        optimizer.apply_gradients(zip(gradients, parameters, strict=True))
        return {"loss": loss}  # this replica's share of the mean loss; the loop adds up the shares

    def evaluation_step(batch):
        images, labels = batch
        is_right = jnp.argmax(model(images), axis=-1) == labels
        return {"accuracy": replicax.compute_average_loss(is_right.astype(jnp.float32))}

    return replicax.Checkpoint(variables=variables, optimizer=optimizer), train_step, evaluation_step


def train(strategy, folder, epochs=digits.EPOCHS, **options):
    """So many passes over the training examples, or fewer, if the accuracy gets no better."""
    examples, test = digits.load_data()
    steps_per_epoch = len(examples[0]) // digits.BATCH
    with strategy.scope():
        checkpoint, train_step, evaluation_step = build()
    manager = replicax.CheckpointManager(
        checkpoint, os.path.join(folder, "checkpoints"), every_steps=5 * steps_per_epoch, best=("accuracy", "max")
    )
    with manager:
        return replicax.train(
            train_step,
            strategy.distribute_dataset(digits.global_batches(strategy, examples, seed=0, epochs=None)),
            epochs * steps_per_epoch,
            checkpoints=manager,
            evaluate=(evaluation_step, [test]),
            evaluate_every=5 * steps_per_epoch,
            log_every=steps_per_epoch,
            logs=os.path.join(folder, "logs"),
            callbacks=[replicax.EarlyStopping("accuracy", "max", patience=4)],
            **options,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/digits", help="for checkpoints and logs")
    parser.add_argument("--epochs", type=int, default=digits.EPOCHS)
    args = parser.parse_args()
    replicax.use_cpu_devices(REPLICAS)  # emulated on this CPU; leave this line out where there are accelerators
    train(replicax.MirroredStrategy(), args.folder, args.epochs)


if __name__ == "__main__":
    main()
