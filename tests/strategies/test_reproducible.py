"""The same bits on any number of devices: sums over replicas in a fixed order."""

from __future__ import annotations

import functools
import os
import pathlib
import platform
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax
from replicax import REPLICA_AXIS
from replicax.extended import reproducibility
from replicax.variables.partitioners import over_all
from tests import processes
from tests.soaking import soak_except
from tests.strategies import workers_reproducible
from tests.strategies.workers_reproducible import Training, on_devices


def reference(terms: list[Any]) -> Any:
    """The sum in pairs of neighbours, as NumPy does it."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, terms[-1]] if len(terms) % 2 else pairs
    return terms[0]


def sums(x: jax.Array) -> Any:
    replica = replicax.get_replica_context()
    assert replica is not None
    n = lax.axis_size(REPLICA_AXIS)
    ring = replicax.CommunicationOptions(implementation="ring", bytes_per_pack=16, timeout_seconds=60.0)

    def turn(total: Any, scale: Any) -> Any:  # a collective inside of a loop
        return total + lax.psum(x * scale + total, REPLICA_AXIS), None

    return {
        "sum": replica.all_reduce("sum", x),
        "mean": replica.all_reduce("mean", {"x": x * x, "half": x.astype(jnp.bfloat16), "none": x[:0]}, ring),
        "of jax": lax.psum(x, REPLICA_AXIS),
        "of one value": lax.psum(jnp.full(3, 0.1) / 3, REPLICA_AXIS),
        "of none": lax.psum(jnp.ones((0, 3)), REPLICA_AXIS),
        "used twice": (lax.psum(x, REPLICA_AXIS), x),
        "extremes": lax.pmax(x, REPLICA_AXIS),
        "part": lax.psum_scatter(jnp.outer(jnp.arange(n, dtype=x.dtype) + 1, x), REPLICA_AXIS),
        "parts": lax.psum_scatter(jnp.tile(x, n), REPLICA_AXIS, tiled=True),
        "in groups": lax.psum(x, REPLICA_AXIS, axis_index_groups=np.arange(n).reshape(2, -1).tolist()),
        "in a loop": lax.scan(turn, jnp.zeros_like(x), jnp.arange(3, dtype=x.dtype))[0],
        "counts": replica.all_reduce("sum", x > 0.5),
    }


@pytest.mark.parametrize(
    ("replicas", "devices"),
    [
        (8, [8, 2]),
        (5, [5, 1]),
        (24, [8, 2, 1]),
        pytest.param(12, [4, 2], marks=pytest.mark.soak),
        pytest.param(48, [4, 2, 1], marks=pytest.mark.soak),
    ],
)
def test_sums_have_the_same_bits(replicas: int, devices: list[int]) -> None:
    data = np.random.default_rng(0).normal(size=(replicas, 7)).astype(np.float32)
    # Sums in groups are for groups of one size.
    step = sums if replicas in (8, 12) else lambda x: lax.psum(x, REPLICA_AXIS)
    results = []
    for count in devices:
        strategy = on_devices(replicas, count)
        x = strategy.distribute_values_from_function(lambda ctx: data[ctx.replica_id_in_sync_group])
        found = strategy.run(step, args=(x,))
        results.append([np.asarray(v) for leaf in jax.tree.leaves(found) for v in strategy.local_results(leaf)])
    per_replica = len(results[0])
    for found in results[1:]:
        assert len(found) == per_replica
        for a, b in zip(found, results[0], strict=True):
            assert a.tobytes() == b.tobytes()
    whole = results[0][0] if step is not sums else strategy.run(lambda x: lax.psum(x, REPLICA_AXIS), args=(x,))
    assert np.asarray(whole).tobytes() == reference(list(data)).tobytes()


def test_bytes_are_those_of_a_ring() -> None:
    strategy = on_devices(8, 4)
    x = strategy.distribute_values_from_function(lambda ctx: np.ones(1024, np.float32))
    step = lambda x: replicax.get_replica_context().all_reduce("sum", [x, x * 2])  # noqa: E731
    found = strategy.extended.trace(step, args=(x,)).collectives()
    assert {c.kind: c.bytes for c in found} == {"all-to-all": 8192, "all-gather": 8192}


def test_a_norm_gathers_vectors_only() -> None:
    """Of what is in pieces each device adds up its own, up to the last dim."""
    strategy = on_devices(4, 4, split=True)
    with strategy.scope():
        w = replicax.Variable(np.ones((64, 512), np.float32), name="w")

    def step(x: jax.Array) -> Any:
        gradient = replicax.get_replica_context().all_reduce("sum", x)  # type: ignore[union-attr]
        w.assign_sub(gradient / jnp.linalg.norm(gradient))

    x = strategy.distribute_values_from_function(lambda ctx: np.ones((64, 512), np.float32))
    found = strategy.extended.trace(step, args=(x,)).collectives()
    assert [(c.kind, c.bytes) for c in found] == [("all-to-all", 64 * 512 * 4), ("all-gather", 512 * 4)]


def norms(strategy: replicax.Strategy, replicas: int) -> list[bytes]:
    """What is added up of large arrays that all replicas have alike, and what a clipped update makes of them."""
    generator = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            replicax.Variable(generator.normal(size=shape).astype(np.float32))
            for shape in [(40, 64), (17, 33), (3, 5, 48), (48, 49), (700,)]
        ]

    def step(x: jax.Array) -> Any:
        replica = replicax.get_replica_context()
        assert replica is not None
        gradients = replica.all_reduce("sum", [jnp.sin(x.sum() * w.value + x[0]) for w in weights])
        sums = [jnp.sum(g * g) for g in gradients]
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(g / jnp.sqrt(sum(sums)))
        by_rows = [jnp.mean(jnp.abs(g), axis=-1) for g in gradients]
        by_rows += [jnp.sum(w.value, axis) for w in weights for axis in (None, 0)]
        in_a_loop = lax.fori_loop(0, 3, lambda i, total: total + jnp.sum(gradients[0] * (i + total)), 0.0)
        return sums, by_rows, in_a_loop, jax.jit(jnp.linalg.norm)(gradients[1]), jnp.sum(gradients[2], axis=(0, 2))

    data = generator.normal(size=(replicas, 4)).astype(np.float32)
    x = strategy.distribute_values_from_function(lambda ctx: data[ctx.replica_id_in_sync_group])
    found = [np.asarray(leaf).tobytes() for _ in range(2) for leaf in jax.tree.leaves(strategy.run(step, args=(x,)))]
    return found + [w.numpy().tobytes() for w in weights]


@pytest.mark.parametrize(
    ("devices", "split"),
    [(2, True), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(4, True), (1, False)])],
)
def test_norms_have_the_same_bits(devices: int, split: bool) -> None:
    assert norms(on_devices(4, devices, split), 4) == norms(on_devices(4, 4), 4)


@functools.cache
def after_three_steps() -> list[bytes]:
    """The bits of a training of eight replicas on four devices."""
    return Training.of(on_devices(8, 4)).go(0, 3).bits()


OTHERS = {
    "split": lambda: on_devices(8, 2, split=True),
    "groups": lambda: replicax.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)],
        replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0)),
        num_replicas=8,
        reproducible=True,
    ),
    "central storage": lambda: replicax.CentralStorageStrategy(
        ["cpu:1", "cpu:2"], "cpu:0", num_replicas=8, reproducible=True
    ),
    "TPU": lambda: replicax.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2"), reproducible=True),
    "one device": lambda: replicax.OneDeviceStrategy("cpu:3", num_replicas=8, reproducible=True),
}


@pytest.mark.parametrize("name", soak_except(OTHERS, "split", "groups", "central storage"))
def test_other_strategies_have_the_same_bits(name: str) -> None:
    assert Training.of(OTHERS[name]()).go(0, 3).bits() == after_three_steps()


@pytest.mark.soak
def test_the_whole_grid() -> None:
    """Three models on 12 placements, and through five restarts, with the compiler that users have."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "reproducible.py"
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, script, "--bits"], env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("before", "after"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(1, 2), (4, 1), (2, 8)])]
)
def test_training_goes_on_elsewhere_with_the_same_bits(before: int, after: int, tmp_path: Any) -> None:
    Training.of(on_devices(8, before)).go(0, 1).checkpoint.save(tmp_path / "saved")
    goes_on = Training.of(on_devices(8, after), seed=1)
    goes_on.checkpoint.restore(tmp_path / "saved")
    assert goes_on.go(1, 3).bits() == after_three_steps()


