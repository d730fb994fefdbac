"""Ten programs for which no rule for CPUs was written: what people train, small enough for two cores.

Each function returns a :class:`Problem`. The GAN's losses are two, each with an optimizer and parameters of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Params = Mapping[str, Any]


@dataclasses.dataclass
class Problem:
    """What to train.

    Attributes:
      initial: the parameters, in a group for each optimizer.
      batch: arrays ``[global_batch, …]``.
      losses: for each group a function of all groups and a slice of the batch: the loss of each example.
      tx: the optimizer of each group.
    """

    initial: list[dict[str, Any]]
    batch: tuple[Any, ...]
    losses: list[Callable[..., Any]]
    tx: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))


class _Values:
    """Draws initial values."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.found: dict[str, Any] = {}

    def weight(self, name: str, *shape: int) -> None:
        scale = math.prod(shape[:-1]) ** -0.5
        self.found[name] = self.rng.normal(0, scale, shape).astype(np.float32)

    def ones(self, name: str, *shape: int) -> None:
        self.found[name] = np.ones(shape, np.float32)

    def zeros(self, name: str, *shape: int) -> None:
        self.found[name] = np.zeros(shape, np.float32)

    def data(self, *shape: int) -> Any:
        return self.rng.normal(size=shape).astype(np.float32)

    def numbers(self, below: int, *shape: int) -> Any:
        return self.rng.integers(below, size=shape).astype(np.int32)


def _one(values: _Values, batch: tuple[Any, ...], losses: Callable[..., Any], **other: Any) -> Problem:
    return Problem([values.found], batch, [lambda groups, *batch: losses(groups[0], *batch)], **other)


