"""`make peers` compares what is the same: the models' definitions, the checks, and the page that it writes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.peers import measuring, report, roster
from benchmarks.peers.libraries import jax_models, on_nnx
from benchmarks.peers.problems import MAKERS, Problem, problem
from benchmarks.peers.process import PeerFailedError, Side

MLP = problem("mlp")


def test_measuring_loads_none_of_the_libraries() -> None:
    libraries = {"jax", "flax", "keras", "tensorflow", "torch", "replicax"}
    code = (
        "import sys, benchmarks.peers.report, benchmarks.peers.threads, benchmarks.peers.side; "
        f"print(sorted({libraries} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=report.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", MAKERS)
def test_models_in_other_words_are_the_same(name: str) -> None:
    """The functions that Replicax and the hand-written programs share, and a model of Flax NNX: loss and gradients."""
    case = problem(name)
    inputs, labels = case.rows(1, 8)
    model = on_nnx.MODELS[name](rngs=nnx.Rngs(0))
    on_nnx._set(model, case)
    graphdef, state = nnx.split(model)

    def by_nnx(state: Any) -> Any:
        logits = nnx.merge(graphdef, state)(inputs)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None].astype("int32"), -1)
        return -chosen.mean()

    def by_function(params: Any) -> Any:
        return jax_models.LOSSES[name](params, inputs, labels).mean()

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss, gradients = jax.jit(jax.value_and_grad(by_function))(dict(case.initial))
        others_loss, others = jax.jit(jax.value_and_grad(by_nnx))(state)
    np.testing.assert_allclose(loss, others_loss, rtol=1e-5)
    assert sum(x.size for x in jax.tree.leaves(others)) == case.parameters
    norms = [float(sum((x**2).sum() for x in jax.tree.leaves(tree))) for tree in (gradients, others)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


def test_pooling_by_hand_is_that_of_windows() -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype(np.float32)
    np.testing.assert_array_equal(jax_models.reshaped(x), jax_models.windowed(x))


def test_replicas_on_a_device_for_each_core_are_measured_where_there_are_more() -> None:
    on_two, on_eight = ({peer.name for peer in roster.taking_part(roster.PEERS, n)} for n in (2, 8))
    assert on_eight - on_two == {"replicax_shared"}
    assert on_eight == {peer.name for peer in roster.PEERS}


def test_slices_are_those_of_the_global_batch() -> None:
    for case in map(problem, MAKERS):
        inputs, labels = zip(*(case.rows(i, 8) for i in range(8)), strict=True)
        np.testing.assert_array_equal(np.concatenate(inputs), case.inputs)
        np.testing.assert_array_equal(np.concatenate(labels), case.labels)


def test_replicax_and_jax_by_hand_are_measured_and_agree() -> None:
    small = [peer for peer in roster.PEERS if peer.name in ("replicax", "jax")]
    effort = measuring.Effort(rounds=1, turns=2, seconds=0.01)
    found = measuring.measure(small, MLP, 2, {"replicax": "default", "jax": "1"}, effort, lambda what: None)
    assert found["parameters"] == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    for figures in found["peers"].values():
        assert figures["losses"]["10"] == pytest.approx(found["losses"]["10"], rel=measuring.TOLERANCE)
        assert figures["losses"]["10"] < 0.6 * figures["losses"]["1"]
        assert 0 < figures["first_s"] < figures["ten_s"]
        assert figures["peak_mb"] > 100
        assert len(figures["times_ms"]) == 2
    assert found["peers"]["jax"]["threads"] == "1"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"parameters": 7, "losses": {}}, "jax trains 7 parameters of mlp, expected 669,706"),
        ({"parameters": MLP.parameters, "losses": {"10": 1.5}}, r"at step 10 is 1\.500000, expected 1\.400000"),
    ],
)
def test_another_computation_is_an_error(found: dict[str, Any], message: str) -> None:
    with pytest.raises(measuring.AnotherComputationError, match=message):
        measuring.check(roster.BY_NAME["jax"], MLP, found, {"10": 1.4})


def test_a_peer_that_fails_is_named_with_what_it_said() -> None:
    broken = Problem("unknown", "", {}, MLP.inputs, MLP.labels)
    with pytest.raises(PeerFailedError, match=r"(?s)jax, unknown, 2 replicas.*KeyError: 'unknown'"):
        Side(roster.BY_NAME["jax"], broken, 2)


def figures(over: float) -> dict[str, Any]:
    return {
        "step_ms": 10 * over,
        "step_ms_95": [9 * over, 11 * over],
        "over_replicax": over,
        "over_replicax_95": [0.9 * over, 1.1 * over],
        "ready_s": 1.0,
        "ten_s": 2.5,
        "peak_mb": 1234.5,
        "proportional_mb": 600.0,
        "processes": 2 if over < 1 else 1,
    }


def test_the_page_says_who_is_ahead(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {"replicax": figures(1.0), "jax": figures(0.95), "torch": figures(0.5)}
    found = {"machine": {"cores": 2, "architecture": "x"}, "cases": [{"problem": "cnn", "replicas": 8, "peers": peers}]}
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, value in {"PAGE": page, "RESULTS": tmp_path / "p.json", "PICTURE": tmp_path / "p.svg"}.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    report.write(found)
    report.write(found)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| **Replicax, run** | 10.00 |") == 1
    assert "5.00 · 0.50× (0.45–0.55)" in text
    assert "3.5 s · 1,234 MB (shared pages once: 600)" in text
    [ahead] = list(report.ahead(found))
    assert ahead.startswith("PyTorch DDP, gloo is ahead with the cnn on 8 replicas: 0.50 of the time")
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_the_page_of_benchmarks_has_a_place_for_the_tables() -> None:
    page = report.PAGE.read_text()
    assert page.count(report.BEGIN) == page.count(report.END) == 1
