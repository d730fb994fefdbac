"""A mixture of experts: train a transformer whose experts are spread over the devices of a replica.

    python examples/experts.py
    replicax plan examples/experts.py --topology h100:8x8 --strategy mirrored --logical 8
    replicax plan examples/experts.py --topology v5p:4x4x4 --strategy mirrored --logical 2x2x2x1

In place of one MLP a layer has many, the experts, and a router that sends each token to the two it scores highest
(Lepikhin et al., "GShard"; Fedus et al., "Switch Transformers"). Each device of a replica has some of the texts and
some of the experts. One all-to-all brings the tokens to their experts, and another one brings the results back. Twice
as many devices have room for twice as many experts.

An expert has room for a fixed number of tokens of each text, its capacity. What it has no room for it drops: the token
goes on as it was. Texts don't compete with each other, so what is dropped does not depend on the number of devices, and
the losses are those of one device that has all experts. A second loss keeps the router from sending all to a few.

The step returns, beside the loss, how many tokens chose each expert, how many it dropped, and where NaN is; ``report``
says it in words. In the texts each of several languages has its own rule for the next letter; a sign at the beginning
says which language it is. The eight devices are emulated; a TPU slice or GPUs take the same step.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import replicax

BATCH, LENGTH, LANGUAGES, LETTERS = 32, 32, 8, 16  # the GLOBAL batch: sixteen texts for each of two replicas
WIDTH, HEADS, LAYERS = 32, 4, 2
EXPERTS, HIDDEN, TOP_K = 8, 64, 2
CAPACITY_FACTOR = 1.25  # 1: room for exactly all tokens, if the router spreads them evenly
BALANCE = 0.01  # how much the balance counts in the loss
STEPS, WINDOW = 200, 25


def batches(steps, seed=0):
    """Texts, each a language's sign and letters by its rule; and what follows each of them."""
    rng = np.random.default_rng(seed)
    rules = np.stack([rng.permutation(LETTERS) for _ in range(LANGUAGES)])
    for _ in range(steps):
        language, letter = rng.integers(LANGUAGES, size=BATCH), rng.integers(LETTERS, size=BATCH)
        text = [LETTERS + language, letter]
        while len(text) <= LENGTH:
            text.append(rules[language, text[-1]])
        text = np.stack(text, axis=1).astype(np.int32)
        yield text[:, :-1], text[:, 1:]


# --- the layer of experts: what each logical device computes, of its texts and with its experts -------------------


def capacity(length, experts, top_k, factor):
    """How many tokens of a text an expert has room for."""
    return min(length, math.ceil(factor * top_k * length / experts))


def route(x, router, top_k, room):
    """For tokens ``[texts, length, width]``: the choices, their weights, the slots that take them, and the balance.

    The first three are ``[texts, length, top_k]``. An expert has ``room`` slots for a text, and slots are numbered
    through all experts; a choice that is dropped has the number behind the last. The balance of a text is 1 if all
    experts are chosen equally often, and the number of experts if one is always chosen.
    """
    texts, length, _ = x.shape
    experts = router.shape[-1]
    probabilities = jax.nn.softmax(jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32))
    weights, chosen = lax.top_k(probabilities, top_k)
    if top_k > 1:  # otherwise the weight is what the router learns by
        weights = weights / weights.sum(-1, keepdims=True)
    # Earlier tokens come first, so no token depends on later ones.
    is_chosen = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).reshape(texts, length * top_k, experts)
    places = ((jnp.cumsum(is_chosen, axis=1) - 1) * is_chosen).sum(-1).reshape(chosen.shape)
    slots = jnp.where(places < room, chosen * room + places, experts * room)
    share = is_chosen.mean(1, dtype=jnp.float32)
    return chosen, weights, slots, experts * (share * probabilities.mean(1)).sum(-1)


def count(chosen, mask, experts):
    """Of each text: how many of the choices under ``mask`` are each expert's."""
    return (jax.nn.one_hot(chosen, experts, dtype=jnp.int32) * mask[..., None]).sum((1, 2))


@jax.checkpoint
def mlps(x, up, down):
    """Each expert's MLP, of its tokens ``[texts, experts, room, width]``."""
    return jnp.einsum("bech,ehd->becd", jax.nn.gelu(jnp.einsum("becd,edh->bech", x, up)), down)


