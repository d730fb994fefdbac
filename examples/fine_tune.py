"""Fine-tune a published language model: Llama or GPT-2 in Hugging Face's layout, by LoRA, and save it again.

    python examples/fine_tune.py --devices 8 --parts 2
    replicax launch --workers 2 --devices-per-worker 4 examples/fine_tune.py --parts 2
    python examples/fine_tune.py --checkpoint Llama-3.2-1B --tokens tokens.npy --out runs/mine
    replicax plan examples/fine_tune.py --topology h100:1x8 --strategy sharded --with size=8b
    replicax plan examples/fine_tune.py --topology v5e:2x4 --strategy sharded --with size=1b

A checkpoint is a folder with ``config.json`` and safetensors, one file or several with an index. Its tensors are read
one by one, straight onto the devices: each weight is split over the replicas, and with ``--parts`` also over the
devices of each replica (tensor parallel). Neither a device nor the host ever has the whole model.

The weights stay as they are, in the dtype of the checkpoint. Each matrix W of attention has an adapter of two thin
matrices in float32, A and B, and only these learn: the layer computes x W + x A B (Hu et al., "LoRA"). At the end A B
is added to W, and ``transformers`` loads the folder that is saved. Products are computed in bfloat16.

Without ``--checkpoint`` a small Llama with random weights is made first, which learns the bytes of the Python standard
library's source code. For a published model give the numbers that its tokenizer makes of your text, as one array::

    np.save("tokens.npy", transformers.AutoTokenizer.from_pretrained("Llama-3.2-1B")(text)["input_ids"])
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import json
import math
import os
import pathlib
import shutil
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import SafetensorError, safe_open

import replicax
from replicax.models import safetensors
from replicax.models.safetensors import Transposed

TEXT = os.path.join(sysconfig.get_paths()["stdlib"], "[a-f]*.py")


@dataclasses.dataclass(frozen=True)
class Config:
    """What ``config.json`` says of a model."""

    kind: str  # "llama" or "gpt2"
    words: int
    width: int
    layers: int
    heads: int
    groups: int  # heads of keys, and of values; heads // groups heads of queries share each
    hidden: int
    epsilon: float  # of norms
    is_tied: bool = True  # the embedding is the last layer, too
    positions: int = 0  # GPT-2's: how many are learnt
    base: float = 10_000.0  # Llama's: of rotary embeddings,
    stretch: tuple[float, ...] = ()  # and how those of Llama 3.1 are stretched
    dtype: str = "float32"  # of the weights

    @classmethod
    def read(cls, folder):
        """That of a folder in Hugging Face's layout."""
        file = pathlib.Path(folder) / "config.json"
        return cls.of(json.loads(file.read_text()), file)

    @classmethod
    def of(cls, said, file):
        kind, dtype = said.get("model_type"), said.get("dtype") or said.get("torch_dtype") or "float32"
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        rule = rope.get("rope_type", "default")
        if kind not in ("llama", "gpt2"):
            raise ValueError(f"{file}: its model_type is {kind!r}; this program has 'llama' and 'gpt2'")
        if kind == "gpt2" and not said.get("tie_word_embeddings", True):
            raise ValueError(f"{file}: this program has no GPT-2 whose last layer is not its embedding")
        if rule not in ("default", "llama3") or said.get("attention_bias") or said.get("mlp_bias"):
            raise ValueError(f"{file}: this program has no biases in Llamas, and no rotary embeddings of type {rule!r}")
        if kind == "gpt2":
            shape = (said[name] for name in ("vocab_size", "n_embd", "n_layer", "n_head", "n_head"))
            hidden = said.get("n_inner") or 4 * said["n_embd"]
            return cls(kind, *shape, hidden, said["layer_norm_epsilon"], positions=said["n_positions"], dtype=dtype)
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        stretch = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return cls(
            kind,
            *(said[name] for name in (*names, "intermediate_size", "rms_norm_eps")),
            said.get("tie_word_embeddings", False),
            base=rope.get("rope_theta") or said.get("rope_theta", 10_000.0),
            stretch=tuple(rope[name] for name in stretch) if rule == "llama3" else (),
            dtype=dtype,
        )


SIZES = {  # what replicax plan takes: Llama 3.2 1B, Llama 3.1 8B and 70B
    "1b": Config("llama", 128_256, 2048, 16, 32, 8, 8192, 1e-5, base=5e5, dtype="bfloat16"),
    "8b": Config("llama", 128_256, 4096, 32, 32, 8, 14_336, 1e-5, False, base=5e5, dtype="bfloat16"),
    "70b": Config("llama", 128_256, 8192, 80, 64, 8, 28_672, 1e-5, False, base=5e5, dtype="bfloat16"),
}
SMALL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 128}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
SMALL |= {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False}

