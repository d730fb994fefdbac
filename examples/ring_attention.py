"""Ring attention: train on texts that are too long for one device, split over the devices of a replica.

    python examples/ring_attention.py
    replicax plan examples/ring_attention.py --topology h100:8x8 --strategy mirrored --logical 8

Each device has a piece of every text. Norms, products with weights and the loss need nothing but that piece; only
attention looks at the others. There the keys and values go around the devices of the replica in a ring. Each device
adds to its queries' result what a piece brings, and passes the piece on (Liu et al., "Ring Attention with Blockwise
Transformers"). No device ever has a whole text, so a replica of twice as many devices takes texts of twice the length.

Each text is a random phrase, four times. The phrase is as long as the piece of a device, so only what other devices
have tells the next letter. The eight devices are emulated; a TPU slice or GPUs take the same step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import replicax

BATCH, LENGTH, LETTERS = 16, 256, 16  # the GLOBAL batch: eight texts for each of two replicas
WIDTH, HEADS, LAYERS = 64, 4, 1
STEPS = 200


def batches(steps, seed=0):
    """Texts that say a phrase four times, and what follows each letter."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        phrase = rng.integers(LETTERS, size=(BATCH, LENGTH // 4), dtype=np.int32)
        text = np.tile(phrase, 5)[:, : LENGTH + 1]
        yield text[:, :-1], text[:, 1:]


# --- attention: what each logical device computes, of pieces [texts, length / devices, heads, head] ---------------


def passed_on(axes, arrays):
    """What the device before this one had; the last one's goes to the first."""
    count = lax.axis_size(axes)
    return lax.ppermute(arrays, axes, [(device, (device + 1) % count) for device in range(count)])


def around(axes, start, travelling, visit):
    """``visit(state, travelling)`` for each piece that comes by, once it has been on every other device.

    Of what comes from places behind its own a device sees nothing, and does not compute with it. The state is what
    the own piece has left.
    """
    if not axes:  # the replica is one device
        return start, travelling
    place = lax.axis_index(axes)

    def turn(carry, distance):
        state, travelling = carry
        travelling = passed_on(axes, travelling)
        return lax.cond(distance <= place, visit, lambda *same: same, state, travelling), None

    (state, travelling), _ = lax.scan(turn, (start, travelling), jnp.arange(1, lax.axis_size(axes)))
    return state, travelling


def scores_of(query, key, is_own):
    """``[texts, heads, queries, keys]``. In its own piece a query sees keys up to its place, in earlier ones all."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * key.shape[-1] ** -0.5
    return jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf) if is_own else scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(axes, query, key, value):
    return forward(axes, query, key, value)[0]


def forward(axes, query, key, value):
    """The softmax of a row is added up as its pieces come: the largest score so far, and sums relative to it."""

    def add(state, scores, value):
        largest, total, taken = state
        now = jnp.maximum(largest, scores.max(-1))
        weights, shrunk = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        found = jnp.einsum("bhqk,bkhd->bhqd", weights, value, preferred_element_type=jnp.float32)
        return now, shrunk * total + weights.sum(-1), shrunk[..., None] * taken + found

    def visit(state, piece):
        key, value = piece
        return add(state, scores_of(query, key, is_own=False), value), piece

    scores = scores_of(query, key, is_own=True)
    nothing = jnp.full_like(scores[..., 0], -jnp.inf), jnp.zeros_like(scores[..., 0]), 0.0
    (largest, total, taken), _ = around(axes, add(nothing, scores, value), (key, value), visit)
    result = (taken / total[..., None]).swapaxes(1, 2).astype(query.dtype)
    return result, (query, key, value, result, largest + jnp.log(total))


def backward(axes, kept, given):
    """Weights are computed again. Gradients of keys and values go around with them, and one step further: home."""
    query, key, value, result, log_total = kept
    scale = key.shape[-1] ** -0.5
    of_total = jnp.einsum("bqhd,bqhd->bhq", given, result, preferred_element_type=jnp.float32)

    def gradients(key, value, is_own):
        weights = jnp.exp(scores_of(query, key, is_own) - log_total[..., None])
        of_weights = jnp.einsum("bqhd,bkhd->bhqk", given, value, preferred_element_type=jnp.float32)
        of_scores = weights * (of_weights - of_total[..., None]) * scale
        to_query = jnp.einsum("bhqk,bkhd->bqhd", of_scores, key)
        to_key = jnp.einsum("bhqk,bqhd->bkhd", of_scores, query)
        return to_query, (to_key, jnp.einsum("bhqk,bqhd->bkhd", weights, given))

    def visit(to_query, travelling):
        key, value, *so_far = travelling
        more, to_piece = gradients(key, value, is_own=False)
        return to_query + more, (key, value, *jax.tree.map(jnp.add, so_far, list(to_piece)))

    to_query, to_piece = gradients(key, value, is_own=True)
    to_query, (_, _, *to_piece) = around(axes, to_query, (key, value, *to_piece), visit)
    to_key, to_value = passed_on(axes, to_piece) if axes else to_piece
    return to_query.astype(query.dtype), to_key.astype(key.dtype), to_value.astype(value.dtype)


ring.defvjp(forward, backward)


def ring_attention(axes, query, key, value):
    """Causal attention of one replica's ``[texts, length, heads, head]``, split along the length over ``axes``."""
    pieces = PartitionSpec(None, axes)
    return on_devices(axes, functools.partial(ring, axes), (pieces, pieces, pieces), pieces)(query, key, value)