def experts_of_device(axes, top_k, factor, x, router, up, down):
    texts, length, width = x.shape
    experts = router.shape[-1]
    room = capacity(length, experts, top_k, factor)
    chosen, weights, slots, balance = route(x.astype(jnp.float32), router, top_k, room)

    # The token in each slot; an empty one has the number behind the last, and gets zeros.
    rows = jnp.arange(texts)[:, None, None]
    tokens = jnp.broadcast_to(jnp.arange(length)[None, :, None], slots.shape)
    token_of = jnp.full((texts, experts * room), length).at[rows, slots].set(tokens, mode="drop")
    sent = jnp.take_along_axis(x, token_of[..., None], axis=1, mode="fill", fill_value=0)
    sent = sent.reshape(texts, experts, room, width)

    if axes:  # of its own texts all experts' tokens -> of its own experts all texts' tokens
        sent = lax.all_to_all(sent, axes, split_axis=1, concat_axis=0, tiled=True)
    got = mlps(sent, up, down)
    if axes:
        got = lax.all_to_all(got, axes, split_axis=0, concat_axis=1, tiled=True)

    flat_slots = slots.reshape(texts, length * top_k, 1)
    results = jnp.take_along_axis(got.reshape(texts, -1, width), flat_slots, axis=1, mode="fill", fill_value=0)
    results = results.reshape(texts, length, top_k, width)
    is_taken = slots < experts * room
    has_nan = ~jnp.isfinite(x).all(-1, keepdims=True)
    counts = {
        "chosen": count(chosen, jnp.ones_like(is_taken), experts),
        "dropped": count(chosen, ~is_taken, experts),
        "nan in": count(chosen, is_taken & has_nan, experts),
        "nan out": count(chosen, is_taken & ~has_nan & ~jnp.isfinite(results).all(-1), experts),
    }
    return jnp.einsum("btk,btkd->btd", weights.astype(x.dtype), results), balance, counts


def expert_layer(axes, x, router, up, down, top_k=TOP_K, factor=CAPACITY_FACTOR):
    """The result for ``[texts, length, width]`` of one replica, each text's balance, and counts ``[texts, experts]``.

    Texts and experts are split over ``axes``, those of the replica's devices.
    """
    pieces = PartitionSpec(axes)
    fn = functools.partial(experts_of_device, axes, top_k, factor)
    return on_devices(axes, fn, (pieces, PartitionSpec(), pieces, pieces), pieces)(x, router, up, down)


def embedded(axes, table, letters):
    """The rows of ``letters``. Each device has all of the table, and adds up the gradient of its own letters."""
    pieces = PartitionSpec(axes)
    return on_devices(axes, lambda table, letters: table[letters], (PartitionSpec(), pieces), pieces)(table, letters)


def on_devices(axes, fn, in_specs, out_specs):
    """``fn``, which each logical device of a replica applies to its pieces."""
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes)) if axes else fn


# --- the model and its training: as on one device, but for where texts and experts are ----------------------------


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


@jax.checkpoint
def attention(x, query, key, value, out):
    query, key, value = (jnp.einsum("btd,dhe->bthe", x, w) for w in (query, key, value))
    return jnp.einsum("bthe,hed->btd", jax.nn.dot_product_attention(query, key, value, is_causal=True), out)