# Which tensor each array of the model is. PyTorch's linear layers are [out, in]; those of GPT-2 are [in, out].
LAYERS = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
LAYERS |= {"out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
LLAMA = {f"blocks/{ours}/kernel": Transposed(f"model.layers.{{}}.{name}.weight") for ours, name in LAYERS.items()}
LLAMA |= {
    "embed/embedding": "model.embed_tokens.weight",
    "blocks/norm1/scale": "model.layers.{}.input_layernorm.weight",
    "blocks/norm2/scale": "model.layers.{}.post_attention_layernorm.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": Transposed("lm_head.weight"),
}
LAYERS = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2 = {f"blocks/{ours}/kernel": f"transformer.h.{{}}.{name}.weight" for ours, name in LAYERS.items()}
GPT2 |= {f"blocks/{ours}/bias": f"transformer.h.{{}}.{name}.bias" for ours, name in LAYERS.items()}
GPT2 |= {
    "embed/embedding": "transformer.wte.weight",
    "positions/embedding": "transformer.wpe.weight",
    "blocks/norm1/scale": "transformer.h.{}.ln_1.weight",
    "blocks/norm1/bias": "transformer.h.{}.ln_1.bias",
    "blocks/norm2/scale": "transformer.h.{}.ln_2.weight",
    "blocks/norm2/bias": "transformer.h.{}.ln_2.bias",
    "norm/scale": "transformer.ln_f.weight",
    "norm/bias": "transformer.ln_f.bias",
}
NAMES = {"llama": LLAMA, "gpt2": GPT2}
# What some files have besides: masks, and the speeds of rotary embeddings.
IGNORED = ["h.{}.attn.bias", "h.{}.attn.masked_bias", "transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"]
IGNORED += ["model.layers.{}.self_attn.rotary_emb.inv_freq"]

# The dim of a layer's matrix that the devices of a replica share out: heads, hidden units, and the embedding's width.
# The columns of GPT-2's qkv are all queries, then keys, then values: they don't come apart by heads, so its rows do.
SPLIT = {"embed": 1, "positions": 1, "query": 1, "key": 1, "value": 1, "qkv": 0, "out": 0}
SPLIT |= {"gate": 1, "up": 1, "down": 0, "head": 1}


# --- the models -----------------------------------------------------------------------------------------------


def rotary(x, config):
    """Turn the pairs of numbers of each head, ``[texts, length, heads, head]``, by angles that grow with the place."""
    half = x.shape[-1] // 2
    speeds = config.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.stretch:  # pairs that turn slowly turn more slowly still
        factor, low, high, length = config.stretch
        kept = jnp.clip((length * speeds / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
        speeds = speeds * (kept + (1 - kept) / factor)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """A layer of either model: attention and an MLP, each after a norm and beside the values themselves."""

    def __init__(self, config, rank, options):
        width, head, is_gpt2 = config.width, config.width // config.heads, config.kind == "gpt2"
        linear = functools.partial(nnx.Linear, use_bias=is_gpt2, **options)
        adapted = functools.partial(
            nnx.LoRALinear, use_bias=is_gpt2, lora_rank=rank, lora_dtype=options["dtype"], **options
        )
        self.config = config
        self.norm1, self.norm2 = norm_of(config, options), norm_of(config, options)
        if is_gpt2:
            self.qkv = adapted(width, 3 * width)
        else:
            self.query = adapted(width, config.heads * head)
            self.key, self.value = (adapted(width, config.groups * head) for _ in range(2))
            self.gate = linear(width, config.hidden)
        self.out = adapted(width, width)
        self.up, self.down = linear(width, config.hidden), linear(config.hidden, width)

    def __call__(self, x):
        y = self.norm1(x)
        is_gpt2 = self.config.kind == "gpt2"
        parts = jnp.split(self.qkv(y), 3, axis=-1) if is_gpt2 else (self.query(y), self.key(y), self.value(y))
        head = self.config.width // self.config.heads
        query, key, value = (part.reshape(*x.shape[:2], -1, head) for part in parts)
        if not is_gpt2:
            query, key = rotary(query, self.config), rotary(key, self.config)
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nnx.gelu(self.up(y)) if is_gpt2 else nnx.silu(self.gate(y)) * self.up(y))


def norm_of(config, options):
    if config.kind == "gpt2":
        return nnx.LayerNorm(config.width, epsilon=config.epsilon, use_fast_variance=False, **options)
    return nnx.RMSNorm(config.width, epsilon=config.epsilon, **options)


class Decoder(nnx.Module):
    """Logits, in float32, of the word behind each of ``words``, ``[texts, length]``."""

    def __init__(self, config, rank, dtype, *, rngs):
        options = {"dtype": dtype, "param_dtype": config.dtype, "rngs": rngs}
        self.embed = nnx.Embed(config.words, config.width, **options)
        self.positions = nnx.Embed(config.positions, config.width, **options) if config.positions else None
        make = nnx.vmap(lambda rngs: Block(config, rank, options | {"rngs": rngs}))
        self.blocks = make(rngs.split(config.layers))  # one block, whose arrays are [layers, …]
        self.norm = norm_of(config, options)
        self.head = None if config.is_tied else nnx.Linear(config.width, config.words, use_bias=False, **options)

    def __call__(self, words):
        x = self.embed(words)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(words.shape[1]))
        layer = nnx.remat(lambda block, x: block(x))  # computed again in the backward pass
        x = self.norm(nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x))
        return (self.embed.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)


