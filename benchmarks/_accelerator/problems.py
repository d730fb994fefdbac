"""What is trained: an MLP, a CNN and a transformer, as functions of a list of parameters, and in Flax NNX.

All compute in bfloat16 but for the MLP, with parameters and optimizers in float32; the small ones in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _steps import Problem


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the models are, and the batch of each device.

    Attributes:
      name: ``"full"``, or ``"small"`` for emulated devices.
      hidden: the width of the two hidden layers of the MLP.
      channels: of the three pairs of convolutions of the CNN.
      layers, width, heads, words, length: of the transformer.
      examples: for each device, of the MLP, the CNN and the transformer.
      steps: in a call of ``run_steps``, of the three.
      dtype: in which the CNN and the transformer compute. CPUs are slow at bfloat16.
    """

    name: str
    hidden: int
    channels: tuple[int, int, int]
    layers: int
    width: int
    heads: int
    words: int
    length: int
    examples: dict[str, int]
    steps: dict[str, int]
    dtype: Any = jnp.bfloat16


FULL = Sizes(
    "full",
    hidden=4096,
    channels=(64, 128, 256),
    layers=12,
    width=768,
    heads=12,
    words=50304,  # GPT-2's 50,257, rounded up as everybody does
    length=1024,
    examples={"mlp": 1024, "cnn": 256, "transformer": 8},
    steps={"mlp": 50, "cnn": 20, "transformer": 5},
)
SMALL = Sizes(
    "small",
    hidden=256,
    channels=(8, 16, 16),
    layers=2,
    width=64,
    heads=4,
    words=512,
    length=64,
    examples={"mlp": 32, "cnn": 8, "transformer": 2},
    steps={"mlp": 20, "cnn": 5, "transformer": 10},
    dtype=jnp.float32,
)
MODELS = ("mlp", "cnn", "transformer")


def sizes_for(name: str, memory: int | None) -> Sizes:
    """The sizes of that name, with smaller batches of the transformer on devices with less than 40 GB."""
    sizes = FULL if name == "full" else SMALL
    if name == "full" and memory and memory < 40e9:
        sizes = dataclasses.replace(sizes, examples={**sizes.examples, "transformer": 4 if memory > 20e9 else 1})
    return sizes


def problem(model: str, sizes: Sizes, devices: int) -> Problem:
    """A model, and a batch for so many devices."""
    return _MAKERS[model](sizes, devices * sizes.examples[model])


def title(model: str, sizes: Sizes) -> str:
    """A model in a few words."""
    if model == "mlp":
        return f"MLP 784-{sizes.hidden}-{sizes.hidden}-10"
    if model == "cnn":
        return "CNN " + "-".join(map(str, sizes.channels))
    return f"transformer {sum(map(np.size, _transformer_parameters(sizes))) / 1e6:.3g}M"


# --- as functions of a list of parameters ---------------------------------------------------------------------