def _entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _conv(x: Any, kernel: Any, stride: int = 1, hole: int = 1, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        rhs_dilation=(hole, hole),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _rms(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _group_norm(x: Any, scale: Any, groups: int = 4) -> Any:
    n, h, w, c = x.shape
    y = x.reshape(n, h, w, groups, c // groups)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale


def decoder() -> Problem:
    """A language model of 16 layers: rotary positions, grouped queries, gated hidden layers."""
    v, layers, width, heads, head, length = _Values(0), 16, 64, 4, 16, 32
    v.weight("tokens", 128, width)
    for i in range(layers):
        v.ones(f"{i}.norm0", width)
        v.weight(f"{i}.q", width, heads, head)
        v.weight(f"{i}.kv", width, 2, 2, head)
        v.weight(f"{i}.out", heads, head, width)
        v.ones(f"{i}.norm1", width)
        v.weight(f"{i}.gate", width, 2, 160)
        v.weight(f"{i}.down", 160, width)
    v.ones("norm", width)
    angles = np.arange(length)[:, None] / 100 ** (np.arange(head // 2) / (head // 2))

    def turned(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def losses(p: Params, texts: Any) -> Any:
        x = p["tokens"][texts[:, :-1]]
        for i in range(layers):
            y = _rms(x, p[f"{i}.norm0"])
            q = turned(jnp.einsum("btd,dhe->bthe", y, p[f"{i}.q"]))
            k, value = jnp.moveaxis(jnp.einsum("btd,djhe->btjhe", y, p[f"{i}.kv"]), 2, 0)
            q = q.reshape(*q.shape[:2], 2, heads // 2, head)
            scores = jnp.einsum("btghe,bsge->bghts", q, turned(k)) / math.sqrt(head)
            weights = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, -1e9))
            mixed = jnp.einsum("bghts,bsge->btghe", weights, value).reshape(*y.shape[:2], heads, head)
            x = x + jnp.einsum("bthe,hed->btd", mixed, p[f"{i}.out"])
            a, b = jnp.moveaxis(jnp.einsum("btd,djh->btjh", _rms(x, p[f"{i}.norm1"]), p[f"{i}.gate"]), 2, 0)
            x = x + (jax.nn.silu(a) * b) @ p[f"{i}.down"]
        return _entropy(_rms(x, p["norm"]) @ p["tokens"].T, texts[:, 1:]).mean(-1)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return _one(v, (v.numbers(128, 16, length + 1),), losses, tx=tx)


def dilated() -> Problem:
    """Segmentation: strides, dilated convolutions with residual connections, bilinear upsampling."""
    v = _Values(1)
    v.weight("stem", 5, 5, 3, 32)
    for i in range(4):
        v.weight(f"{i}.conv", 3, 3, 32, 32)
        v.ones(f"{i}.norm", 32)
    v.weight("head", 32, 6)

    def losses(p: Params, x: Any, labels: Any) -> Any:
        x = jax.nn.relu(_conv(x, p["stem"], stride=2))
        for i, hole in enumerate((1, 2, 4, 8)):
            x = x + jax.nn.relu(_group_norm(_conv(x, p[f"{i}.conv"], hole=hole), p[f"{i}.norm"]))
        x = jax.image.resize(x @ p["head"], (*labels.shape, 6), "bilinear")
        return _entropy(x, labels).mean((1, 2))

    return _one(v, (v.data(8, 32, 32, 3), v.numbers(6, 8, 32, 32)), losses)


def recurrent() -> Problem:
    """A GRU of two layers over 48 steps, by ``lax.scan``."""
    v, width, length = _Values(2), 128, 48
    v.weight("tokens", 64, width)
    for i in range(2):
        v.weight(f"{i}.input", width, 3 * width)
        v.weight(f"{i}.state", width, 3 * width)
        v.zeros(f"{i}.bias", 3 * width)
    v.weight("head", width, 64)

    def layer(p: Params, i: int, x: Any) -> Any:
        def turn(h: Any, given: Any) -> Any:
            a, b = jnp.split(given, [2 * width], -1)
            c, d = jnp.split(h @ p[f"{i}.state"], [2 * width], -1)
            r, z = jnp.split(jax.nn.sigmoid(a + c), 2, -1)
            h = (1 - z) * jnp.tanh(b + r * d) + z * h
            return h, h

        given = jnp.moveaxis(x @ p[f"{i}.input"] + p[f"{i}.bias"], 1, 0)
        return jnp.moveaxis(lax.scan(turn, jnp.zeros((len(x), width)), given)[1], 0, 1)

    def losses(p: Params, texts: Any) -> Any:
        x = p["tokens"][texts[:, :-1]]
        for i in range(2):
            x = layer(p, i, x)
        return _entropy(x @ p["head"], texts[:, 1:]).mean(-1)

    return _one(v, (v.numbers(64, 32, length + 1),), losses)


def recommender() -> Problem:
    """Eight tables of 5,000 rows, bags of ten rows each, products of pairs, a small MLP."""
    v, tables, size = _Values(3), 8, 32
    for i in range(tables):
        v.weight(f"{i}.table", 5000, size)
    v.weight("dense", 13, size)
    pairs = [(i, j) for i in range(tables + 1) for j in range(i)]
    for i, (n, m) in enumerate(((size + len(pairs), 128), (128, 64), (64, 1))):
        v.weight(f"{i}.kernel", n, m)
        v.zeros(f"{i}.bias", m)

    def losses(p: Params, numbers: Any, bags: Any, labels: Any) -> Any:
        dense = jax.nn.relu(numbers @ p["dense"])
        vectors = jnp.stack([dense, *(p[f"{i}.table"][bags[:, i]].mean(1) for i in range(tables))], 1)
        products = jnp.einsum("bie,bje->bij", vectors, vectors)
        x = jnp.concatenate([dense, products[:, *np.array(pairs).T]], -1)
        for i in range(3):
            x = (jax.nn.relu(x) if i else x) @ p[f"{i}.kernel"] + p[f"{i}.bias"]
        return optax.sigmoid_binary_cross_entropy(x[:, 0], labels)

    batch = v.data(512, 13), v.numbers(5000, 512, tables, 10), v.numbers(2, 512).astype(np.float32)
    return _one(v, batch, losses, tx=optax.adagrad(0.01))


def wide_batch() -> Problem:
    """An MLP with layer normalisation and dropout by a mask, 2,048 examples at once."""
    v, sizes = _Values(4), (64, 256, 256, 256, 8)
    for i in range(4):
        v.weight(f"{i}.kernel", sizes[i], sizes[i + 1])
        v.zeros(f"{i}.bias", sizes[i + 1])

    def losses(p: Params, x: Any, y: Any) -> Any:
        for i in range(4):
            x = x @ p[f"{i}.kernel"] + p[f"{i}.bias"]
            if i < 3:
                x = jax.nn.gelu((x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5))
        return jnp.square(x - y).mean(-1)

    return _one(v, (v.data(2048, 64), v.data(2048, 8)), losses, tx=optax.sgd(1e-2, momentum=0.9))


def adversarial() -> Problem:
    """A GAN: transposed convolutions against strided ones, an optimizer for each."""
    g, d = _Values(5), _Values(6)
    g.weight("first", 32, 4 * 4 * 64)
    g.weight("up0", 4, 4, 64, 32)
    g.weight("up1", 4, 4, 32, 16)
    g.weight("last", 3, 3, 16, 1)
    d.weight("down0", 4, 4, 1, 16)
    d.weight("down1", 4, 4, 16, 32)
    d.weight("head", 4 * 4 * 32, 1)

    def made(p: Params, noise: Any) -> Any:
        x = jax.nn.relu(noise @ p["first"]).reshape(-1, 4, 4, 64)
        for name in ("up0", "up1"):
            x = jax.nn.relu(lax.conv_transpose(x, p[name], (2, 2), "SAME"))
        return jnp.tanh(_conv(x, p["last"]))

    def judged(p: Params, x: Any) -> Any:
        for name in ("down0", "down1"):
            x = jax.nn.leaky_relu(_conv(x, p[name], stride=2), 0.2)
        return (x.reshape(len(x), -1) @ p["head"])[:, 0]

    def makers(groups: Any, images: Any, noise: Any) -> Any:
        return jax.nn.softplus(-judged(groups[1], made(groups[0], noise)))

    def judges(groups: Any, images: Any, noise: Any) -> Any:
        fake = lax.stop_gradient(made(groups[0], noise))
        return jax.nn.softplus(judged(groups[1], fake)) + jax.nn.softplus(-judged(groups[1], images))

    batch = g.data(32, 16, 16, 1), g.data(32, 32)
    return Problem([g.found, d.found], batch, [makers, judges], optax.adam(2e-4, b1=0.5))


def depthwise() -> Problem:
    """A MobileNet: depthwise and 1×1 convolutions, squeeze and excitation, mean pooling."""
    v = _Values(7)
    v.weight("stem", 3, 3, 3, 16)
    sizes = (16, 32, 64)
    for i in range(2):
        n, m = sizes[i], sizes[i + 1]
        v.weight(f"{i}.expand", 1, 1, n, 4 * n)
        v.found[f"{i}.depth"] = v.data(3, 3, 1, 4 * n) / 3
        v.weight(f"{i}.squeeze", 4 * n, n)
        v.weight(f"{i}.excite", n, 4 * n)
        v.weight(f"{i}.project", 1, 1, 4 * n, m)
        v.ones(f"{i}.norm", 4 * n)
    v.weight("head", 64, 10)

    def losses(p: Params, x: Any, labels: Any) -> Any:
        x = jax.nn.silu(_conv(x, p["stem"], stride=2))
        for i in range(2):
            y = jax.nn.silu(_conv(x, p[f"{i}.expand"]))
            y = jax.nn.silu(_group_norm(_conv(y, p[f"{i}.depth"], stride=2, groups=y.shape[-1]), p[f"{i}.norm"]))
            gate = jax.nn.sigmoid(jax.nn.relu(y.mean((1, 2)) @ p[f"{i}.squeeze"]) @ p[f"{i}.excite"])
            x = _conv(y * gate[:, None, None], p[f"{i}.project"])
        return _entropy(x.mean((1, 2)) @ p["head"], labels)

    return _one(v, (v.data(16, 32, 32, 3), v.numbers(10, 16)), losses)


def windows() -> Problem:
    """Attention in windows of an image, as in a Swin transformer: arrays of five and six dims, by ``einsum``."""
    v, width, heads = _Values(8), 48, 3
    v.weight("patch", 4 * 4 * 3, width)
    for i in range(2):
        v.ones(f"{i}.norm", width)
        v.weight(f"{i}.qkv", width, 3, heads, width // heads)
        v.weight(f"{i}.bias", 16, 16, heads)
        v.weight(f"{i}.out", heads, width // heads, width)
        v.weight(f"{i}.up", width, 4 * width)
        v.weight(f"{i}.down", 4 * width, width)
    v.weight("head", width, 10)

    def losses(p: Params, x: Any, labels: Any) -> Any:
        n = len(x)
        x = x.reshape(n, 8, 4, 8, 4, 3).swapaxes(2, 3).reshape(n, 8, 8, -1) @ p["patch"]
        for i in range(2):
            y = jnp.roll(_rms(x, p[f"{i}.norm"]), -2 * i, (1, 2))
            y = y.reshape(n, 2, 4, 2, 4, width).swapaxes(2, 3).reshape(n, 4, 16, width)
            q, k, value = jnp.einsum("nwtd,djhe->jnwthe", y, p[f"{i}.qkv"])
            scores = jnp.einsum("nwthe,nwshe->nwtsh", q, k) / 4 + p[f"{i}.bias"]
            y = jnp.einsum("nwtsh,nwshe,hed->nwtd", jax.nn.softmax(scores, 3), value, p[f"{i}.out"])
            y = y.reshape(n, 2, 2, 4, 4, width).swapaxes(2, 3).reshape(n, 8, 8, width)
            x = x + jnp.roll(y, 2 * i, (1, 2))
            x = x + jax.nn.gelu(x @ p[f"{i}.up"]) @ p[f"{i}.down"]
        return _entropy(x.mean((1, 2)) @ p["head"], labels)

    return _one(v, (v.data(32, 32, 32, 3), v.numbers(10, 32)), losses)


def graph() -> Problem:
    """Messages along the edges of 16 graphs, gathered and added up by ``segment_sum``."""
    v, nodes, edges, width = _Values(9), 128, 512, 64
    v.weight("first", 16, width)
    for i in range(3):
        v.weight(f"{i}.message", 2 * width, width)
        v.weight(f"{i}.update", 2 * width, width)
    v.weight("head", width, 1)

    def one(p: Params, x: Any, pairs: Any) -> Any:
        x = x @ p["first"]
        for i in range(3):
            sent = jax.nn.relu(jnp.concatenate([x[pairs[:, 0]], x[pairs[:, 1]]], -1) @ p[f"{i}.message"])
            come = jax.ops.segment_sum(sent, pairs[:, 1], nodes)
            x = x + jax.nn.relu(jnp.concatenate([x, come], -1) @ p[f"{i}.update"])
        return (x.mean(0) @ p["head"])[0]

    def losses(p: Params, x: Any, pairs: Any, y: Any) -> Any:
        return jnp.square(jax.vmap(lambda x, pairs: one(p, x, pairs))(x, pairs) - y)

    return _one(v, (v.data(16, nodes, 16), v.numbers(nodes, 16, edges, 2), v.data(16)), losses)


def unet() -> Problem:
    """A diffusion model's U-Net: skip connections, time as a vector, nearest upsampling, attention in the middle."""
    v, sizes = _Values(10), (16, 32, 64)
    v.weight("first", 3, 3, 1, 16)
    v.weight("time", 16, 64)
    for i in range(2):
        v.weight(f"{i}.down", 3, 3, sizes[i], sizes[i + 1])
        v.weight(f"{i}.time", 64, sizes[i + 1])
        v.ones(f"{i}.norm0", sizes[i + 1])
        v.weight(f"{i}.up", 3, 3, sizes[i + 1] + sizes[i], sizes[i])
        v.ones(f"{i}.norm1", sizes[i])
    v.weight("qkv", 64, 3, 64)
    v.weight("last", 3, 3, 16, 1)

    def losses(p: Params, x: Any, noise: Any, t: Any) -> Any:
        phases = t[:, None] * 2.0 ** np.arange(8, dtype=np.float32)
        when = jax.nn.silu(jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1) @ p["time"])
        level = t[:, None, None, None]
        x = _conv(jnp.sqrt(1 - level) * x + jnp.sqrt(level) * noise, p["first"])
        skips = []
        for i in range(2):
            skips.append(x)
            x = _conv(x, p[f"{i}.down"], stride=2) + (when @ p[f"{i}.time"])[:, None, None]
            x = jax.nn.silu(_group_norm(x, p[f"{i}.norm0"]))
        q, k, value = jnp.einsum("nhwd,dje->jnhwe", x, p["qkv"])
        weights = jax.nn.softmax(jnp.einsum("nhwe,nije->nhwij", q, k).reshape(*q.shape[:3], -1) / 8)
        x = x + jnp.einsum("nhws,nse->nhwe", weights, value.reshape(len(x), -1, 64))
        for i in reversed(range(2)):
            x = jnp.concatenate([x.repeat(2, 1).repeat(2, 2), skips[i]], -1)
            x = jax.nn.silu(_group_norm(_conv(x, p[f"{i}.up"]), p[f"{i}.norm1"]))
        return jnp.square(_conv(x, p["last"]) - noise).mean((1, 2, 3))

    batch = v.data(16, 24, 24, 1), v.data(16, 24, 24, 1), v.rng.uniform(size=16).astype(np.float32)
    return _one(v, batch, losses, tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))


PROGRAMS: dict[str, Callable[[], Problem]] = {
    f.__name__: f
    for f in (
        decoder,
        dilated,
        recurrent,
        recommender,
        wide_batch,
        adversarial,
        depthwise,
        windows,
        graph,
        unet,
    )
}
