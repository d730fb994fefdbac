"""What every peer trains: three small models, by their sizes, initial values and data, in NumPy alone.

Each library builds the model in its own words, from the same values. That they compute the same is checked: the number
of parameters, and the loss of the first and of the tenth step (``measuring.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Adam, as Optax and PyTorch have it. TensorFlow and Keras add epsilon elsewhere, which such a small one does not show.
LEARNING_RATE = 1e-4
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8
NORM_EPSILON = 1e-5

IMAGE = 28
CLASSES = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model and a batch to train it on.

    Attributes:
      name: ``"mlp"``, ``"cnn"`` or ``"transformer"``: each library has a function of that name.
      title: for tables.
      initial: the parameters by name, in JAX's order of dims: kernels are ``[in, out]``, ``[height, width, in, out]``.
      inputs: ``float32[batch, …]`` or ``int32[batch, length]``; the GLOBAL batch.
      labels: ``int32[batch]`` or ``int32[batch, length]``.
    """

    name: str
    title: str
    initial: Mapping[str, Array]
    inputs: Array
    labels: Array

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(value.size for value in self.initial.values())

    def rows(self, replica: int, replicas: int) -> tuple[Array, Array]:
        """One replica's slice of the batch."""
        share = len(self.inputs) // replicas
        mine = slice(replica * share, (replica + 1) * share)
        return self.inputs[mine], self.labels[mine]


# --- the MLP --------------------------------------------------------------------------------------------

MLP_SIZES = (IMAGE * IMAGE, 512, 512, CLASSES)


def mlp() -> Problem:
    """784-512-512-10 with ReLU, batch 128."""
    rng = np.random.default_rng(0)
    initial: dict[str, Array] = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(MLP_SIZES)):
        initial[f"dense{i}.kernel"] = _kernel(rng, n_in, n_out)
        initial[f"dense{i}.bias"] = np.zeros(n_out, np.float32)
    inputs = rng.normal(size=(128, MLP_SIZES[0])).astype(np.float32)
    return Problem("mlp", "MLP 784-512-512-10", initial, inputs, _labels(rng, 128))


# --- the CNN --------------------------------------------------------------------------------------------

CNN_CHANNELS = (1, 32, 64)
CNN_HIDDEN = 128


def cnn() -> Problem:
    """Two layers of 3×3 convolutions (32 and 64 channels), ReLU and 2×2 max-pooling, 128 hidden units; batch 64."""
    rng = np.random.default_rng(1)
    initial: dict[str, Array] = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(CNN_CHANNELS)):
        initial[f"conv{i}.kernel"] = _kernel(rng, 3, 3, n_in, n_out)
        initial[f"conv{i}.bias"] = np.zeros(n_out, np.float32)
    flat = (IMAGE // 4) ** 2 * CNN_CHANNELS[-1]
    for i, (n_in, n_out) in enumerate(((flat, CNN_HIDDEN), (CNN_HIDDEN, CLASSES))):
        initial[f"dense{i}.kernel"] = _kernel(rng, n_in, n_out)
        initial[f"dense{i}.bias"] = np.zeros(n_out, np.float32)
    inputs = rng.normal(size=(64, IMAGE, IMAGE, 1)).astype(np.float32)
    return Problem("cnn", "CNN of 28×28 images", initial, inputs, _labels(rng, 64))


# --- the transformer ------------------------------------------------------------------------------------

VOCABULARY = 256
LENGTH = 64
WIDTH = 128
HEADS = 4
HEAD = WIDTH // HEADS
HIDDEN = 4 * WIDTH
LAYERS = 2


def transformer() -> Problem:
    """A language model: 2 layers of width 128, 4 heads, pre-norm, causal; 16 texts of 64 tokens out of 256."""
    rng = np.random.default_rng(2)
    initial: dict[str, Array] = {
        "tokens": rng.normal(0, WIDTH**-0.5, (VOCABULARY, WIDTH)).astype(np.float32),
        "positions": rng.normal(0, WIDTH**-0.5, (LENGTH, WIDTH)).astype(np.float32),
    }
    for i in range(LAYERS):
        initial |= _norm(f"{i}.norm0")
        for name in ("query", "key", "value"):
            initial[f"{i}.{name}"] = _kernel(rng, WIDTH, WIDTH).reshape(WIDTH, HEADS, HEAD)
        initial[f"{i}.out"] = _kernel(rng, WIDTH, WIDTH).reshape(HEADS, HEAD, WIDTH)
        initial |= _norm(f"{i}.norm1")
        initial[f"{i}.up.kernel"] = _kernel(rng, WIDTH, HIDDEN)
        initial[f"{i}.up.bias"] = np.zeros(HIDDEN, np.float32)
        initial[f"{i}.down.kernel"] = _kernel(rng, HIDDEN, WIDTH)
        initial[f"{i}.down.bias"] = np.zeros(WIDTH, np.float32)
    initial |= _norm("norm")
    initial["head"] = _kernel(rng, WIDTH, VOCABULARY)
    texts = rng.integers(VOCABULARY, size=(16, LENGTH + 1)).astype(np.int32)
    return Problem("transformer", "transformer, 2 × 128", initial, texts[:, :-1], np.ascontiguousarray(texts[:, 1:]))


# --- all ------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], Problem]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


@functools.cache
def problem(name: str) -> Problem:
    """The problem of that name."""
    return MAKERS[name]()


def _kernel(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32)


def _norm(name: str) -> dict[str, Array]:
    return {f"{name}.scale": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}


def _labels(rng: np.random.Generator, count: int) -> Array:
    return rng.integers(CLASSES, size=count).astype(np.int32)
