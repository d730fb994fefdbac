"""A language model to plan with: a language model's training step, and what one replica of it takes.

    replicax plan examples/language_model.py:plan --topology v5p:8x8x8

Nothing here knows of TPUs. The strategy says where the step is to run, whether or not that is there, and `plan`
returns the step and the shapes of what one replica gets of each batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import replicax

LAYERS, WIDTH, HEADS, WORDS = 24, 2048, 16, 32_000  # 1.3 billion parameters
LENGTH, BATCH = 2048, 4  # of one REPLICA: 4 texts of 2,048 words and the one after


def build():
    """The variables and the step. Call it in ``strategy.scope()``."""
    normal = jax.nn.initializers.normal(0.02)
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }

    def variable(name, shape, key):
        # Given a function, a variable is initialised right where it will live; in a plan, the function never runs.
        return replicax.Variable(lambda: normal(jax.random.key(key), shape, jnp.float32), name=name)

    embedding = variable("embedding", (WORDS, WIDTH), key=0)
    layers = [
        {name: variable(f"layer{i}/{name}", shape, key=4 * i + k + 1) for k, (name, shape) in enumerate(shapes.items())}
        for i in range(LAYERS)
    ]
    variables = [embedding, *(v for layer in layers for v in layer.values())]
    optimizer = replicax.Optimizer(optax.adamw(1e-4))

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def block(layer, x):
        weights = {name: v.value.astype(jnp.bfloat16) for name, v in layer.items()}
        q, k, v = jnp.split((norm(x) @ weights["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]

    def train_step(words):
        def loss():
            x = embedding.value.astype(jnp.bfloat16)[words[:, :-1]]
            for layer in layers:
                # What a layer computes is computed again in the backward pass, and not kept.
                x = jax.checkpoint(lambda x, layer=layer: block(layer, x))(x)
            logits = (norm(x) @ embedding.value.astype(jnp.bfloat16).T).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
            return replicax.compute_average_loss(losses.mean(axis=-1))

        share, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return share

    return variables, train_step


def plan(strategy):
    """The step, and one replica's shapes of what it takes."""
    with strategy.scope():
        _, train_step = build()
    return train_step, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
