"""A language model like Llama 2: a tiny one learns from real text here, and one of 70 billion parameters is planned.

    python examples/language_model.py --devices 4
    python examples/language_model.py --devices 8 --group 2 --parts 2
    replicax launch --workers 2 --devices-per-worker 4 examples/language_model.py --group 2 --parts 2
    replicax plan examples/language_model.py --topology v5p:4x8x8 --strategy sharded --with size=70b
    replicax plan examples/language_model.py --topology v5p:4x4x4 --with size=7b --search

The model has what Llama 2 has: RMS norms, rotary embeddings, attention in which several heads of queries share one of
keys and values, and SwiGLU. The first line trains it on bytes of the Python standard library's source code (or of what
you name, ``--text "notes/*.txt"``) on four emulated devices.

The second line trains on eight, as 2 × 2 × 2. Each replica is spread over two devices, of which each has half of the
heads and of the hidden units (tensor parallel). Two such replicas are a group, and share out what each of the two
devices has (fully sharded). There are two groups with other texts (data parallel). In the third line each group is a
worker, a process of its own. The fourth compiles the step for 256 TPU chips, which need not be there; the fifth looks
for the placement of a smaller model that is predicted to be the quickest.

The step is written for ONE replica, and is the same for every placement. Parameters are float32, and products are
computed in bfloat16 (``--dtype float32``: then all placements have the same losses up to 1e-5). A layer is computed
again in the backward pass, so of its values only what goes in is kept (``replicax plan ... --with remat=none``: all).
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import math
import os
import pathlib
import random
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

TEXT = os.path.join(sysconfig.get_paths()["stdlib"], "*.py")
QUERIES = 512  # of which attention is computed at once
EVERY = 20  # after so many steps a row is logged, and after ten times as many the run is saved: see --every


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a model is. Words are whatever the text is cut into: here bytes, in Llama 2 parts of words."""

    layers: int
    width: int
    heads: int
    groups: int  # heads of keys, and of values; heads // groups heads of queries share each
    hidden: int
    words: int
    length: int  # of a text, in words


SIZES = {
    "tiny": Size(layers=2, width=128, heads=4, groups=2, hidden=352, words=256, length=128),
    "7b": Size(layers=32, width=4096, heads=32, groups=32, hidden=11_008, words=32_000, length=4096),
    "13b": Size(layers=40, width=5120, heads=40, groups=40, hidden=13_824, words=32_000, length=4096),
    "70b": Size(layers=80, width=8192, heads=64, groups=8, hidden=28_672, words=32_000, length=4096),
}


def shapes(size):
    """Of each parameter. Those of all layers are one array, as the model goes through them in a scan."""
    head = size.width // size.heads
    layer = {
        "attention_norm": (size.width,),
        "query": (size.width, size.heads, head),
        "key": (size.width, size.groups, head),
        "value": (size.width, size.groups, head),
        "out": (size.heads, head, size.width),
        "mlp_norm": (size.width,),
        "gate": (size.width, size.hidden),
        "up": (size.width, size.hidden),
        "down": (size.hidden, size.width),
    }
    layers = {name: (size.layers, *shape) for name, shape in layer.items()}
    return {"embedding": (size.words, size.width), **layers, "norm": (size.width,), "head": (size.width, size.words)}


# Which dim of a parameter is split, if a replica has several devices: heads, hidden units, and the embedding's width.
SPLIT = {"embedding": 1, "query": 2, "key": 2, "value": 2, "out": 1, "gate": 2, "up": 2, "down": 1, "head": 1}


# --- the model: functions of arrays -------------------------------------------------------------------------


