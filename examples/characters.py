"""Train a character language model on real text files, with workers that read files of their own.

    replicax launch --workers 2 --devices-per-worker 2 examples/characters.py
    python examples/characters.py

The text is the Python standard library's source code on this machine, or what you name (``--text "notes/*.txt"``). Each
worker reads some of the files and feeds the replicas on its own devices; gradients are summed over all of them. The
step is written for ONE replica, and knows nothing of workers. The first line starts two workers on this machine, with
two emulated CPU devices each; the second is one worker.

The run is saved now and then. ``kill -9`` a worker, and the launcher starts both again, which go on from there. Any of
these lines goes on with a run that was ended, also one of another number of workers.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import random
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH = 128  # the GLOBAL batch, in lines
LENGTH = 48  # characters of a line
WIDTH = 96
LEARNING_RATE = 0.005
EVERY = 20  # after so many steps a row is logged, the mean of these steps, and the run is saved
TEXT = os.path.join(sysconfig.get_paths()["stdlib"], "*.py")


def text_files(pattern, limit):
    """So many of the files, always the same ones on the same machine, in no order of theirs."""
    files = sorted(glob.glob(pattern))
    return random.Random(0).sample(files, min(limit, len(files)))


def encode(line):
    """A line as ASCII codes, cut or filled up to LENGTH + 1; 0 is what fills up."""
    codes = np.frombuffer(line.encode("ascii", "replace")[: LENGTH + 1], np.uint8)
    return np.pad(codes, (0, LENGTH + 1 - len(codes))).astype(np.int32)


def global_batches(files):
    lines = replicax.data.text_lines(files).filter(lambda line: len(line.strip()) > 1)
    return lines.map(encode).batch(BATCH)


def build():
    """What is saved, what is logged, and the step. Call it in ``strategy.scope()``, which places what is made here."""
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key, *shape):
        return lambda: jax.random.normal(key, shape) / math.sqrt(shape[0])

    embedding = replicax.Variable(normal(keys[0], 128, WIDTH), name="embedding")
    inputs = replicax.Variable(normal(keys[1], WIDTH, 3 * WIDTH), name="gru/inputs")
    states = replicax.Variable(normal(keys[2], WIDTH, 3 * WIDTH), name="gru/states")
    output = replicax.Variable(normal(keys[3], WIDTH, 128), name="output")
    variables = [embedding, inputs, states, output]
    optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE)))
    bits = replicax.Mean("bits per character")

    def model(characters):
        """The logits of each next character: a gated recurrent unit over the line."""
        weights = states.value

        def unit(state, x):
            update, reset, new = jnp.split(x, 3, axis=-1)
            update_, reset_, new_ = jnp.split(state @ weights, 3, axis=-1)
            update, reset = jax.nn.sigmoid(update + update_), jax.nn.sigmoid(reset + reset_)
            state = update * state + (1 - update) * jnp.tanh(new + reset * new_)
            return state, state

        x = embedding[characters] @ inputs
        _, hidden = jax.lax.scan(unit, jnp.zeros((len(x), WIDTH)), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(hidden, 0, 1) @ output

    def train_step(lines):
        characters, following = lines[:, :-1], lines[:, 1:]

        def loss_fn():
            losses = optax.softmax_cross_entropy_with_integer_labels(model(characters), following)
            real = characters != 0  # what fills a line up is not to be learned
            per_line = jnp.sum(losses * real, axis=1) / jnp.maximum(1, jnp.sum(real, axis=1))
            bits.update(per_line / math.log(2))
            return replicax.compute_average_loss(per_line)  # the share of the mean over the GLOBAL batch

        _, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return replicax.Checkpoint(model=variables, optimizer=optimizer), bits, train_step


def train(strategy, files, folder, steps):
    """So many steps, with what an earlier run in the same folder has made of them; passes follow each other."""
    with strategy.scope():
        checkpoint, bits, train_step = build()
    # A last batch that is not full is filled up and masked: workers may have different numbers of lines left.
    dataset = strategy.distribute_dataset(global_batches(files), replicax.InputOptions(partial_batch="pad"))
    if strategy.extended.should_save_summary:  # on one worker
        print(dataset)
    with replicax.CheckpointManager(checkpoint, folder, every_steps=EVERY) as manager:
        return replicax.train(
            train_step, dataset, steps, metrics=[bits], log_every=EVERY, logs=folder, checkpoints=manager
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT, help="which files to read, as a pattern in quotes")
    parser.add_argument("--files", type=int, default=60, help="how many of them to read")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", metavar="FOLDER", default="runs/characters", help="for them and the log")
    args = parser.parse_args()
    files = text_files(args.text, args.files)
    if not files:
        parser.error(f"--text {args.text}: there are no such files")
    # A replica on each device of all workers, if there are others.
    train(replicax.MultiWorkerMirroredStrategy(), files, args.checkpoints, args.steps)


if __name__ == "__main__":
    main()
