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
from benchmarks.peers.problems import MAKERS, problem

MLP = problem("mlp")


def test_measuring_loads_none_of_the_libraries() -> None:
    libraries = {"jax", "flax", "keras", "tensorflow", "torch", "replicax"}
    code = (
        "import sys, benchmarks.peers.report, benchmarks.peers.threads, benchmarks.peers.side; "
        f"print(sorted({libraries} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=report.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.soak
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


@pytest.mark.soak
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


def test_the_page_of_peers_has_a_place_for_the_tables() -> None:
    page = report.PAGE.read_text()
    assert page.count(report.BEGIN) == page.count(report.END) == 1
