"""Every program of the corpus compiles for H100s, with the collectives of a golden table; ``make gpu`` runs this."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.gpu import golden
from tests.gpu.described import devices, needs_compiler
from tests.planning.test_planner import build
from tests.programs.programs import PROGRAMS, Program, bundles, third_party

pytestmark = [needs_compiler, pytest.mark.soak, pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")]

for _name in ("collectives", "derivatives", "libraries", "loops", "models", "nnx", "numerics", "optax", "random",
              "variables"):  # fmt: skip
    importlib.import_module(f"tests.programs.programs_{_name}")

CALL_THE_HOST = {"linear_systems", "roots_and_minima"}
"""Equinox' ``error_if`` calls the host when it is lowered, where no pass of ours sees it."""

APART = [p for p in PROGRAMS if p.theme == "libraries" or p.variables]
TOGETHER = bundles([p for p in PROGRAMS if p not in APART], 8)


def strategy_on(name: str = "h100:8", **arguments: Any) -> replicax.MirroredStrategy:
    return replicax.MirroredStrategy(devices(name), **arguments)


def check(name: str, plan: replicax.planning.Plan) -> None:
    """The plan's collectives are those of the table."""
    assert plan.platform == "gpu"
    golden.check(name, plan.collectives)


def described(value: Any) -> Any:
    array = np.asarray(value) if not hasattr(value, "dtype") else value
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.mark.parametrize("which", [*TOGETHER, *APART], ids=lambda p: p.name)
@third_party
def test_programs(which: Program) -> None:
    strategy = strategy_on("h100:4")  # some have dims that four replicas can share out, and eight can't
    shared = which.shared()
    if which.variables:
        with strategy.scope():
            shared = jax.tree.map(lambda x: replicax.Variable(jnp.asarray(x)), shared)
    element, given = jax.tree.map(described, which.data(0)), ()
    if shared and not which.variables:  # variables are closed over, as a step has them
        element, given = (element, shared), shared

    def step(element):
        return which.step(element[0], *element[1]) if given else which.step(element, *shared)

    if which.name in CALL_THE_HOST:
        with pytest.raises(replicax.errors.CompilationError, match="Unknown backend: 'gpu' requested"):
            replicax.plan(strategy, step, element)
    else:
        check(which.name, replicax.plan(strategy, step, element))


PLACEMENTS: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "split": {"variable_partitioner": replicax.variables.FixedShardsPartitioner(8)},
    "groups": {"variable_partitioner": replicax.variables.GroupPartitioner(4)},
    "logical devices": {"num_logical_devices": 2},
    "logical devices, groups": {
        "num_logical_devices": 2,
        "variable_partitioner": replicax.variables.GroupPartitioner(2),
    },
    "several replicas": {"num_replicas": 32},
    "several at once": {"num_replicas": 32, "replicas_at_once": 4},
    "several, split": {"num_replicas": 32, "variable_partitioner": replicax.variables.FixedShardsPartitioner(8)},
    "reproducible": {"reproducible": True},
    "reproducible, several": {"reproducible": True, "num_replicas": 32},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements(placement: str) -> None:
    strategy = strategy_on(**PLACEMENTS[placement])
    parts = PLACEMENTS[placement].get("num_logical_devices", 1)
    check(f"placement {placement}", replicax.plan(strategy, *build(strategy, parts=parts)))


@pytest.mark.parametrize("example", ["digits", "language_model"])
@third_party
def test_examples(example: str) -> None:
    strategy = strategy_on()
    keywords = {"size": "tiny"} if example == "language_model" else {}
    made = importlib.import_module(f"examples.{example}").plan(strategy, **keywords)
    check(f"example {example}", replicax.plan(strategy, *made))


def test_a_pipeline() -> None:
    strategy = strategy_on(num_logical_devices=2)
    with strategy.scope():
        first, last = (replicax.Variable(lambda: jnp.zeros((64, 64)), name=name) for name in ("first", "last"))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        def loss():
            h = strategy.assign_to_logical_device(jnp.tanh(x @ first), 0)
            return replicax.compute_average_loss(strategy.assign_to_logical_device((h @ last).sum(-1), 1))

        value, gradients = replicax.value_and_grad(loss, [first, last])()
        optimizer.apply_gradients(zip(gradients, [first, last], strict=True))
        return value

    plan = replicax.plan(strategy, step, jax.ShapeDtypeStruct((8, 64), jnp.float32))
    assert len(plan.stages) == 2
    check("pipeline", plan)
