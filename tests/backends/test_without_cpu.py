"""Without the room for XLA's CPU backend, the library trains with the same numbers."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import replicax

STEP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
import replicax

replicax.use_cpu_devices(2)

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

strategies = [
    replicax.MirroredStrategy(),
    replicax.MirroredStrategy(reproducible=True),
    replicax.MirroredStrategy(num_replicas=4),
    replicax.ShardedStrategy(),
]
from replicax.execution.compiled import backend
print(json.dumps([sorted(backend._backends), [train(strategy) for strategy in strategies]]))
"""


@pytest.mark.filterwarnings("ignore")
def test_a_library_without_the_folder_trains_with_the_same_numbers(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(replicax.__file__).parent
    room = source / "execution" / "backends"
    shutil.copytree(
        source,
        tmp_path / "replicax",
        ignore=lambda folder, names: {"cpu"} if pathlib.Path(folder) == room else {"__pycache__"},
    )

    def trained(path: pathlib.Path) -> tuple[list[str], list[list[float]]]:
        environment = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        platforms, numbers = json.loads(done.stdout.splitlines()[-1])
        return platforms, numbers

    (platforms, expected), (fewer, found) = trained(source.parent), trained(tmp_path)
    assert platforms == ["cpu", "gpu"]
    assert fewer == ["gpu"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_allclose(found, [found[0]] * 4, rtol=1e-4)
