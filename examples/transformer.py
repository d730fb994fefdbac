"""Train a small transformer on four replicas of two devices each: data parallel and model parallel at once.

    python examples/transformer.py

Each replica works on its slice of the batch. Within a replica the attention heads and the hidden units of the
feed-forward layers are shared out over its devices, and so are the weights, their gradients and Adam's slots. The step
does not say so: it follows from where the variables are. The eight devices are emulated, as a TPU slice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH, LENGTH, VOCABULARY = 32, 16, 32  # the GLOBAL batch: eight sequences for each of four replicas
WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 128, 2
STEPS = 100


def batches(steps, seed=0):
    """Sequences that go up by a step of their own, from a start of their own: after two tokens one can tell."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        start, stride = rng.integers(VOCABULARY, size=(2, BATCH, 1))
        tokens = (start + stride * np.arange(LENGTH + 1)) % VOCABULARY
        yield tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def build(parts, seed=0):
    """The variables and the step. Call it in ``strategy.scope()``.

    ``parts`` is the number of devices of a replica, over which heads and hidden units are split.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 6 * LAYERS))

    def weight(name, shape, split):
        # Given a function, each device initialises its own part; none ever has the whole.
        key, scale = next(keys), shape[0] ** -0.5
        return replicax.Variable(
            lambda: scale * jax.random.normal(key, shape),
            name=name,
            partition_dimensions=[parts if dim == split else 1 for dim in range(len(shape))],
        )

    head = WIDTH // HEADS
    layers = [
        {
            "query": weight("query", (WIDTH, HEADS, head), split=1),
            "key": weight("key", (WIDTH, HEADS, head), split=1),
            "value": weight("value", (WIDTH, HEADS, head), split=1),
            "out": weight("out", (HEADS, head, WIDTH), split=0),
            "up": weight("up", (WIDTH, HIDDEN), split=1),
            "down": weight("down", (HIDDEN, WIDTH), split=0),
        }
        for _ in range(LAYERS)
    ]
    embedding = weight("embedding", (VOCABULARY, WIDTH), split=1)
    positions = weight("positions", (LENGTH, WIDTH), split=1)
    variables = [embedding, positions, *(v for layer in layers for v in layer.values())]
    optimizer = replicax.Optimizer(optax.adam(0.02, eps=1e-4))

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def attention(x, layer):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, layer[name].value) for name in ("query", "key", "value"))
        return jnp.einsum("bthe,hed->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), layer["out"].value)

    def model(tokens):
        x = embedding.value[tokens] + positions.value
        for layer in layers:
            x = x + attention(norm(x), layer)
            x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
        return norm(x) @ embedding.value.T

    def train_step(batch):
        tokens, targets = batch  # this replica's slice

        def loss_fn():
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
            return replicax.compute_average_loss(losses.mean(-1))

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # one all-reduce over the replicas
        return loss

    return variables, train_step


def train(strategy, parts, steps=STEPS):
    """The loss of each step, and the variables."""
    with strategy.scope():
        variables, train_step = build(parts)
    distributed = strategy.distribute_dataset(list(batches(steps)))
    shares = [strategy.run(train_step, args=(batch,)) for batch in distributed]
    losses = strategy.reduce("sum", shares) if strategy.num_replicas_in_sync > 1 else shares
    return [float(loss) for loss in losses], variables


def main():
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")  # 2×2 chips of two cores; leave `emulate` out on a TPU
    # A replica on the two cores of each chip.
    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    strategy = replicax.TPUStrategy(resolver, assignment)
    print(strategy)

    losses, variables = train(strategy, parts=2)
    for step in range(0, STEPS, 20):
        print(f"step {step:3}   loss {np.mean(losses[step : step + 20]):.3f}")
    whole = sum(v.size * v.dtype.itemsize for v in variables)
    part = sum(v.value.addressable_shards[0].data.nbytes for v in variables)
    print(f"parameters: {whole:,} bytes, of which a device has {part:,}")


if __name__ == "__main__":
    main()
