"""Equinox: a small BERT that fills in masked words.

After Equinox's example "BERT language model", with pretraining in its place: sentences of a toy grammar, of which some
words are masked. It shows attention with padding masks inside ``jax.vmap``, and a loss that counts the masked words of
each sentence only. Two lines are Replicax's, marked so.

    python examples/gallery/equinox/bert.py

prints the loss every 20 steps. A word of the grammar follows from its neighbours, so the loss falls below 0.01.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

WORDS, MASK, PAD, LENGTH, SIZE, BATCH = 12, 12, 13, 10, 32, 64
adam = optax.adam(5e-3)


def sentences(count, seed):
    """Sentences in which each word is the one before plus a step, which is the sentence's own; some words masked.

    Returns:
      What the model sees, what it should say and which words count, each ``[count, LENGTH]``.
    """
    rng = np.random.default_rng(seed)
    start, step = rng.integers(0, WORDS, (count, 1)), rng.integers(1, 4, (count, 1))
    words = (start + step * np.arange(LENGTH)) % WORDS
    is_word = np.arange(LENGTH) < rng.integers(6, LENGTH + 1, (count, 1))
    masked = is_word & (np.arange(LENGTH) % 4 == rng.integers(0, 4, (count, 1)))
    seen = np.where(masked, MASK, np.where(is_word, words, PAD))
    return seen.astype(np.int32), words.astype(np.int32), masked.astype(np.float32)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, SIZE, key=a)
        self.mlp = eqx.nn.MLP(SIZE, SIZE, 2 * SIZE, 1, activation=jax.nn.gelu, key=b)
        self.norms = [eqx.nn.LayerNorm(SIZE), eqx.nn.LayerNorm(SIZE)]

    def __call__(self, h, mask):
        h = jax.vmap(self.norms[0])(h + self.attention(h, h, h, mask=mask))
        return jax.vmap(self.norms[1])(h + jax.vmap(self.mlp)(h))


class Bert(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list

    def __init__(self, key):
        a, b, *keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(weight=0.1 * jax.random.normal(a, (PAD + 1, SIZE)))
        self.positions = 0.1 * jax.random.normal(b, (LENGTH, SIZE))
        self.blocks = [Block(k) for k in keys]

    def __call__(self, words):  # of one sentence, [LENGTH]
        h = jax.vmap(self.embedding)(words) + self.positions
        mask = jnp.broadcast_to(words != PAD, (LENGTH, LENGTH))
        for block in self.blocks:
            h = block(h, mask)
        return h @ self.embedding.weight[:WORDS].T


def loss_fn(model, seen, words, masked):
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(seen), words)
    return ((losses * masked).sum(-1) / masked.sum(-1)).mean()


def train_step(model, opt_state, batch):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    updates, opt_state = adam.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def main(strategy, steps=300):
    """Train, and return the loss of each step."""
    model = Bert(jax.random.key(0))
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for batch in strategy.distribute_dataset([sentences(BATCH, seed) for seed in range(steps)]):
        model, opt_state, loss = strategy.run(train_step, args=(model, opt_state, batch))  # Replicax
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 20):
        print(f"step {step:4d}: loss {losses[step]:.4f}")
    print(f"at the end: loss {np.mean(losses[-10:]):.4f}")
