"""For ``test_fine_tune.py``: checkpoints, and what plain JAX on one device computes with them."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.workers_safetensors import written

WIDTH, HIDDEN, WORDS = 16, 24, 40
SAID: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": HIDDEN,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500.0, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": WORDS, "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": 2, "n_head": 4,
        "n_positions": 12, "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip
"""What their ``config.json`` says."""


def tensors_of(kind: str) -> dict[str, Any]:
    """Random tensors, as the library of PyTorch has them."""
    shapes: dict[str, tuple[int, ...]] = {}
    if kind == "llama":
        shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (WORDS, WIDTH))
        for layer in ("model.layers.0.", "model.layers.1."):
            shapes |= {f"{layer}self_attn.{n}_proj.weight": (WIDTH if n in "qo" else 8, WIDTH) for n in "qkvo"}
            shapes |= {f"{layer}mlp.{n}_proj.weight": (HIDDEN, WIDTH) for n in ("gate", "up")}
            shapes |= {f"{layer}mlp.down_proj.weight": (WIDTH, HIDDEN)}
            shapes |= {f"{layer}{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
        shapes["model.norm.weight"] = (WIDTH,)
    else:
        shapes |= {"transformer.wte.weight": (WORDS, WIDTH), "transformer.wpe.weight": (12, WIDTH)}
        sizes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
        sizes |= {"mlp.c_fc": (WIDTH, HIDDEN), "mlp.c_proj": (HIDDEN, WIDTH)}
        for layer in ("transformer.h.0.", "transformer.h.1."):
            for name, (rows, columns) in sizes.items():
                shapes |= {f"{layer}{name}.weight": (rows, columns), f"{layer}{name}.bias": (columns,)}
            shapes |= {f"{layer}{n}.{part}": (WIDTH,) for n in ("ln_1", "ln_2") for part in ("weight", "bias")}
        shapes |= {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    rng = np.random.default_rng(0)
    return {name: rng.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}


def published(kind: str, folder: pathlib.Path) -> dict[str, Any]:
    """The tensors of a checkpoint in several files that this writes."""
    tensors = tensors_of(kind)
    written(tensors, folder, 3000)
    (folder / "config.json").write_text(json.dumps(SAID[kind]))
    return tensors


# --- the models, in plain JAX -------------------------------------------------------------------------------------


def attention(query: Any, key: Any, value: Any, heads: int) -> Any:
    """Of ``[texts, length, width]``; heads of keys and values are repeated for those of queries."""
    query, key, value = (x.reshape(*x.shape[:2], -1, WIDTH // heads) for x in (query, key, value))
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(WIDTH // heads)
    weights = jax.nn.softmax(jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*query.shape[:2], WIDTH)


def turned(x: Any, heads: int) -> Any:
    """Rotary embeddings, as products of complex numbers."""
    x = x.reshape(*x.shape[:2], heads, -1)
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None, None] * 500.0 ** (-np.arange(half) / half)
    y = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles.astype(np.float32))
    return jnp.concatenate([y.real, y.imag], axis=-1).reshape(*x.shape[:2], -1)


def llama(t: dict[str, Any], words: Any) -> Any:
    """Logits, ``[texts, length, words]``."""

    def norm(x: Any, name: str) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * t[name]

    x = t["model.embed_tokens.weight"][words]
    for at in ("model.layers.0.", "model.layers.1."):
        y = norm(x, f"{at}input_layernorm.weight")
        query, key, value = (y @ t[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        x = x + attention(turned(query, 4), turned(key, 2), value, 4) @ t[f"{at}self_attn.o_proj.weight"].T
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (y @ t[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + jnp.exp(-gate)) * up) @ t[f"{at}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ t["lm_head.weight"].T


def gpt2(t: dict[str, Any], words: Any) -> Any:
    """Logits, ``[texts, length, words]``."""

    def norm(x: Any, name: str) -> Any:
        y = x - x.mean(-1, keepdims=True)
        return y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["transformer.wte.weight"][words] + t["transformer.wpe.weight"][: words.shape[1]]
    for at in ("transformer.h.0.", "transformer.h.1."):
        parts = jnp.split(linear(norm(x, f"{at}ln_1"), f"{at}attn.c_attn"), 3, axis=-1)
        x = x + linear(attention(*parts, 4), f"{at}attn.c_proj")
        y = linear(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc")
        y = 0.5 * y * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{at}mlp.c_proj")
    return norm(x, "transformer.ln_f") @ t["transformer.wte.weight"].T


PLAIN = {"llama": llama, "gpt2": gpt2}
