"""The core trains with the same numbers without the packages at the edge."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.system import registry
from tests.conftest import as_readers_have_it, strategy_of

TRAIN = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
import replicax

def train(strategy):
    rng = np.random.default_rng(0)
    initial = {
        "kernel": rng.normal(size=(3, 3, 2, 8)) / 4,
        "queries": rng.normal(size=(8, 2, 8)) / 3,
        "values": rng.normal(size=(8, 2, 8)) / 3,
        "small": rng.normal(size=(8,)),
    }
    with strategy.scope():
        params = replicax.as_variables({k: v.astype(np.float32) for k, v in initial.items()})
        optimizer = replicax.Optimizer(optax.adam(1e-2))

    def loss_fn(params, x):
        x = lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = lax.reduce_window(jnp.tanh(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1, 8) + params["small"]
        q, v = (jnp.einsum("btd,dhe->bthe", x, params[name]) for name in ("queries", "values"))
        x = jax.nn.dot_product_attention(q, q, v)
        return replicax.compute_average_loss(jnp.square(x).mean((1, 2, 3)))

    def step(x):
        loss, gradients = replicax.value_and_grad(loss_fn, params)(params, x)
        optimizer.apply_gradients(gradients, params)
        return loss

    batches = rng.normal(size=(5, 8, 8, 12, 2)).astype(np.float32)
    losses = []
    for batch in strategy.distribute_dataset(list(batches[:2])):
        losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)))))
    strategy.run_steps(lambda ctx, x: step(x), iter(strategy.distribute_dataset(list(batches[2:]))), 3)
    return losses + [float(np.abs(v.numpy()).sum()) for v in params.values()]
"""
MAIN = """
import json, sys
from replicax.system import registry

replicax.use_cpu_devices(2)

strategies = eval(sys.argv[1])
print(json.dumps([sorted(registry.backends()), [train(strategy) for strategy in strategies]]))
"""

SOURCE = pathlib.Path(replicax.__file__).parent
EDGES = (
    *("backends", "checks", "padding", "pipeline", "per_replica", "ragged", "shared_devices"),
    *("checkpoint", "cli", "compat", "launcher", "loop", "models", "parameter_server", "planning"),
)


def trained(path: pathlib.Path, strategies: str) -> tuple[list[str], list[list[float]]]:
    environment = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRAIN + MAIN, strategies]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    platforms, numbers = json.loads(done.stdout.splitlines()[-1])
    return platforms, numbers


def without(packages: Collection[pathlib.Path], path: pathlib.Path) -> pathlib.Path:
    """A copy of the library, in ``path``; of its compiled modules too, so that not all are compiled again."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        unfinished = {name for name in names if ".pyc." in name}  # another process writes it now, and renames it
        return unfinished | {package.name for package in packages if package.parent == pathlib.Path(folder)}

    shutil.copytree(SOURCE, path / "replicax", ignore=ignored)
    return path


@pytest.mark.filterwarnings("ignore")
def test_packages_at_the_edge_may_be_removed(tmp_path: pathlib.Path) -> None:
    """The backend of one platform, or all packages at the edge: the core looks for one only when a step needs it."""
    program: dict[str, Any] = {}
    exec(TRAIN, program)
    with as_readers_have_it():
        expected = program["train"](strategy_of(2))
    assert sorted(registry.backends()) == ["cpu", "gpu"]
    strategies = "[replicax.MirroredStrategy(num_replicas=4, reproducible=True)]"
    platforms, found = trained(without([SOURCE / "backends" / "cpu"], tmp_path / "no cpu"), strategies)
    assert platforms == ["gpu"]
    np.testing.assert_allclose(found, [expected], rtol=1e-4)
    strategies = "[replicax.ShardedStrategy()]"
    platforms, found = trained(without([SOURCE / package for package in EDGES], tmp_path / "no edges"), strategies)
    assert platforms == []
    np.testing.assert_allclose(found, [expected], rtol=1e-4)