# --- fine-tuning: variables, which have a place, and steps ----------------------------------------------------


class FineTuning:
    """Frozen weights, and adapters. Make it in ``strategy.scope()``, which places what is made here.

    ``parts`` is the number of devices of a replica.
    """

    def __init__(self, config, parts=1, rank=8, dtype=jnp.bfloat16, learning_rate=1e-3):
        shapes = nnx.eval_shape(lambda: Decoder(config, rank, dtype, rngs=nnx.Rngs(0)))  # and no values
        self.config, self.names = config, NAMES[config.kind]
        self.graph, *states = nnx.split(shapes, nnx.LoRAParam, nnx.Param)
        make = functools.partial(variable, parts)
        self.adapters, self.weights = (
            jax.tree_util.tree_map_with_path(make, nnx.to_pure_dict(state)) for state in states
        )
        self.optimizer = replicax.Optimizer(optax.adam(learning_rate))

    def model(self, adapters):
        return nnx.merge(self.graph, adapters, replicax.as_arrays(self.weights))

    def logits(self, words):
        """A step: what the model says of this replica's words."""
        return self.model(replicax.as_arrays(self.adapters))(words)

    def train_step(self, text):
        """A step on this replica's texts, ``[texts, length + 1]``."""

        def loss_fn(adapters, text):
            logits = self.model(adapters)(text[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
            return replicax.compute_average_loss(losses.mean(-1))  # the share of the mean over the GLOBAL batch

        loss, gradients = replicax.value_and_grad(loss_fn, self.adapters)(self.adapters, text)
        self.optimizer.apply_gradients(gradients, self.adapters)
        return loss

    def merge(self):
        """A step: add A B to each W. The adapters then add nothing."""
        for layer, adapter in self.adapters["blocks"].items():
            a, b = adapter["lora"]["lora_a"], adapter["lora"]["lora_b"]
            w = self.weights["blocks"][layer]["kernel"]
            product = jnp.matmul(a.value, b.value, precision="highest")
            w.assign((w.value + product).astype(w.dtype))
            b.assign(jnp.zeros_like(b.value))

    def load(self, folder):
        names = self.names
        if self.config.kind == "gpt2" and not any(name.startswith("transformer.") for name in names_in(folder)):
            names = {path: name.removeprefix("transformer.") for path, name in names.items()}  # as GPT-2 was published
        ignored = [*IGNORED, "lm_head.weight"] if self.config.is_tied else IGNORED
        safetensors.load(folder, self.weights, names, ignore=ignored, cast=True)

    def save(self, folder, source):
        """Write the weights; and what else the folder has that they come from: its config and tokenizer."""
        safetensors.save(folder, self.weights, self.names)
        if jax.process_index() == 0:
            for file in pathlib.Path(source).glob("*.*"):
                if file.suffix in (".json", ".model", ".txt") and "safetensors" not in file.name:
                    shutil.copy(file, folder)


def variable(parts, path, shape):
    """One parameter, from its shape. Where the rows of a layer are split, so are those of A; else the columns of B."""
    *place, name = (key.key for key in path)
    is_layer = place[0] == "blocks"  # an array of all layers
    dim, counts = SPLIT.get(place[is_layer]), [1] * len(shape.shape)
    if name in ("kernel", "embedding") or (name, dim) in (("lora_a", 0), ("lora_b", 1)):
        counts[dim + is_layer] = parts
    elif name == "bias" and dim == 1:
        counts[is_layer] = parts
    name = "/".join(map(str, [*place, name]))

    def initial():  # the frozen weights will be read; B begins with zeros
        if not name.endswith("lora_a"):
            return jnp.zeros(shape.shape, shape.dtype)
        key = jax.random.key(sum(name.encode()))
        return jax.nn.initializers.he_uniform(batch_axis=0)(key, shape.shape, shape.dtype)

    is_adapter, counts = "lora" in name, counts if parts > 1 and parts in counts else None
    return replicax.Variable(initial, name=name, trainable=is_adapter, partition_dimensions=counts)


def names_in(folder):
    """The names of a checkpoint's tensors; none if it is damaged, which ``safetensors.load`` reports."""
    index = pathlib.Path(folder, "model.safetensors.index.json")
    with contextlib.suppress(OSError, ValueError, KeyError, SafetensorError):
        if index.exists():
            return list(json.loads(index.read_text())["weight_map"])
        with safe_open(pathlib.Path(folder, "model.safetensors"), "np") as file:
            return list(file.keys())
    return []


def make_checkpoint(folder):
    """A checkpoint with random weights, in several files. All workers call it, and the chief writes."""
    config = Config.of(SMALL, "SMALL")
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SMALL, indent=2))
        for old in folder.glob("model*"):
            old.unlink()
    _, _, weights = nnx.split(Decoder(config, 1, None, rngs=nnx.Rngs(0)), nnx.LoRAParam, nnx.Param)
    safetensors.save(folder, weights, NAMES[config.kind], max_file_bytes=1 << 20)


