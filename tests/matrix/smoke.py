"""Whether an installed Replicax works, in a minute: ``python -I tests/matrix/smoke.py JAX_VERSION``, anywhere.

It trains on emulated devices, compiled and one replica at a time, saves and restores onto fewer replicas, and plans a
step. It takes nothing from a checkout.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
import tempfile

import jax
import numpy as np
import optax

import replicax


def main() -> None:
    """All of it; an assertion fails where something does not work."""
    assert jax.__version__ == sys.argv[1], jax.__version__
    folder = pathlib.Path(replicax.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not what was installed into {sys.prefix}"
    assert importlib.metadata.version("replicax") == replicax.__version__
    assert (folder / "py.typed").is_file()
    for name in replicax.__all__:
        getattr(replicax, name)

    replicax.use_cpu_devices(4)
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    data = (x, x @ np.array([1.0, -2.0, 3.0], np.float32))
    compiled, w, run = trained(replicax.MirroredStrategy(), data, steps=150)
    np.testing.assert_allclose(compiled, [1, -2, 3], atol=1e-2)
    with replicax.debug():
        one_by_one, *_ = trained(replicax.MirroredStrategy(), data, steps=3)
    np.testing.assert_allclose(one_by_one, trained(replicax.ShardedStrategy(), data, steps=3)[0], rtol=1e-5)

    with tempfile.TemporaryDirectory() as place:
        run.save(f"{place}/saved")
        strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            again = replicax.Variable(np.zeros(3, np.float32), name="w")
            optimizer = replicax.Optimizer(optax.adam(0.1))
        replicax.Checkpoint(w=again, optimizer=optimizer).restore(f"{place}/saved")
        np.testing.assert_array_equal(again.numpy(), w.numpy())
    found = replicax.plan(strategy, lambda x: (x * again).sum(), jax.ShapeDtypeStruct((8, 3), np.float32))
    assert found.replicas == 2
    print(f"replicax {replicax.__version__} works with jax {jax.__version__} on Python {sys.version.split()[0]}")


def trained(strategy, data, steps):
    """The parameters after so many steps; the variable, and what is saved."""
    with strategy.scope():
        w = replicax.Variable(np.zeros(3, np.float32), name="w")
        optimizer = replicax.Optimizer(optax.adam(0.1))

    def step(x, y):
        share, gradients = replicax.value_and_grad(lambda: replicax.compute_average_loss((x @ w - y) ** 2), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return share

    [batch] = strategy.distribute_dataset([data])
    for _ in range(steps):
        strategy.run(step, args=batch)
    return w.numpy(), w, replicax.Checkpoint(w=w, optimizer=optimizer)


if __name__ == "__main__":
    main()