def test_two_workers_have_the_same_bits_as_one() -> None:
    ours, theirs = processes.run(workers_reproducible.train_on_workers, workers=2, devices=1, timeout=100)
    assert ours == theirs == [after_three_steps()] * 2


def test_several_steps_in_one_call() -> None:
    at_once = Training.of(on_devices(8, 8))
    with jax.numpy_dtype_promotion("standard"):
        at_once.strategy.run_steps(lambda _, x, y: at_once.step(x, y), iter(at_once.data(0, 3)), 3)
    for found, expected in zip(at_once.variables, after_three_steps(), strict=True):
        one_by_one = np.frombuffer(expected, found.dtype).reshape(found.shape)
        np.testing.assert_allclose(found.numpy(), one_by_one, rtol=1e-5, atol=1e-6)


def test_sums_of_arrays_without_elements() -> None:
    strategy = on_devices(6, 2)
    empty = strategy.distribute_values_from_function(lambda ctx: np.ones((3, 0), np.float32))
    assert strategy.reduce("sum", empty).shape == (3, 0)
    assert strategy.reduce("mean", empty).shape == (3, 0)


def test_what_can_not_be_reproducible() -> None:
    with pytest.raises(ValueError, match=r"replicas of a device run one after the other, but 2 of them"):
        replicax.MirroredStrategy(["cpu:0"], num_replicas=4, replicas_at_once=2, reproducible=True)
    with pytest.raises(ValueError, match="each has 2 logical devices"):
        replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_logical_devices=2, reproducible=True)
    with pytest.raises(TypeError, match="reproducible must be True or False, got 1"):
        replicax.MirroredStrategy(["cpu:0"], reproducible=1)  # type: ignore[arg-type]


