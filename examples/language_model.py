"""A language model of 1.3 billion parameters, to plan with: will it fit, and how fast could it be?

    replicax plan examples/language_model.py --topology v5p:8x8x8

Nothing here knows of TPUs. The strategy says where the step is to run, whether or not that is there, and `plan`
returns the step and the shapes of what one replica gets of each batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import replicax

LAYERS, WIDTH, HEADS, WORDS = 24, 2048, 16, 32_000
LENGTH, BATCH = 2048, 4  # of one REPLICA: 4 texts of 2,048 words, and the word after


def build():
    """The variables and the step. Call it in ``strategy.scope()``."""
    normal = jax.nn.initializers.normal(0.02)
    shapes = {
        "embedding": (WORDS, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),  # those of all layers in one, as the step goes through them in a scan
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    # Given a function, a variable is initialised right where it will live. In a plan it has a shape and no value.
    variables = [
        replicax.Variable(lambda key=key, shape=shape: normal(jax.random.key(key), shape), name=name)
        for key, (name, shape) in enumerate(shapes.items())
    ]
    optimizer = replicax.Optimizer(optax.adamw(1e-4))

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    @jax.checkpoint  # what a layer computes is computed again in the backward pass, and not kept
    def block(x, layer):
        qkv, out, up, down = layer
        q, k, v = jnp.split((norm(x) @ qkv).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ out
        return x + jax.nn.gelu(norm(x) @ up) @ down, None

    def train_step(words):  # one replica's
        def loss():
            embedding, *layers = (v.value.astype(jnp.bfloat16) for v in variables)
            x, _ = jax.lax.scan(block, embedding[words[:, :-1]], layers)
            logits = (norm(x) @ embedding.T).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
            return replicax.compute_average_loss(losses.mean(axis=-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return share

    return train_step


def plan(strategy):
    """The step, and one replica's shapes of what it takes."""
    with strategy.scope():
        train_step = build()
    return train_step, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
