"""The language model: its parts are the published formulas, and it learns alike on every placement."""

from __future__ import annotations

import csv
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from examples import language_model
from examples.language_model import SIZES, Size
from tests.compiler import HURRIED
from tests.conftest import logical_strategy, strategy_of
from tests.launcher.launches import launched
from tests.soaking import soak_except

ROOT = pathlib.Path(__file__).parent.parent.parent
SMALL = Size(layers=2, width=16, heads=4, groups=2, hidden=24, words=32, length=12)
TEXTS, STEPS = 8, 3


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def parameters(size: Size) -> dict[str, jax.Array]:
    return {name: 0.3 * normal(*shape, seed=i) for i, (name, shape) in enumerate(language_model.shapes(size).items())}


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


# --- the parts ------------------------------------------------------------------------------------------


def test_rotary_embeddings_turn_complex_numbers() -> None:
    x = normal(2, 7, 3, 8)
    numbers = x[..., :4] + 1j * x[..., 4:]
    speeds = 10_000.0 ** (-np.arange(4) / 4)
    turned = numbers * np.exp(1j * np.arange(7)[:, None, None] * speeds)
    assert_close(language_model.rotary(x), np.concatenate([turned.real, turned.imag], axis=-1))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("queries", [512, 4])  # all at once; and two at a time, as four don't divide ten
def test_attention_is_full_attention_with_repeated_heads(monkeypatch, heads: int, groups: int, queries: int) -> None:
    monkeypatch.setattr(language_model, "QUERIES", queries)
    query, key, value = normal(2, 10, heads, 8), normal(2, 10, groups, 8, seed=1), normal(2, 10, groups, 8, seed=2)

    def full(query, key, value):
        key, value = (jnp.repeat(a, heads // groups, axis=2) for a in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(8)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((10, 10), bool)), scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    out = normal(2, 10, heads, 8, seed=3)

    def value_and_gradients(fn):
        return jax.jit(lambda *operands: (fn(*operands), jax.vjp(fn, *operands)[1](out)))(query, key, value)

    jax.tree.map(assert_close, value_and_gradients(language_model.attention), value_and_gradients(full))


def test_rms_norm() -> None:
    x, scale = normal(2, 5, 16), normal(16, seed=1)
    assert_close(language_model.rms_norm(x, scale), x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale)
    assert language_model.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16)).dtype == jnp.bfloat16


def test_swiglu() -> None:
    x, gate, up, down = normal(5, 16), normal(16, 24, seed=1), normal(16, 24, seed=2), normal(24, 16, seed=3)
    hidden = x @ gate
    expected = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    assert_close(language_model.swiglu(x, gate, up, down), expected, atol=1e-4)


def test_a_word_changes_nothing_before_it(monkeypatch) -> None:
    monkeypatch.setattr(language_model, "QUERIES", 5)
    weights, words = parameters(SMALL), np.arange(24).reshape(2, 12)
    changed = words.copy()
    changed[:, 7] += 1
    model = jax.jit(language_model.model)
    before, after = (model(weights, w) for w in (words, changed))
    assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert np.all(np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 1e-3)


@pytest.mark.parametrize(("size", "count"), [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)])
def test_as_many_parameters_as_llama_2(size: str, count: int) -> None:
    """Touvron et al., Llama 2, 2023: 32,000 words, and an embedding that is not the output's."""
    assert sum(map(math.prod, language_model.shapes(SIZES[size]).values())) == count


# --- training -------------------------------------------------------------------------------------------