def embedded(axes, table, letters):
    """The rows of ``letters``. Each device has all of the table, and adds up the gradient of its own letters."""
    pieces = PartitionSpec(None, axes)
    return on_devices(axes, lambda table, letters: table[letters], (PartitionSpec(), pieces), pieces)(table, letters)


def on_devices(axes, fn, in_specs, out_specs):
    """``fn``, which each logical device of a replica applies to its pieces."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes)) if axes else fn


# --- the model and its training: as on one device, but for where the texts are split ------------------------------


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def rotary(x):
    """Turn pairs of numbers by angles that grow with the place: scores then depend on how far two places are apart."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def build(
    strategy, width=WIDTH, heads=HEADS, layers=LAYERS, letters=LETTERS, dtype=jnp.float32, attention=None, seed=0
):
    """The variables and the step. Call it in ``strategy.scope()``."""
    axes = strategy.extended.mesh.axis_names[1:]  # those of a replica's devices; the first is that of the replicas
    parts = strategy.extended.num_logical_devices
    attention = attention or functools.partial(ring_attention, axes)
    keys = iter(jax.random.split(jax.random.key(0), 2 + 6 * layers))

    def weight(name, shape):
        key = next(keys)
        return replicax.Variable(lambda: shape[0] ** -0.5 * jax.random.normal(key, shape), name=name)

    shapes = dict.fromkeys(("query", "key", "value"), (width, heads, width // heads))
    shapes |= {"out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [{name: weight(name, shape) for name, shape in shapes.items()} for _ in range(layers)]
    variables = {"embedding": weight("embedding", (letters, width)), "head": weight("head", (width, letters))}
    variables["blocks"] = blocks
    optimizer = replicax.Optimizer(optax.adam(0.01))

    @jax.checkpoint
    def mlp(x, up, down):
        return jax.nn.gelu(norm(x) @ up) @ down

    def model(weights, letters):
        x = embedded(axes, weights["embedding"], letters)
        for block in weights["blocks"]:
            y = norm(x)
            query, key, value = (jnp.einsum("btd,dhe->bthe", y, block[name]) for name in ("query", "key", "value"))
            x = x + attention(rotary(query), rotary(key), value).reshape(x.shape) @ block["out"]
            x = x + mlp(x, block["up"], block["down"])
        return (norm(x) @ weights["head"]).astype(jnp.float32)

    def train_step(batch):
        # Of each text a device has a piece; all that follows is computed in pieces, and so are the gradients.
        letters, targets = strategy.split_to_logical_devices(batch, [1, parts])

        def loss_fn():
            weights = jax.tree.map(lambda w: w.astype(dtype), variables)
            losses = optax.softmax_cross_entropy_with_integer_labels(model(weights, letters), targets)
            return replicax.compute_average_loss(losses.mean(-1))

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(gradients, variables)
        return loss

    return variables, train_step


def train(strategy, steps=STEPS, **options):
    """The loss of each step, the variables and the compiled step."""
    with strategy.scope():
        variables, train_step = build(strategy, **options)
    parts = [1, strategy.extended.num_logical_devices]
    shares = []
    for batch in strategy.distribute_dataset(list(batches(steps))):
        batch = strategy.split_to_logical_devices(batch, parts)  # so that no text is whole on any device
        shares.append(strategy.run(train_step, args=(batch,)))
    losses = strategy.reduce("sum", shares) if strategy.num_replicas_in_sync > 1 else shares
    return [float(loss) for loss in losses], variables, strategy.extended.trace(train_step, args=(batch,))


def plan(strategy, batch=1, length=32_768, width=2048, heads=16, layers=8, letters=32_768):
    """The step of a larger model, in bfloat16, and what one REPLICA of it takes: so many texts of so many letters."""
    with strategy.scope():
        _, train_step = build(strategy, width, heads, layers, letters, jnp.bfloat16)
    text = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return train_step, (text, text)


def main():
    replicax.use_cpu_devices(8)
    strategy = replicax.MirroredStrategy(num_logical_devices=4)
    print(strategy)
    losses, _, program = train(strategy)
    for step in range(0, STEPS, 25):
        print(f"step {step:3}   loss {np.mean(losses[step : step + 25]):.3f}")
    print(f"a loss of {np.log(LETTERS) / 4:.3f} is the least: the first time nothing tells a letter of the phrase")
    passes = [c.bytes for c in program.collectives() if c.kind == "collective-permute"]
    print(f"{len(passes)} passes in a turn of the ring, of {max(passes):,} bytes")


if __name__ == "__main__":
    main()