def rms_norm(x, scale):
    """Each vector at a length of √width, times ``scale``; in float32, as squares of small numbers get lost."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotary(x):
    """Turn the pairs of numbers of each head by angles that grow with the place in the text, each pair at its speed.

    The product of a query and a key then depends on how far they are apart, and not on where they are. ``x`` is
    ``[texts, length, heads, head]``; number i and number i + head / 2 are a pair.
    """
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(query, key, value):
    """What each place takes from itself and from those before it.

    ``query`` is ``[texts, length, heads, head]``; the heads of ``key`` and ``value`` may be fewer, and are shared. It
    is computed for some queries at a time, and again in the backward pass: the scores of all would be the largest
    array of the step by far.
    """
    texts, length, *heads = query.shape
    size = max(n for n in range(1, min(QUERIES, length) + 1) if length % n == 0)

    @jax.checkpoint
    def some(first, queries):
        is_seen = first + jnp.arange(size)[:, None] >= jnp.arange(length)
        return first + size, jax.nn.dot_product_attention(queries, key, value, mask=is_seen[None, None])

    _, taken = jax.lax.scan(some, 0, query.reshape(texts, -1, size, *heads).swapaxes(0, 1))
    return taken.swapaxes(0, 1).reshape(query.shape)


def swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def layer(x, weights):
    y = rms_norm(x, weights["attention_norm"])
    query, key, value = (jnp.einsum("btd,dhe->bthe", y, weights[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("bthe,hed->btd", attention(rotary(query), rotary(key), value), weights["out"])
    return x + swiglu(rms_norm(x, weights["mlp_norm"]), weights["gate"], weights["up"], weights["down"]), None


def model(weights, words, remat="layers"):
    """Logits (float32) of the word behind each of ``words``, ``[texts, length]``.

    With ``remat="layers"`` a layer is computed again in the backward pass; with ``"none"`` all of its values are kept.
    """
    x = weights["embedding"][words]
    one = {"layers": jax.checkpoint(layer), "none": layer}[remat]
    x, _ = jax.lax.scan(one, x, {k: w for k, w in weights.items() if k not in ("embedding", "norm", "head")})
    return (rms_norm(x, weights["norm"]) @ weights["head"]).astype(jnp.float32)


# --- training: variables, which have a place, and a step ----------------------------------------------------


def build(size, parts=1, dtype=jnp.bfloat16, learning_rate=3e-4, remat="layers"):
    """What is saved, what is logged, and the step. Call it in ``strategy.scope()``, which places what is made here.

    ``parts`` is the number of devices of a replica; ``remat`` is that of ``model``.
    """

    def variable(key, name, shape):
        def initial():
            return jnp.ones(shape) if name.endswith("norm") else 0.02 * jax.random.normal(key, shape)

        is_split = parts > 1 and name in SPLIT
        parts_of = [parts if dim == SPLIT[name] else 1 for dim in range(len(shape))] if is_split else None
        # Given a function, a variable is initialised right where it will live. In a plan it has a shape and no value.
        return replicax.Variable(initial, name=name, partition_dimensions=parts_of)

    wanted = shapes(size)
    keys = jax.random.split(jax.random.key(0), len(wanted))
    variables = {name: variable(key, name, wanted[name]) for key, name in zip(keys, wanted, strict=True)}
    rule = optax.adamw(learning_rate, b2=0.95, weight_decay=0.1)
    optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), rule))
    bits = replicax.Mean("bits per word")

    def train_step(text):  # this replica's, [texts, length + 1]
        def loss_fn():
            logits = model({name: v.value.astype(dtype) for name, v in variables.items()}, text[:, :-1], remat)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(axis=-1)
            bits.update(losses / math.log(2))
            return replicax.compute_average_loss(losses)  # the share of the mean over the GLOBAL batch

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(gradients, variables)
        return loss

    return replicax.Checkpoint(model=variables, optimizer=optimizer), bits, train_step


def texts_in(pattern, files, length):
    """The bytes of some files, ``[texts, length + 1]``; always the same files on the same machine."""
    names = sorted(glob.glob(pattern))
    chosen = random.Random(0).sample(names, min(files, len(names)))
    data = b"\n".join(pathlib.Path(name).read_bytes() for name in chosen)
    return np.frombuffer(data[: len(data) // (length + 1) * (length + 1)], np.uint8).reshape(-1, length + 1)


def train(strategy, size, texts, folder, steps, batch=32, every=EVERY, **options):
    """So many steps, with what an earlier run in the same folder has made of them. ``batch`` is the GLOBAL one."""
    with strategy.scope():
        checkpoint, bits, train_step = build(size, strategy.extended.num_logical_devices, **options)
    dataset = strategy.make_numpy_dataset(texts.astype(np.int32)).seed(0).shuffle().repeat().batch(batch)
    with replicax.CheckpointManager(checkpoint, os.path.join(folder, "saved"), every_steps=10 * every) as manager:
        return replicax.train(
            train_step,
            strategy.distribute_dataset(dataset),
            steps,
            metrics=[bits],
            log_every=every,
            logs=folder,
            checkpoints=manager,
        )


SEARCH = {"remat": ["layers", "none"]}  # what replicax plan --search may vary of plan's arguments


def plan(strategy, size="7b", batch=4, length=None, remat="layers", dtype="bfloat16"):
    """The step, and what one REPLICA of it takes: so many texts of so many words (by default, the size's)."""
    with strategy.scope():
        parts = strategy.extended.num_logical_devices
        *_, train_step = build(SIZES[size], parts, dtype, remat=remat)
    return train_step, jax.ShapeDtypeStruct((batch, (length or SIZES[size].length) + 1), jnp.int32)


def strategy_for(kind, group=None, parts=1):
    """The placement, on all devices of all workers: see the command line's help."""
    if kind == "mirrored":
        return replicax.MultiWorkerMirroredStrategy(num_logical_devices=parts)
    partitioner = replicax.variables.GroupPartitioner(group) if group else None
    return replicax.ShardedStrategy(variable_partitioner=partitioner, num_logical_devices=parts)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--strategy", choices=("mirrored", "sharded"), default="sharded")
    parser.add_argument("--group", type=int, help="split over each so many replicas only, and mirror over these groups")
    parser.add_argument("--parts", type=int, default=1, help="how many devices each replica is spread over")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the products")
    parser.add_argument("--devices", type=int, help="so many emulated CPU devices; without it, those that are there")
    parser.add_argument("--text", default=TEXT, help="which files to read, as a pattern in quotes")
    parser.add_argument("--files", type=int, default=60, help="how many of them")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="texts of a step, of all replicas together")
    parser.add_argument("--every", type=int, default=EVERY, help="so many steps are a row of the log")
    parser.add_argument("--folder", default="runs/language_model", help="for the log and the checkpoints")
    args = parser.parse_args(arguments)
    if args.strategy == "mirrored" and args.group:
        parser.error("--group: with --strategy mirrored nothing is split; leave one of them out")
    if args.devices:
        replicax.use_cpu_devices(args.devices)
    texts = texts_in(args.text, args.files, SIZES[args.size].length)
    if not len(texts):
        parser.error(f"--text {args.text}: there are no such files, or they are too short")
    train(
        strategy_for(args.strategy, args.group, args.parts),
        SIZES[args.size],
        texts,
        args.folder,
        args.steps,
        args.batch,
        args.every,
        dtype=args.dtype,
        learning_rate=3e-3,
    )


if __name__ == "__main__":
    main()