def plan(strategy, size="8b", batch=1, length=2048, rank=16):
    """The step, and what one REPLICA of it takes: so many texts of so many words."""
    with strategy.scope():
        tuning = FineTuning(SIZES[size], strategy.extended.num_logical_devices, rank)
    return tuning.train_step, jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


def train(strategy, checkpoint, words, out, steps, batch=16, length=128, every=20, **options):
    """Load, train so many steps on texts of ``length``, merge and save. ``batch`` is the GLOBAL one."""
    with strategy.scope():
        tuning = FineTuning(Config.read(checkpoint), strategy.extended.num_logical_devices, **options)
    tuning.load(checkpoint)
    texts = words[: len(words) // (length + 1) * (length + 1)].astype(np.int32).reshape(-1, length + 1)
    dataset = strategy.make_numpy_dataset(texts).seed(0).shuffle().repeat().batch(batch)
    run = replicax.train(tuning.train_step, strategy.distribute_dataset(dataset), steps, log_every=every)
    strategy.run(tuning.merge)
    tuning.save(out, checkpoint)
    return run


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a folder with config.json and safetensors")
    parser.add_argument("--tokens", help="a .npy file with the numbers of the words to learn, one after the other")
    parser.add_argument("--out", default="runs/fine_tune/tuned", help="where the trained model is saved")
    parser.add_argument("--devices", type=int, help="so many emulated CPU devices; without it, those that are there")
    parser.add_argument("--parts", type=int, default=1, help="how many devices each replica is spread over")
    parser.add_argument("--rank", type=int, default=8, help="columns of A, and rows of B")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the products")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=128, help="words of a text")
    parser.add_argument("--batch", type=int, default=16, help="texts of a step, of all replicas together")
    parser.add_argument("--steps", type=int, default=200)
    args = vars(parser.parse_args(arguments))
    devices, parts, checkpoint, tokens = (args.pop(name) for name in ("devices", "parts", "checkpoint", "tokens"))
    if checkpoint and not tokens:
        parser.error("--checkpoint needs --tokens: the numbers that its tokenizer makes of a text")
    if list(pathlib.Path(args["out"]).glob("*.safetensors")):
        parser.error(f"--out: {args['out']} has weights already; name another folder, or remove them")
    if devices:
        replicax.use_cpu_devices(devices)
    strategy = replicax.ShardedStrategy(num_logical_devices=parts)  # with several workers, it connects them
    if not checkpoint:
        checkpoint = pathlib.Path(args["out"]).parent / "random"
        make_checkpoint(checkpoint)
    text = b"".join(pathlib.Path(name).read_bytes() for name in sorted(glob.glob(TEXT)))
    words = np.load(tokens) if tokens else np.frombuffer(text, np.uint8)
    train(strategy, checkpoint, words, **args)


if __name__ == "__main__":
    main()
