"""Ways of decoding: each replica decodes for the prompts that it has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

import replicax
from tests.corpus.corpus import integers, normal, program, whole

VOCABULARY, END = 6, 0
PROMPTS = integers(VOCABULARY - 1, 8) + 1
MODEL = jax.tree.map(
    jnp.asarray, {"embed": normal(VOCABULARY, 4), "mix": normal(4, 4, seed=1), "out": normal(4, VOCABULARY, seed=2)}
)
DRAFT = {"embed": MODEL["embed"], "out": 0.8 * MODEL["out"]}


def model(params, h, token):
    """A recurrence with one state: the new state, and the logits of the next token."""
    h = jnp.tanh(h @ params["mix"] + params["embed"][token])
    return h, h @ params["out"]


# --- beam search ---------------------------------------------------------------------------------------------


def beam_search(params, prompt, beams=3, length=4):
    states, logits = model(params, jnp.zeros(4), prompt)
    scores, tokens = lax.top_k(jax.nn.log_softmax(logits), beams)
    sequences = jnp.zeros((beams, length), jnp.int32).at[:, 0].set(tokens)
    states = jnp.broadcast_to(states, (beams, 4))

    def going(carry):
        i, sequences, *_ = carry
        return (i < length) & ~(sequences == END).any(1).all()

    def extend(carry):
        i, sequences, states, scores, tokens = carry
        states, logits = jax.vmap(model, (None, 0, 0))(params, states, tokens)
        ended = (sequences == END).any(1)
        stay = jnp.where(jnp.arange(VOCABULARY) == END, 0.0, -1e9)
        steps = jnp.where(ended[:, None], stay, jax.nn.log_softmax(logits))
        scores, flat = lax.top_k((scores[:, None] + steps).ravel(), beams)
        parents, tokens = flat // VOCABULARY, flat % VOCABULARY
        return i + 1, sequences[parents].at[:, i].set(tokens), states[parents], scores, tokens

    found = lax.while_loop(going, extend, (1, sequences, states, scores, tokens))
    return found[1], found[3]


def beam_plain():
    return jax.jit(jax.vmap(functools.partial(beam_search, MODEL)))(PROMPTS)


@program(beam_plain, quick=("2",))
def beam_search_of_each_prompt(strategy):
    with strategy.scope():
        params = replicax.as_variables(MODEL)

    def decode(prompts):
        return jax.vmap(functools.partial(beam_search, replicax.as_arrays(params)))(prompts)

    [(prompts,)] = whole(strategy, PROMPTS)
    sequences, scores = strategy.run(decode, args=(prompts,))
    return strategy.gather(sequences, axis=0), strategy.gather(scores, axis=0)


# --- speculative decoding --------------------------------------------------------------------------------------


def speculative(params, draft, prompt, key, ahead=2, length=5):
    """The draft proposes ``ahead`` tokens; the model accepts some of them, and then adds one of its own."""

    def propose(carry, key):
        token, _ = carry
        logits = draft["embed"][token] @ draft["out"]
        token = jax.random.categorical(key, logits)
        return (token, logits), (token, logits)

    def round_(carry):
        filled, sequence, h, token, key = carry
        key, *keys = jax.random.split(key, 2 + ahead + 1)
        _, (proposed, q) = lax.scan(propose, (token, jnp.zeros(VOCABULARY)), jnp.stack(keys[:ahead]))
        tokens = jnp.concatenate([token[None], proposed])
        _, (states, p) = lax.scan(lambda h, t: (model(params, h, t)[0], model(params, h, t)), h, tokens)
        at = jnp.arange(ahead)
        ratio = jax.nn.log_softmax(p[:ahead])[at, proposed] - jax.nn.log_softmax(q)[at, proposed]
        accepted = jnp.cumprod(jnp.log(jax.random.uniform(keys[-2], (ahead,))) < ratio).sum()
        residual = jax.nn.relu(jax.nn.softmax(p) - jnp.pad(jax.nn.softmax(q), ((0, 1), (0, 0))))[accepted]
        last = jax.random.categorical(keys[-1], jnp.log(residual + 1e-9))
        new = jnp.where(jnp.arange(ahead + 1) < accepted, jnp.pad(proposed, (0, 1)), last)
        places = jnp.where(jnp.arange(ahead + 1) <= accepted, filled + jnp.arange(ahead + 1), length)
        return filled + accepted + 1, sequence.at[places].set(new, mode="drop"), states[accepted], last, key

    start = jnp.int32(0), jnp.full(length, -1, jnp.int32), jnp.zeros(4), prompt, key
    filled, sequence, *_ = lax.while_loop(lambda c: c[0] < length, round_, start)
    return sequence, filled


KEYS = jax.random.key_data(jax.random.split(jax.random.key(0), 8))


def speculative_plain():
    return jax.jit(jax.vmap(functools.partial(speculative, MODEL, DRAFT)))(PROMPTS, jax.random.wrap_key_data(KEYS))


@program(speculative_plain)
def speculative_decoding(strategy):
    def decode(params, draft, prompts, keys):
        return jax.vmap(functools.partial(speculative, params, draft))(prompts, jax.random.wrap_key_data(keys))

    [batch] = whole(strategy, PROMPTS, KEYS)
    found = strategy.run(decode, args=(MODEL, DRAFT, *batch))
    return tuple(strategy.gather(value, axis=0) for value in found)


# --- sampling from the nucleus, without a loop of the compiler ----------------------------------------------------


def nucleus(logits, key, share=0.8):
    ordered = jnp.sort(logits)[::-1]
    kept = jnp.cumsum(jax.nn.softmax(ordered)) - jax.nn.softmax(ordered) < share
    return jax.random.categorical(key, jnp.where(logits >= jnp.where(kept, ordered, jnp.inf).min(), logits, -jnp.inf))


def sample(params, prompts, keys):
    def step(carry, i):
        h, token = carry
        h, logits = jax.vmap(model, (None, 0, 0))(params, h, token)
        token = jax.vmap(nucleus)(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i))
        return (h, token), token

    _, tokens = lax.scan(step, (jnp.zeros((len(prompts), 4)), prompts), jnp.arange(4))
    return tokens.T


def nucleus_plain():
    return jax.jit(sample)(MODEL, PROMPTS, jax.random.wrap_key_data(KEYS))


@program(nucleus_plain, quick=("2",))
def nucleus_sampling(strategy):
    [(prompts, keys)] = whole(strategy, PROMPTS, KEYS)
    tokens = strategy.run(lambda prompts, keys: sample(MODEL, prompts, jax.random.wrap_key_data(keys)), (prompts, keys))
    return strategy.gather(tokens, axis=0)
