"""Fine-tuning by LoRA computes what plain JAX does on one device: before, while it learns, and after it is saved."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import replicax
from examples import fine_tune
from examples.fine_tune import Config, FineTuning
from tests.examples.fine_tune_models import PLAIN, SAID, WORDS, published
from tests.models.workers_safetensors import written
from tests.programs.programs import third_party

RATE, STEPS = 0.05, 3


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def texts(seed: int, count: int = 8, length: int = 10) -> Any:
    return np.random.default_rng(seed).integers(WORDS, size=(count, length), dtype=np.int32)


def tuning_on(strategy: replicax.Strategy, folder: pathlib.Path, **options: Any) -> FineTuning:
    with strategy.scope():
        tuning = FineTuning(Config.read(folder), strategy.extended.num_logical_devices, rank=2, **options)
    tuning.load(folder)
    return tuning


def logits_of(strategy: replicax.Strategy, tuning: FineTuning, words: Any) -> Any:
    [batch] = strategy.distribute_dataset([words])
    return strategy.gather(strategy.run(tuning.logits, args=(batch,)), 0)


def learnt(kind: str, tensors: dict[str, Any], adapters: Any) -> dict[str, Any]:
    """The tensors with A B added."""
    tensors = dict(tensors)
    for layer, adapter in adapters["blocks"].items():
        name = fine_tune.NAMES[kind][f"blocks/{layer}/kernel"]
        for number, (a, b) in enumerate(zip(adapter["lora"]["lora_a"], adapter["lora"]["lora_b"], strict=True)):
            product = jnp.dot(a, b, precision="highest")
            at = getattr(name, "name", name).replace("{}", str(number))
            tensors[at] = tensors[at] + (product if isinstance(name, str) else product.T)
    return tensors


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.soak)])
@third_party
def test_sharded_and_tensor_parallel_it_is_what_plain_jax_computes(kind: str, tmp_path: pathlib.Path) -> None:
    tensors = published(kind, tmp_path / "published")
    strategy = replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)], num_logical_devices=2)
    tuning = tuning_on(strategy, tmp_path / "published", dtype=jnp.float32, learning_rate=RATE)
    words, plain = texts(0), jax.jit(PLAIN[kind])
    assert_close(logits_of(strategy, tuning, words), plain(tensors, words))

    adapters, rule = jax.device_get(replicax.as_arrays(tuning.adapters)), optax.adam(RATE)
    slots, tensors = jax.jit(rule.init)(adapters), jax.tree.map(jnp.asarray, tensors)

    @jax.jit
    def plain_step(adapters: Any, slots: Any, text: Any) -> Any:
        def loss_fn(adapters: Any) -> Any:
            logits = PLAIN[kind](learnt(kind, tensors, adapters), text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(adapters)
        updates, slots = rule.update(gradients, slots)
        return loss, optax.apply_updates(adapters, updates), slots

    for text in strategy.distribute_dataset([texts(step) for step in range(STEPS)]):
        loss = strategy.reduce("sum", strategy.run(tuning.train_step, args=(text,)))
        expected, adapters, slots = plain_step(adapters, slots, np.asarray(strategy.gather(text, 0)))
        assert_close(loss, expected)
    for ours, theirs in zip(
        jax.tree.leaves(replicax.as_arrays(tuning.adapters)), jax.tree.leaves(adapters), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)  # Adam divides by small gradients

    adapters = replicax.as_arrays(tuning.adapters)
    strategy.run(tuning.merge)
    tuning.save(tmp_path / "tuned", tmp_path / "published")
    found = load_file(tmp_path / "tuned" / "model.safetensors")
    expected = jax.jit(functools.partial(learnt, kind))(tensors, adapters)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert_close(tensor, expected[name])
    assert sum(not np.array_equal(found[name], tensors[name]) for name in found) == {"llama": 8, "gpt2": 4}[kind]
    assert_close(logits_of(strategy, tuning, words), plain(found, words))
    assert json.loads((tmp_path / "tuned" / "config.json").read_text()) == SAID[kind]


@third_party
def test_gpt2_as_it_was_published(tmp_path: pathlib.Path) -> None:
    tensors = published("gpt2", tmp_path / "named")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    written({**old, "h.0.attn.bias": np.zeros((1, 1, 12, 12), np.float32)}, tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(SAID["gpt2"]))
    strategy = replicax.OneDeviceStrategy("cpu:0")
    tuning = tuning_on(strategy, tmp_path / "old", dtype=jnp.float32)
    assert_close(logits_of(strategy, tuning, texts(0)), jax.jit(PLAIN["gpt2"])(tensors, texts(0)))


@pytest.mark.soak
@third_party
def test_the_program_without_arguments_learns_in_bfloat16(tmp_path: pathlib.Path, capsys: Any) -> None:
    out = tmp_path / "tuned"
    fine_tune.main(["--out", str(out), "--steps", "40", "--length", "32", "--learning-rate", "0.01"])
    first, last = (float(line.split()[5]) for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert last < first
    assert (tmp_path / "random" / "model.safetensors.index.json").exists()
    before = {k: v for file in (tmp_path / "random").glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(out / "model.safetensors")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qkvo"}
    with pytest.raises(SystemExit):
        fine_tune.main(["--out", str(out)])
    assert "has weights already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "bert"}, "config.json: its model_type is 'bert'; this program has 'llama' and 'gpt2'"),
        ({"attention_bias": True}, "no biases in Llamas"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "no rotary embeddings of type 'yarn'"),
        ({"num_hidden_layers": 3}, r"no model.layers.2.input_layernorm.weight, for blocks/norm1/scale"),
        (
            {"intermediate_size": 32},
            r"gate/kernel, float32\[2,16,32\]: .*gate_proj.weight in model-.* is float32\[24,16\]",
        ),
    ],
)
@third_party
def test_a_checkpoint_of_another_kind(said: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    published("llama", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SAID["llama"] | said))
    with pytest.raises(ValueError, match=message):
        tuning_on(replicax.OneDeviceStrategy("cpu:0"), tmp_path)


@third_party
def test_a_damaged_checkpoint(tmp_path: pathlib.Path) -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")
    tensors = published("llama", tmp_path / "several")
    file = sorted((tmp_path / "several").glob("model-*.safetensors"))[-1]
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"index.json names the file {file.name}, with .*, which is not there"):
        tuning_on(strategy, tmp_path / "several")
    written(tensors, tmp_path / "one")
    (tmp_path / "one" / "config.json").write_text(json.dumps(SAID["llama"]))
    (tmp_path / "one" / "model.safetensors").write_bytes((tmp_path / "one" / "model.safetensors").read_bytes()[:500])
    with pytest.raises(replicax.errors.CheckpointError, match=r"model.safetensors is no safetensors file, or damaged"):
        tuning_on(strategy, tmp_path / "one")


@pytest.mark.soak  # other models are planned in tests/planning, test_experts.py and test_ring_attention.py
@third_party
def test_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Config("llama", 512, 256, 3, 2, 2, 512, 1e-5, False, dtype="bfloat16")
    monkeypatch.setitem(fine_tune.SIZES, "1b", small)
    resolver = replicax.TPUClusterResolver(topology="v5e:2x4")
    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[1, 2, 1, 1], num_replicas=4)
    partitioner = replicax.variables.FixedShardsPartitioner(4)
    strategy = replicax.TPUStrategy(resolver, assignment, variable_partitioner=partitioner)
    plan = replicax.plan(strategy, *fine_tune.plan(strategy, "1b", length=256))
    assert plan.fits
    assert {c.kind for c in plan.collectives} >= {"all-gather", "all-reduce"}