def build(
    strategy,
    width=WIDTH,
    heads=HEADS,
    layers=LAYERS,
    experts=EXPERTS,
    hidden=HIDDEN,
    letters=LETTERS + LANGUAGES,
    dtype=jnp.float32,
    **routing,
):
    """The variables and the step. Call it in ``strategy.scope()``."""
    axes = strategy.extended.mesh.axis_names[1:]  # those of a replica's devices; the first is that of the replicas
    parts = strategy.extended.num_logical_devices
    if experts % parts:
        raise ValueError(f"{experts} experts do not divide over the {parts} devices of a replica: choose a multiple")
    keys = iter(jax.random.split(jax.random.key(0), 2 + 7 * layers))

    def weight(name, shape, fan_in, partition_dimensions=None):
        key = next(keys)
        return replicax.Variable(
            lambda: fan_in**-0.5 * jax.random.normal(key, shape), name=name, partition_dimensions=partition_dimensions
        )

    blocks = [
        {
            **{name: weight(name, (width, heads, width // heads), width) for name in ("query", "key", "value")},
            "out": weight("out", (heads, width // heads, width), width),
            "router": weight("router", (width, experts), width),
            "up": weight("up", (experts, width, hidden), width, [parts, 1, 1]),
            "down": weight("down", (experts, hidden, width), hidden, [parts, 1, 1]),
        }
        for _ in range(layers)
    ]
    variables = {"embedding": weight("embedding", (letters, width), 1), "blocks": blocks}
    variables["head"] = weight("head", (width, letters), width)
    optimizer = replicax.Optimizer(optax.adam(0.01))

    def model(weights, letters):
        x = embedded(axes, weights["embedding"], letters)
        balances, counts = [], []
        for block in weights["blocks"]:
            x = x + attention(norm(x), *(block[name] for name in ("query", "key", "value", "out")))
            router = block["router"].astype(jnp.float32)
            y, balance, counted = expert_layer(axes, norm(x), router, block["up"], block["down"], **routing)
            x = x + y
            balances.append(balance)
            counts.append({name: of_texts.sum(0) for name, of_texts in counted.items()})
        counts = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *counts)
        return (norm(x) @ weights["head"]).astype(jnp.float32), sum(balances) / layers, counts

    def train_step(batch):
        # A device has some of the texts; all but the experts is computed of these.
        letters, targets = strategy.split_to_logical_devices(batch, [parts, 1])

        def loss_fn():
            weights = jax.tree.map(lambda w: w.astype(dtype), variables)
            logits, balance, counts = model(weights, letters)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)
            return replicax.compute_average_loss(losses + BALANCE * balance), counts

        (loss, counts), gradients = replicax.value_and_grad(loss_fn, variables, has_aux=True)()
        optimizer.apply_gradients(gradients, variables)
        return replicax.get_replica_context().all_reduce("sum", (loss, counts))

    return variables, train_step


def report(counts, top_k=TOP_K):
    """What is wrong with the experts, a line for each; ``counts`` are those of a step, or sums over several."""
    lines = []
    for layer, (chosen, dropped, nan_in, nan_out) in enumerate(
        zip(*(np.asarray(counts[name]) for name in ("chosen", "dropped", "nan in", "nan out")), strict=True)
    ):
        tokens = chosen.sum() // top_k
        for expert in range(len(chosen)):
            who = f"layer {layer}, expert {expert}"
            if chosen[expert] == 0:
                lines.append(f"{who}: no token of {tokens:,} chose it, so it does not learn")
            elif chosen[expert] == tokens:
                lines.append(f"{who}: all {tokens:,} tokens chose it, and it dropped {dropped[expert]:,}")
            if nan_in[expert]:
                lines.append(f"{who}: got {nan_in[expert]:,} tokens with NaN or infinity: look at the layers before it")
            if nan_out[expert]:
                lines.append(f"{who}: made NaN or infinity of {nan_out[expert]:,} tokens: look at its weights")
    return lines


def train(strategy, steps=STEPS, **options):
    """The loss and the counts of each step, the variables and the compiled step."""
    with strategy.scope():
        variables, train_step = build(strategy, **options)
    parts = [strategy.extended.num_logical_devices, 1]
    results = []
    for batch in strategy.distribute_dataset(list(batches(steps))):
        batch = strategy.split_to_logical_devices(batch, parts)  # so that no device has all texts of a replica
        results.append(strategy.run(train_step, args=(batch,)))
    losses, counts = zip(*results, strict=True)
    return [float(loss) for loss in losses], counts, variables, strategy.extended.trace(train_step, args=(batch,))


def plan(
    strategy, batch=8, length=4096, width=2048, heads=16, layers=8, experts=64, hidden=4096, letters=32_768, top_k=TOP_K
):
    """The step of a larger model, in bfloat16, and what one REPLICA of it takes: so many texts of so many letters."""
    with strategy.scope():
        _, train_step = build(strategy, width, heads, layers, experts, hidden, letters, dtype=jnp.bfloat16, top_k=top_k)
    text = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return train_step, (text, text)


def main():
    replicax.use_cpu_devices(8)
    strategy = replicax.MirroredStrategy(num_logical_devices=4)
    print(strategy)
    losses, counts, _, program = train(strategy)
    for first in range(0, STEPS, WINDOW):
        window = jax.tree.map(lambda *steps: sum(map(np.asarray, steps)), *counts[first : first + WINDOW])
        chosen, dropped = window["chosen"], window["dropped"].sum() / window["chosen"].sum()
        busiest = chosen.max() / chosen.mean()
        loss = np.mean(losses[first : first + WINDOW])
        print(f"step {first:3}   loss {loss:.3f}   dropped {dropped:.1%}   busiest expert {busiest:.2f} of the mean")
        for line in report(window):
            print(f"  {line}")
    least = np.log(LETTERS) / LENGTH + BALANCE
    print(f"a loss of {least:.3f} is the least: nothing tells a text's first letter, and the balance is 1 at best")
    sends = [c.bytes for c in program.collectives() if c.kind == "all-to-all"]
    print(f"{len(sends)} all-to-alls in a step, of {max(sends):,} bytes")


if __name__ == "__main__":
    main()
