"""Sequence models: recurrences, masks and packing, losses over alignments, and ways of decoding."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole

VOCABULARY = 7
TOKENS = integers(VOCABULARY, 8, 6)


# --- a language model of characters: an LSTM of NNX ------------------------------------------------------------


class CharacterModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 6, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 8, rngs=rngs))
        self.head = nnx.Linear(8, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


def lstm_of():
    model = CharacterModel(nnx.Rngs(0))
    return (
        model,
        nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
        nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")),
    )


def lstm_step(average, model, optimizer, metrics, tokens):
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return average(losses.mean(-1)), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=tokens[:, 1:])
    optimizer.update(model, grads)


def lstm_plain():
    objects = lstm_of()
    step = nnx.jit(functools.partial(lstm_step, jnp.mean))
    for _ in range(3):
        step(*objects, TOKENS)
    return jax.tree.leaves(nnx.state(objects[0], nnx.Param)), objects[2].compute()


@program(lstm_plain)
def lstm_of_characters(strategy):
    with strategy.scope():
        objects = lstm_of()
    step = functools.partial(lstm_step, replicax.compute_average_loss)
    [(tokens,)] = whole(strategy, TOKENS)
    for _ in range(3):
        strategy.run(step, args=(*objects, tokens))
    return jax.tree.leaves(nnx.state(objects[0], nnx.Param)), objects[2].compute()


# --- a masked language model of Linen, with the mean over all masked places ------------------------------------


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        h = nn.Embed(VOCABULARY + 1, 8)(tokens) + self.param("positions", nn.initializers.normal(0.1), (6, 8))
        h = h + nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm()(h), mask=mask)
        h = h + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(h))))
        return nn.Dense(VOCABULARY)(h)


LENGTHS = np.array([6, 4, 5, 6, 3, 6, 6, 4], np.int32)
MASKED = (normal(8, 6, seed=3) > 0.5) & (np.arange(6) < LENGTHS[:, None])


def masked_loss_sums(params, tokens, lengths, masked):
    attend = nn.make_attention_mask(jnp.arange(6) < lengths[:, None], jnp.arange(6) < lengths[:, None])
    logits = Encoder().apply(params, jnp.where(masked, VOCABULARY, tokens), attend)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return (losses * masked).sum(), masked.sum()


def masked_state():
    params = jax.jit(Encoder().init)(jax.random.key(0), TOKENS[:1], None)
    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))


def masked_plain():
    state = masked_state()

    @jax.jit
    def step(state):
        def loss_fn(params):
            total, count = masked_loss_sums(params, TOKENS, LENGTHS, MASKED)
            return total / count

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    for _ in range(2):
        state, loss = step(state)
    return state.params, loss


@program(masked_plain)
def masked_language_model(strategy):
    state = masked_state()

    def step(state, *batch):
        ctx = replicax.get_replica_context()

        def loss_fn(params):
            total, count = masked_loss_sums(params, *batch)
            return total / ctx.all_reduce("sum", count)

        loss, grads = ctx.all_reduce("sum", jax.value_and_grad(loss_fn)(state.params))
        return state.apply_gradients(grads=grads), loss

    [batch] = whole(strategy, TOKENS, LENGTHS, MASKED)
    for _ in range(2):
        state, loss = strategy.run(step, args=(state, *batch))
    return state.params, loss


# --- packed sequences: segments that do not see each other, and weights of tokens -------------------------------

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0], [1, 2, 2, 3, 3, 3]] * 2, np.int32)


def packed_init():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (VOCABULARY, 8), "qkv": (8, 24), "out": (8, VOCABULARY)}
    return {name: 0.3 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def packed_losses(params, tokens, segments):
    h = params["embed"][tokens]
    q, k, v = jnp.split(h @ params["qkv"], 3, axis=-1)
    same = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((6, 6), bool))
    weights = jax.nn.softmax(jnp.where(same, jnp.einsum("bqd,bkd->bqk", q, k), -1e9), axis=-1)
    logits = (h + jnp.einsum("bqk,bkd->bqd", weights, v)) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    counts = (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)
    return (losses * counts).sum(-1), counts.sum(-1)


def packed_plain():
    params = packed_init()

    @jax.jit
    def step(params):
        def loss_fn(params):
            sums, counts = packed_losses(params, TOKENS, SEGMENTS)
            return sums.sum() / counts.sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    for _ in range(3):
        params, loss = step(params)
    return params, loss


@program(packed_plain)
def packed_sequences(strategy):
    with strategy.scope():
        params = replicax.as_variables(packed_init())
        optimizer = replicax.Optimizer(optax.sgd(0.5))

    def step(tokens, segments):
        def loss_fn(params):
            sums, counts = packed_losses(params, tokens, segments)
            everyones = replicax.get_replica_context().all_reduce("sum", counts.sum())
            return sums.sum() / everyones

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        return loss

    [(tokens, segments)] = whole(strategy, TOKENS, SEGMENTS)
    for _ in range(3):
        loss = strategy.run(step, args=(tokens, segments))
    return replicax.as_arrays(params), strategy.reduce("sum", loss)


# --- batches of sequences of differing length, and of differing size ----------------------------------------------


def ragged_batches():
    """Buckets: the batches differ in the number of sequences and in their length."""
    return [
        (normal(8, 4, 3), LENGTHS.clip(1, 4)),
        (normal(6, 6, 3, seed=1), LENGTHS[:6]),
        (normal(3, 5, 3), LENGTHS[:3] - 1),
    ]


def gru_losses(params, x, lengths):
    def cell(h, row):
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([h, row[0]], -1) @ params["gates"]), 2, axis=-1)
        new = jnp.tanh(jnp.concatenate([r * h, row[0]], -1) @ params["new"])
        h = jnp.where(row[1][:, None], (1 - z) * h + z * new, h)
        return h, None

    alive = jnp.arange(x.shape[1])[:, None] < lengths
    h, _ = lax.scan(cell, jnp.zeros((len(x), 4)), (jnp.swapaxes(x, 0, 1), alive))
    return jnp.square(h.sum(-1) - x[:, 0, 0])


GRU = {"gates": normal(7, 8, seed=5), "new": normal(7, 4, seed=6)}


def ragged_plain():
    params, adam = GRU, optax.adam(0.05)
    state = adam.init(params)

    @jax.jit
    def step(params, state, x, lengths):
        loss, grads = jax.value_and_grad(lambda p: gru_losses(p, x, lengths).mean())(params)
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in ragged_batches():
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
    return params, losses


@program(ragged_plain)
def batches_of_variable_length(strategy):
    with strategy.scope():
        params = replicax.as_variables(GRU)
        optimizer = replicax.Optimizer(optax.adam(0.05))

    def step(x, lengths):
        def loss_fn(params):
            return replicax.compute_average_loss(gru_losses(params, x, lengths))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(grads, params)
        return loss

    losses = [
        strategy.reduce("sum", strategy.run(step, args=batch))
        for batch in strategy.distribute_dataset(ragged_batches())
    ]
    return replicax.as_arrays(params), losses


# --- connectionist temporal classification -----------------------------------------------------------------------

FRAMES, TRANSCRIPTS = normal(8, 6, 4), integers(3, 8, 3) + 1


def ctc_losses(w, frames, transcripts):
    logits = frames @ w
    paddings = (transcripts == 0).astype(jnp.float32)
    return optax.ctc_loss(logits, jnp.zeros(frames.shape[:2]), transcripts, paddings)


def ctc_plain():
    @jax.jit
    def step(w):
        loss, gradient = jax.value_and_grad(lambda w: ctc_losses(w, FRAMES, TRANSCRIPTS).mean())(w)
        return w - 0.1 * gradient, loss

    w = jnp.eye(4)
    for _ in range(2):
        w, loss = step(w)
    return w, loss


@program(ctc_plain, quick=("2",))
def connectionist_temporal_classification(strategy):
    def step(w, frames, transcripts):
        loss, gradient = jax.value_and_grad(lambda w: ctc_losses(w, frames, transcripts).mean())(w)
        loss, gradient = replicax.get_replica_context().all_reduce("mean", (loss, gradient))
        return w - 0.1 * gradient, loss

    [batch] = whole(strategy, FRAMES, TRANSCRIPTS)
    w = jnp.eye(4)
    for _ in range(2):
        w, loss = strategy.run(step, args=(w, *batch))
    return w, loss