def _mlp(sizes: Sizes, batch: int) -> Problem:
    rng = np.random.default_rng(0)
    initial: list[Any] = []
    for n_in, n_out in itertools.pairwise((784, sizes.hidden, sizes.hidden, 10)):
        initial += [_normal(rng, n_in, (n_in, n_out)), np.zeros(n_out, np.float32)]

    def losses(params: Any, pixels: Any, labels: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = (jnp.asarray(p) for p in params)
        x = pixels.astype(jnp.float32) / 255
        x = jax.nn.relu(jax.nn.relu(x @ w1 + b1) @ w2 + b2)
        return optax.softmax_cross_entropy_with_integer_labels(x @ w3 + b3, labels)

    return Problem(initial, _pixels(rng, batch, (784,)), losses, optax.adam(1e-3))


def _cnn(sizes: Sizes, batch: int) -> Problem:
    rng = np.random.default_rng(0)
    before, initial = 3, []
    for channels in sizes.channels:
        for n_in in (before, channels):
            initial += [_normal(rng, 9 * n_in, (3, 3, n_in, channels)), np.zeros(channels, np.float32)]
        before = channels
    initial += [_normal(rng, before, (before, 10)), np.zeros(10, np.float32)]

    def losses(params: Any, pixels: Any, labels: Any) -> Any:
        *kernels, head, bias = (jnp.asarray(p).astype(sizes.dtype) for p in params)
        x = pixels.astype(sizes.dtype) / 255
        for i in range(0, len(kernels), 4):
            for kernel, shift in (kernels[i : i + 2], kernels[i + 2 : i + 4]):
                x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = jax.nn.relu(x + shift)
            x = _pooled(x)
        logits = (_mean(x) @ head + bias).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    return Problem(initial, _pixels(rng, batch, (32, 32, 3)), losses, optax.adam(1e-3))


def _transformer(sizes: Sizes, batch: int) -> Problem:
    """GPT-2's arithmetic: a tied embedding, learned positions, twelve parameters a layer."""
    heads, words = sizes.heads, sizes.words

    def block(x: Any, parameters: Any) -> Any:
        scale1, shift1, qkv, b_qkv, out, b_out, scale2, shift2, up, b_up, down, b_down = parameters
        joint = (_norm(x, scale1, shift1) @ qkv + b_qkv).reshape(*x.shape[:2], 3, heads, -1)
        attended = jax.nn.dot_product_attention(*(joint[:, :, i] for i in range(3)), is_causal=True)
        x = x + attended.reshape(x.shape) @ out + b_out
        return x + jax.nn.gelu(_norm(x, scale2, shift2) @ up + b_up) @ down + b_down

    def losses(params: Any, text: Any) -> Any:
        table, places, scale, shift, *rest = (jnp.asarray(p).astype(sizes.dtype) for p in params)
        x = table[text[:, :-1]] + places
        for i in range(0, len(rest), 12):
            x = block(x, rest[i : i + 12])
        logits = (_norm(x, scale, shift) @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(-1)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    text = np.random.default_rng(1).integers(words, size=(batch, sizes.length + 1)).astype(np.int32)
    return Problem(_transformer_parameters(sizes), (text,), losses, tx)


def _transformer_parameters(sizes: Sizes) -> list[Any]:
    rng, width = np.random.default_rng(0), sizes.width
    ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)

    def matrix(n_in: int, n_out: int) -> list[Any]:
        return [0.02 * rng.standard_normal((n_in, n_out), np.float32), np.zeros(n_out, np.float32)]

    table, places = matrix(sizes.words, width)[0], matrix(sizes.length, width)[0]
    found = [table, places, ones, zeros]
    for _ in range(sizes.layers):
        found += [ones, zeros, *matrix(width, 3 * width), *matrix(width, width)]
        found += [ones, zeros, *matrix(width, 4 * width), *matrix(4 * width, width)]
    return found


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale + shift


def _normal(rng: np.random.Generator, fan_in: int, shape: tuple[int, ...]) -> Any:
    return fan_in**-0.5 * rng.standard_normal(shape, np.float32)


def _pixels(rng: np.random.Generator, batch: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Images of bytes, as files have them, and labels."""
    return rng.integers(256, size=(batch, *shape), dtype=np.uint8), rng.integers(10, size=batch).astype(np.int32)


def _pooled(x: Any) -> Any:
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))


def _mean(x: Any) -> Any:
    return x.mean((1, 2))


_MAKERS: dict[str, Callable[[Sizes, int], Problem]] = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


# --- in Flax NNX ----------------------------------------------------------------------------------------------


def nnx_model(model: str, sizes: Sizes) -> Any:
    """The same kind of model as an NNX module, which takes the first array of the batch."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    if model == "mlp":
        widths = (784, sizes.hidden, sizes.hidden, 10)
        layers = [nnx.Linear(n_in, n_out, rngs=rngs) for n_in, n_out in itertools.pairwise(widths)]
        return nnx.Sequential(_scaled(jnp.float32), layers[0], nnx.relu, layers[1], nnx.relu, layers[2])
    if model == "cnn":
        parts: list[Any] = [_scaled(sizes.dtype)]
        for n_in, n_out in itertools.pairwise((3, *sizes.channels)):
            for each in (n_in, n_out):
                parts += [nnx.Conv(each, n_out, (3, 3), dtype=sizes.dtype, rngs=rngs), nnx.relu]
            parts.append(_pooled)
        return nnx.Sequential(*parts, _mean, nnx.Linear(sizes.channels[-1], 10, dtype=sizes.dtype, rngs=rngs))
    return _nnx_transformer(sizes, rngs)


def nnx_losses(model: str, module: Any, batch: Any) -> Any:
    """The loss of each example."""
    if model == "transformer":
        [text] = batch
        logits = module(text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean(-1)
    pixels, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(module(pixels).astype(jnp.float32), labels)


def _nnx_transformer(sizes: Sizes, rngs: Any) -> Any:
    from flax import nnx

    options = {"dtype": sizes.dtype, "rngs": rngs}
    width = sizes.width

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(width, **options), nnx.LayerNorm(width, **options)
            self.qkv, self.out = nnx.Linear(width, 3 * width, **options), nnx.Linear(width, width, **options)
            self.up, self.down = nnx.Linear(width, 4 * width, **options), nnx.Linear(4 * width, width, **options)

        def __call__(self, x: Any) -> Any:
            joint = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, sizes.heads, -1)
            attended = jax.nn.dot_product_attention(*(joint[:, :, i] for i in range(3)), is_causal=True)
            x = x + self.out(attended.reshape(x.shape))
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.table, self.places = (
                nnx.Embed(sizes.words, width, **options),
                nnx.Embed(sizes.length, width, **options),
            )
            self.blocks, self.norm = nnx.List([Block() for _ in range(sizes.layers)]), nnx.LayerNorm(width, **options)

        def __call__(self, text: Any) -> Any:
            x = self.table(text) + self.places(jnp.arange(text.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.table.attend(self.norm(x))

    return Model()


def _scaled(dtype: Any) -> Callable[[Any], Any]:
    """What makes numbers from 0 to 1 of pixels."""
    return lambda pixels: pixels.astype(dtype) / 255
