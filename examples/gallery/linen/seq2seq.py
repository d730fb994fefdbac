"""Flax Linen: two LSTMs that read a sum, "12+7", and say what it is.

After Flax's example "seq2seq". It shows scans over time with a carry that starts as a constant, lengths that differ,
and a loss that counts the letters of each answer only. Two lines are Replicax's, marked so.

    python examples/gallery/linen/seq2seq.py

prints the loss every 100 steps, and some answers. It falls to about 1; Flax's example goes on for hours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import replicax

LETTERS = "0123456789+= "  # "=" ends a question and an answer, " " fills up
CODE = {letter: i for i, letter in enumerate(LETTERS)}
IN, OUT, SIZE, BATCH = 6, 4, 64, 64


def coded(texts, length):
    return np.array([[CODE[letter] for letter in text.ljust(length)] for text in texts], np.int32)


def sums(count, seed):
    """Questions ``[count, IN]`` and answers ``[count, OUT]``."""
    pairs = np.random.default_rng(seed).integers(0, 100, (count, 2))
    return coded([f"{a}+{b}=" for a, b in pairs], IN), coded([f"{a + b}=" for a, b in pairs], OUT)


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, question, answer):
        """The logits of each letter of the answer, given those before it."""
        x = jax.nn.one_hot(question, len(LETTERS))
        lengths = (question != CODE[" "]).sum(-1)
        carry, _ = nn.RNN(nn.LSTMCell(SIZE), return_carry=True, name="encoder")(x, seq_lengths=lengths)
        before = jnp.pad(answer[:, :-1], ((0, 0), (1, 0)), constant_values=CODE["="])
        y = nn.RNN(nn.LSTMCell(SIZE), name="decoder")(jax.nn.one_hot(before, len(LETTERS)), initial_carry=carry)
        return nn.Dense(len(LETTERS))(y)


def train_step(state, question, answer):
    def loss_fn(params):
        logits = state.apply_fn(params, question, answer)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, answer)
        counted = answer != CODE[" "]
        return ((losses * counted).sum(-1) / counted.sum(-1)).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))  # Replicax
    return state.apply_gradients(grads=grads), loss


def answers(model, params, question):
    """What the model says, letter by letter."""
    said = jnp.full((len(question), OUT), CODE[" "])
    apply = jax.jit(model.apply)
    for i in range(OUT):
        said = said.at[:, i].set(apply(params, question, said)[:, i].argmax(-1))
    return ["".join(LETTERS[code] for code in row).split("=")[0] for row in said]


def main(strategy, steps=400):
    """Train, and return the loss of each step, the model and its parameters."""
    model = Seq2Seq()
    params = model.init(jax.random.key(0), *sums(1, 0))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))
    losses = []
    for question, answer in strategy.distribute_dataset([sums(BATCH, seed) for seed in range(steps)]):
        state, loss = strategy.run(train_step, args=(state, question, answer))  # Replicax
        losses.append(float(loss))
    return losses, model, state.params


if __name__ == "__main__":
    replicax.use_cpu_devices(4)
    losses, model, params = main(replicax.MirroredStrategy())
    for step in range(0, len(losses), 100):
        print(f"steps {step:4d} to {step + 99:4d}: loss {np.mean(losses[step : step + 100]):.3f}")
    questions = ["12+7=", "30+41=", "55+55="]
    for text, said in zip(questions, answers(model, params, coded(questions, IN)), strict=True):
        print(text, said)
