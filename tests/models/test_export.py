"""Export: the file that plain JAX runs, in a process that has no Replicax."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import logical_strategy, strategy_of

STRATEGIES = {
    "mirrored": lambda: strategy_of(2),
    "sharded": lambda: replicax.ShardedStrategy(["cpu:0", "cpu:1"]),
    "logical": lambda: logical_strategy(2, 2),
}
SERVER = """
import sys
import jax, numpy as np
loaded = jax.export.deserialize(open(sys.argv[1], "rb").read())
found = loaded.call({"x": np.load(sys.argv[2])})
assert "replicax" not in sys.modules
assert len(jax.devices()) == 1
np.save(sys.argv[3], found["y"])
"""


@pytest.mark.parametrize(
    "name", ["sharded", *(pytest.param(name, marks=pytest.mark.soak) for name in ("mirrored", "logical"))]
)
def test_plain_jax_runs_the_file_without_replicax(name: str, tmp_path: pathlib.Path) -> None:
    strategy = STRATEGIES[name]()
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(4, 6)).astype(np.float32), "b": rng.normal(size=(1, 6)).astype(np.float32)}
    with strategy.scope():
        params = replicax.as_variables(weights)

    def predict(batch: Any) -> Any:
        return {"y": jnp.tanh(batch["x"] @ params["w"].value + params["b"].value)}

    spec = {"x": jax.ShapeDtypeStruct((8, 4), np.float32)}
    exported = replicax.models.export(predict, spec, tmp_path / "to" / "model.bin", any_batch=True)
    assert exported.nr_devices == 1
    x = rng.normal(size=(5, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    files = [tmp_path / "to" / "model.bin", tmp_path / "x.npy", tmp_path / "y.npy"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    subprocess.run([sys.executable, "-c", SERVER, *map(str, files)], check=True, env=environment, timeout=120)
    wanted = np.tanh(x @ weights["w"] + weights["b"])
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), wanted, rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["model.bin"]


def test_a_model_of_nnx_after_training_for_other_platforms(tmp_path: pathlib.Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(2)
    with strategy.scope():
        model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    strategy.run(lambda model, x: model(x).sum(), args=(model, x))
    spec = jax.ShapeDtypeStruct((4, 4), np.float32)
    predict = functools.partial(lambda model, x: model(x), model)
    exported = replicax.models.export(predict, spec, tmp_path / "model.bin", platforms=("cpu", "cuda", "tpu"))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    loaded = jax.export.deserialize(bytearray((tmp_path / "model.bin").read_bytes()))
    np.testing.assert_allclose(loaded.call(x), model(x), rtol=1e-5, atol=1e-6)
    model.layers[0].kernel[...] = jnp.zeros((4, 8))
    assert np.asarray(loaded.call(x)).any()  # it has the weights that there were


def test_a_step_for_logical_devices_is_exported_for_one_also_in_the_scope(tmp_path: pathlib.Path) -> None:
    strategy = logical_strategy(2, 2)

    def predict(x: Any) -> Any:
        parts = strategy.split_to_logical_devices(x @ w, [1, 2])
        whole = strategy.assign_to_logical_device(strategy.replicate_to_logical_devices(parts), 1)
        return replicax.get_replica_context().all_reduce("sum", whole)

    with strategy.scope():
        w = replicax.Variable(np.ones((4, 6), np.float32))
        exported = replicax.models.export(predict, np.zeros((2, 4), np.float32), tmp_path / "model.bin")
    assert exported.call(np.ones((2, 4), np.float32)).tolist() == [[4.0] * 6] * 2


def test_random_keys_are_weights_too(tmp_path: pathlib.Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(2)
    with strategy.scope():
        model, key = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), replicax.Variable(jax.random.key(1))
    strategy.run(lambda model: model(np.ones(2)), args=(model,))
    model.eval()

    def predict(model: Any, x: Any) -> Any:
        return model(x) + jax.random.normal(key.value, x.shape) + jax.random.normal(key.value, x.shape)

    spec = jax.ShapeDtypeStruct((3,), np.float32)
    exported = replicax.models.export(functools.partial(predict, model), spec, tmp_path / "model.bin")
    assert exported.nr_devices == 1
    wanted = 2 * np.asarray(jax.random.normal(jax.random.key(1), (3,)))
    np.testing.assert_allclose(exported.call(np.zeros(3, np.float32)), wanted, rtol=1e-6)


def test_a_random_key_as_an_argument(tmp_path: pathlib.Path) -> None:
    spec = jax.ShapeDtypeStruct((2, 3), np.float32), jax.eval_shape(lambda: jax.random.key(0))

    def step(x: Any, key: Any) -> Any:
        return x + jax.random.normal(key, (1, 3))

    exported = replicax.models.export(step, spec, tmp_path / "model.bin", any_batch=True)
    x, key = np.ones((5, 3), np.float32), jax.random.key(1)
    np.testing.assert_allclose(exported.call(x, key), step(x, key), rtol=1e-6)


def test_several_arguments_and_a_fixed_batch(tmp_path: pathlib.Path) -> None:
    spec = jax.ShapeDtypeStruct((2, 3), np.float32), np.zeros(2, np.int32)
    step = replicax.Variable(7)
    exported = replicax.models.export(lambda x, n: [x * 2.0, n, step], spec, tmp_path / "model.bin")
    doubled, counts, at = exported.call(np.ones((2, 3), np.float32), np.arange(2, dtype=np.int32))
    assert (float(doubled.sum()), counts.tolist(), int(at)) == (12.0, [0, 1], 7)
    with pytest.raises(ValueError, match="[Ss]hape"):
        exported.call(np.ones((3, 3), np.float32), np.arange(3, dtype=np.int32))
    spec = (*spec, jax.ShapeDtypeStruct((), np.float64))  # a number has no rows, and JAX no 64 bits
    fn = lambda x, n, k: x[:, 0] * k + n.astype(k.dtype)  # noqa: E731
    with jax.disable_jit():
        exported = replicax.models.export(fn, spec, tmp_path / "any.bin", any_batch=True)
    found = exported.call(np.ones((3, 3), np.float32), np.arange(3, dtype=np.int32), np.float32(2))
    assert found.tolist() == [2.0, 3.0, 4.0]


def test_a_model_that_nnx_sets_anew_to_the_same_values(tmp_path: pathlib.Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), np.ones((3, 2), np.float32)
    expected = model(x)
    for transform in (nnx.jit, nnx.remat):
        step = functools.partial(transform(lambda model, x: model(x)), model)
        exported = replicax.models.export(step, x, tmp_path / "model.bin", any_batch=True)
        np.testing.assert_allclose(exported.call(x), expected, rtol=1e-6)


def test_a_state_of_equinox_that_the_step_replaces(tmp_path: pathlib.Path) -> None:
    eqx = pytest.importorskip("equinox")
    index = eqx.nn.StateIndex(jnp.ones(2))
    step = functools.partial(lambda state, x: (state.get(index) * x, state.set(index, x))[0], eqx.nn.State(index))
    exported = replicax.models.export(step, jax.ShapeDtypeStruct((2,), np.float32), tmp_path / "model.bin")
    assert exported.call(np.float32([2, 3])).tolist() == [2.0, 3.0]


def test_what_is_no_prediction_is_told_and_no_file_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy_of(2).scope():
        v = replicax.Variable(1.0, name="v")
        own = replicax.Variable(1.0, name="own", synchronization="on_read", aggregation="sum")
    spec, path = jax.ShapeDtypeStruct((2,), np.float32), tmp_path / "model.bin"

    def export(step: Any, spec: Any = spec) -> None:
        replicax.models.export(step, spec, path)

    with pytest.raises(replicax.errors.TraceError, match="assigns variable 'v'.*changes nothing"):
        export(lambda x: v.assign(2.0))
    with pytest.raises(replicax.errors.TraceError, match="reads variable 'own'.*one replica: read it before, value"):
        export(lambda x: x * own)
    with pytest.raises(replicax.errors.TraceError, match="creates a variable"):
        export(lambda x: x * replicax.Variable(1.0))
    with pytest.raises(TypeError, match="returned 'cat'; an exported step returns arrays"):
        export(lambda x: {"class": "cat"})
    with pytest.raises(TypeError, match=r"jax.ShapeDtypeStruct\(shape, dtype\), got 8"):
        export(lambda x: x, 8)
    with pytest.raises(TypeError, match="got <Variable 'v'"):
        export(lambda x: x, v)
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(replicax.errors.TraceError, match=r"assigns a read-only array, as a model.*model\.eval\(\)"):
        export(functools.partial(lambda model, x: model(x), nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
    with pytest.raises(TypeError, match=r"platforms must be a list of names, as \['cuda'\], got a string"):
        replicax.models.export(lambda x: x, spec, path, platforms="cuda")
    with pytest.raises(TypeError, match="step must be callable"):
        export(3)
    with pytest.raises(replicax.errors.ContextError, match="inside a step"):
        replicax.get_strategy().run(lambda: export(lambda x: x))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'replicax\[export\]'"):
        export(lambda x: x)
    assert not list(tmp_path.iterdir())