def test_strategies_see_to_what_the_promise_takes() -> None:
    """In a process with the compiler that users have."""
    program = """
import os, warnings, jax, numpy as np, replicax
warnings.simplefilter("error")
before = dict(os.environ)
jax.config.update("jax_platforms", "cuda")  # as where there are GPUs
for devices in ("cpu:0", [], ["gpu:0"], ["no device"], None):
    try:
        replicax.MirroredStrategy(devices, num_replicas=6, reproducible=True)
        print("was made from", devices)
    except (TypeError, ValueError, RuntimeError):
        assert os.environ == before, devices
replicax.use_cpu_devices(2)
strategy = replicax.MirroredStrategy(num_replicas=6, reproducible=True)
x = np.full(16, 1 + 2**-12, np.float32)
print(os.environ["NPROC"], strategy.run(lambda x, y: x * x - y, args=(x, x * x)).any())
"""
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=200)
    assert done.stdout == "12 False\n", done.stderr


@pytest.mark.parametrize(
    ("machine", "threads", "said"),
    [
        ("x86_64", 4, r"may differ in the last bit .* Set XLA_FLAGS=--xla_cpu_max_isa=AVX in the env"),
        ("arm64", 4, r"may differ in the last bit .*\(arm64\) can't be told"),
        ("x86_64", 6, r"XLA has 6 threads .* should have 4: .* may differ in the last bit .* Set NPROC=4"),
    ],
)
def test_a_weaker_promise_is_told(monkeypatch: pytest.MonkeyPatch, machine: str, threads: int, said: str) -> None:
    monkeypatch.setattr(reproducibility, "_rounds", lambda device: threads != 4)
    monkeypatch.setattr(reproducibility, "thread_limit", lambda: threads)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for warn in (reproducibility._warn_of_rounding, reproducibility._warn_of_threads):
        warn.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in "ab":
            replicax.MirroredStrategy(["cpu:0", "cpu:1"], reproducible=True)
    [warning] = told
    assert warning.category is replicax.errors.ReproducibilityWarning
    assert re.search(said, str(warning.message))
    assert warning.filename == __file__
    reproducibility._warn_of_rounding.cache_clear()
