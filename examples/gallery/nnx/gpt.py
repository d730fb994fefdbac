"""Flax NNX: a small GPT that learns to spell.

After nanoGPT, and "miniGPT" of the JAX AI stack's tutorials. It shows causal attention, embeddings that are the last
layer, too, a schedule and clipping of the gradient of the whole batch. Two lines are Replicax's, marked so.

    python examples/gallery/nnx/gpt.py

prints the loss every 25 steps, and a line that the model has written at the end.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax

TEXT = (
    "the step is written for one replica. the strategy says how many there are, and where they run. "
    "each replica has a share of the batch. the shares of a loss add up to the whole, and so do their gradients. "
) * 4
LETTERS = sorted(set(TEXT))
CODES = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
CONTEXT, SIZE, LAYERS, BATCH = 32, 64, 2, 32


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(SIZE, rngs=rngs), nnx.LayerNorm(SIZE, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, SIZE, decode=False, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(SIZE, 4 * SIZE, rngs=rngs), nnx.Linear(4 * SIZE, SIZE, rngs=rngs)

    def __call__(self, h):
        mask = nnx.make_causal_mask(jnp.ones(h.shape[:2]))
        h = h + self.attention(self.norm1(h), mask=mask)
        return h + self.down(nnx.gelu(self.up(self.norm2(h))))


class GPT(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.initializers.normal(0.02)
        self.letters = nnx.Embed(len(LETTERS), SIZE, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, SIZE, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(SIZE, rngs=rngs)

    def __call__(self, codes):
        h = self.letters(codes) + self.positions(jnp.arange(codes.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.letters.attend(self.norm(h))


def train_step(model, optimizer, codes):
    def loss_fn(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(codes[:, :-1]), codes[:, 1:])
        return replicax.compute_average_loss(losses.mean(-1))  # Replicax

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def batches(steps):
    """Pieces of the text, ``[BATCH, CONTEXT + 1]``, from random places."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(CODES) - CONTEXT - 1, (BATCH, 1))
        yield CODES[starts + np.arange(CONTEXT + 1)]


@functools.partial(jax.jit, static_argnums=0)
def next_letter(graphdef, state, codes, count):
    """The most likely letter after the first ``count`` of ``codes``, which are filled up to the context."""
    return nnx.merge(graphdef, state)(codes[None])[0, count - 1].argmax()


def written(model, start="the ", length=28):
    """``start``, and what the model goes on with."""
    codes = [LETTERS.index(letter) for letter in start]
    graphdef, state = nnx.split(model)
    for _ in range(length):
        filled = jnp.array(codes + [0] * (CONTEXT - len(codes)))
        codes.append(int(next_letter(graphdef, state, filled, len(codes))))
    return "".join(LETTERS[code] for code in codes)


def main(strategy, steps=150):
    """Train, and return the loss of each step and the model."""
    model = GPT(rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, max(steps, 11))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []
    for codes in strategy.distribute_dataset(list(batches(steps))):
        loss = strategy.reduce("sum", strategy.run(train_step, args=(model, optimizer, codes)))  # Replicax
        losses.append(float(loss))
    return losses, model


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, model = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 25):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"at the end: loss {losses[-1]:.4f}: {written(model)!r}")
