"""``transformers`` and the example of fine-tuning load what the other has saved, and compute the same logits."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import replicax
from examples import fine_tune
from examples.fine_tune import Config, FineTuning

LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED |= {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama 3.2": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**LLAMA, "tie_word_embeddings": True, "rope_parameters": STRETCHED})
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1)
    ),
}
WORDS = np.random.default_rng(0).integers(96, size=(8, 40), dtype=np.int32)


def published(name: str, folder: pathlib.Path) -> Any:
    """The logits of a small random model, which is saved in several files."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return said(model)


def said(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return model(torch.tensor(WORDS, dtype=torch.long)).logits.float().numpy()


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_before_and_after(name: str, tmp_path: pathlib.Path) -> None:
    before = published(name, tmp_path / "published")
    strategy = replicax.ShardedStrategy(num_logical_devices=2)
    with strategy.scope():
        tuning = FineTuning(Config.read(tmp_path / "published"), 2, dtype=jnp.float32, learning_rate=0.05)
    tuning.load(tmp_path / "published")
    [words] = strategy.distribute_dataset([WORDS])

    def logits() -> Any:
        return strategy.gather(strategy.run(tuning.logits, args=(words,)), 0)

    assert_close(logits(), before)
    for _ in range(3):
        strategy.run(tuning.train_step, args=(words,))
    learnt = logits()
    assert np.abs(learnt - before).max() > 0.05
    strategy.run(tuning.merge)
    tuning.save(tmp_path / "tuned", tmp_path / "published")
    assert_close(logits(), learnt)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert_close(said(model), learnt)


def test_gpt2_without_a_head_has_names_without_a_prefix(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    model.transformer.save_pretrained(tmp_path)
    strategy = replicax.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        tuning = FineTuning(Config.read(tmp_path), dtype=jnp.float32)
    tuning.load(tmp_path)
    assert_close(strategy.run(tuning.logits, args=(WORDS,)), said(model))


def test_the_whole_program_in_bfloat16(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "published", max_shard_size="20KB")
    np.save(tmp_path / "tokens.npy", np.tile(WORDS.reshape(-1), 8))
    arguments = {"checkpoint": "published", "tokens": "tokens.npy", "out": "tuned"}
    options = [word for name, file in arguments.items() for word in (f"--{name}", str(tmp_path / file))]
    fine_tune.main(
        [*options, "--parts", "2", "--length", "39", "--batch", "8", "--steps", "20", "--learning-rate", "0.01"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="auto")
    assert model.dtype == torch.bfloat16
    published = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype="auto")

    def loss(model: Any) -> float:
        with torch.no_grad():
            words = torch.tensor(WORDS, dtype=torch.long)
            return float(model(words, labels=words).loss)

    assert loss(model) < loss(published)