PLACEMENTS = {
    "one device": lambda: replicax.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: strategy_of(4),
    "sharded": lambda: replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "spread": lambda: logical_strategy(2, 2),
    "all three": lambda: language_model.strategy_for("sharded", group=2, parts=2),
}


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[float], Any]:
    """The losses and the parameters of plain JAX and Optax on one device, from the same beginning."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        weights = parameters(SMALL)
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
        state = rule.init(weights)

        @jax.jit
        def step(weights, state, text):
            def loss_fn(weights):
                logits = language_model.model(weights, text[:, :-1])
                chances = jax.nn.log_softmax(logits)
                return -jnp.take_along_axis(chances, text[:, 1:, None], axis=-1).mean()

            loss, gradients = jax.value_and_grad(loss_fn)(weights)
            updates, state = rule.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state, loss

        losses = []
        for text in batches():
            weights, state, loss = step(weights, state, text)
            losses.append(float(loss))
        return losses, weights


def batches() -> np.ndarray:
    return np.random.default_rng(0).integers(SMALL.words, size=(STEPS, TEXTS, SMALL.length + 1)).astype(np.int32)


@pytest.mark.parametrize("placement", soak_except(PLACEMENTS, "all three"))
def test_every_placement_trains_as_plain_jax_does(by_hand, placement: str) -> None:
    strategy = PLACEMENTS[placement]()
    with strategy.scope():
        parts = strategy.extended.num_logical_devices
        checkpoint, _, step = language_model.build(SMALL, parts=parts, dtype=jnp.float32)
    for name, value in parameters(SMALL).items():
        checkpoint.model[name].assign(value)
    shares = [strategy.run(step, args=(text,)) for text in strategy.distribute_dataset(list(batches()))]
    losses = strategy.reduce("sum", shares) if strategy.num_replicas_in_sync > 1 else shares
    assert_close([float(loss) for loss in losses], by_hand[0])
    for name, expected in by_hand[1].items():
        assert_close(checkpoint.model[name].numpy(), expected, atol=1e-5)
    on_a_device = sum(v.stored().addressable_shards[0].data.size for v in checkpoint.model.values())
    whole = sum(v.size for v in checkpoint.model.values())
    parts_of = {"one device": 1, "mirrored": 1, "sharded": 4, "spread": 2, "all three": 4}[placement]
    assert whole / parts_of <= on_a_device < whole / parts_of + 300  # norms, and parts of less than 1 KiB


# The example, but for the size of its model.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from examples import language_model
language_model.SIZES["tiny"] = language_model.{SMALL}
language_model.main()
"""


@pytest.mark.soak
def test_the_command_lines_have_the_losses_of_one_device(monkeypatch, tmp_path: pathlib.Path) -> None:
    """Those of the docstring, for any number of devices and workers, data and fully sharded and tensor parallel."""
    monkeypatch.setitem(language_model.SIZES, "tiny", SMALL)
    few = f"--text {ROOT}/docs/r*.md --files 2 --steps 5 --every 2 --batch 8 --dtype float32".split()

    def curve(folder: str) -> np.ndarray:
        rows = csv.DictReader((tmp_path / folder / "train.csv").read_text().splitlines())
        return np.array([[float(row[name]) for name in ("step", "loss", "bits per word")] for row in rows])

    size, texts = SMALL, language_model.texts_in(few[1], 2, SMALL.length)
    one = replicax.OneDeviceStrategy("cpu:0")
    language_model.train(one, size, texts, tmp_path / "one", 5, 8, 2, dtype="float32", learning_rate=3e-3)
    expected = curve("one")
    assert expected[:, 0].tolist() == [2, 4, 5]

    lines = [line.split() for line in language_model.__doc__.splitlines() if line.startswith("    ")]
    _, all_three, launch, *plans = lines
    assert all_three[:2] == ["python", "examples/language_model.py"]
    assert launch[:2] == ["replicax", "launch"]
    assert all(words[:2] == ["replicax", "plan"] for words in plans)
    language_model.main([*all_three[2:], *few, "--folder", str(tmp_path / "all three")])
    assert_close(curve("all three"), expected)

    words = ["train.py" if word.startswith("examples/") else word for word in launch[2:]]
    done = launched(tmp_path, *words, *few, "--folder", str(tmp_path / "launched"), script=SCRIPT, **HURRIED)
    assert done.code == 0, done.stderr
    assert_close(curve("launched"), expected)


def test_a_group_of_what_is_not_split(capsys) -> None:
    with pytest.raises(SystemExit):
        language_model.main(["--strategy", "mirrored", "--group", "2"])
    assert "--group: with --strategy mirrored nothing is split" in capsys.readouterr().err


@pytest.mark.soak
def test_it_learns_from_real_text(tmp_path: pathlib.Path) -> None:
    size = Size(layers=2, width=32, heads=4, groups=2, hidden=64, words=256, length=48)
    texts = language_model.texts_in(str(ROOT / "docs" / "*.md"), 4, size.length)
    assert texts.shape[1] == size.length + 1
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    run = language_model.train(strategy, size, texts, tmp_path, 40, batch=16, learning_rate=1e-2)
    rows = list(csv.DictReader((tmp_path / "train.csv").read_text().splitlines()))
    bits = [float(row["bits per word"]) for row in rows]
    assert run.step == 40
    assert len(bits) == 2
    assert 8 > bits[0] > bits[1] + 0.5
