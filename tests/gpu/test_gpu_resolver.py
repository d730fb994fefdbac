"""Which GPUs there are: emulated ones, those that JAX finds, and errors where the compiler for them is missing."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import jax
import jaxlib.version
import numpy as np
import pytest

import replicax
from replicax import GPUClusterResolver
from replicax.gpu import gpu_resolver


def test_emulated() -> None:
    resolver = GPUClusterResolver(emulate="2x4")
    assert (resolver.kind, resolver.environment, resolver.model) == ("emulated", "emulated", None)
    assert (resolver.num_hosts, resolver.num_gpus_per_host) == (2, 4)
    assert resolver.devices.ravel().tolist() == jax.devices()[:8]
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")
    groups = replicax.variables.GroupPartitioner(resolver.num_gpus_per_host)
    strategy = replicax.MirroredStrategy(resolver.devices, variable_partitioner=groups)
    with strategy.scope():
        w = replicax.Variable(np.ones((512, 4), np.float32), name="w")
    strategy.run(lambda: w.assign_add(w * 2))
    assert strategy.local_results(w)[0].shape == (128, 4)
    np.testing.assert_array_equal(w.numpy(), np.full((512, 4), 3, np.float32))


def test_a_topology_can_be_emulated() -> None:
    resolver = GPUClusterResolver(emulate="h100:2x2")
    assert (resolver.model.name, resolver.devices.shape) == ("h100", (2, 2))
    assert repr(resolver) == "GPUClusterResolver(2 hosts x 2 h100, emulated)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2x4x2", r"expected hosts x GPUs of each, such as '2x4'"),
        (8, r"emulate must be a string such as '2x4', got 8"),
        ("h200x:8", r"no GPU is called 'h200x'; did you mean h200"),
    ],
)
def test_what_can_not_be_emulated(text, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPUClusterResolver(emulate=text)


def test_too_few_devices_to_emulate() -> None:
    with pytest.raises(RuntimeError, match=r"16 CPU devices to emulate, .* and 8 of them .*use_cpu_devices\(16\)"):
        GPUClusterResolver(emulate="2x8")


def test_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"give one of topology \(to plan\) and emulate"):
        GPUClusterResolver(topology="h100:8", emulate="1x8")


def test_there_is_no_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"there is no GPU: JAX has cpu:0.*topology='h100:8'.*emulate='1x8'"):
        GPUClusterResolver()


@pytest.mark.parametrize("failure", [RuntimeError("no plugin"), AssertionError()])
def test_no_devices_at_all(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fails(platform: str | None = None) -> Any:
        raise failure

    monkeypatch.setattr(jax, "devices", fails)
    said = rf"there is no GPU: JAX has no devices for jax_platforms='cpu' \({type(failure).__name__}.*emulate='1x8'"
    with pytest.raises(RuntimeError, match=said):
        GPUClusterResolver()
    assert GPUClusterResolver(emulate="2x4").devices.shape == (2, 4)  # as after a jax.devices() that failed


def test_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(counts):
        kind = "NVIDIA H100 80GB HBM3"
        return [SimpleNamespace(id=i, process_index=p, device_kind=kind) for p, n in counts.items() for i in range(n)]

    monkeypatch.setattr(jax, "devices", lambda platform: found({1: 4, 0: 4}))
    resolver = GPUClusterResolver()
    assert (resolver.kind, resolver.model.name, resolver.devices.shape) == ("attached", "h100", (2, 4))
    assert [d.process_index for d in resolver.devices[:, 0]] == [0, 1]
    monkeypatch.setattr(jax, "devices", lambda platform: found({0: 4, 1: 2}))
    with pytest.raises(ValueError, match="different numbers of GPUs: process 0 has 4, process 1 has 2"):
        GPUClusterResolver()


def test_workers() -> None:
    resolver = GPUClusterResolver(emulate="2x4")
    assert resolver.num_accelerators("worker", 1) == {"GPU": 4}
    with pytest.raises(ValueError, match="there is no worker 2: there are 2"):
        resolver.num_accelerators(task_id=2)
    with pytest.raises(ValueError, match="there is no job 'chief'"):
        resolver.num_accelerators("chief")


def test_tpu_strategies_are_for_tpus() -> None:
    with pytest.raises(TypeError, match=r"expected a TPUClusterResolver, .* For GPUs: MirroredStrategy\(reso"):
        replicax.TPUStrategy(GPUClusterResolver(emulate="1x8"))


# --- the compiler ---------------------------------------------------------------------------------------


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(RuntimeError, match=r"are not installed: pip install 'replicax\[gpu-plan\]'. Neither a GPU nor"):
        GPUClusterResolver(topology="h100:8")


def test_the_extra_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = jaxlib.version.__version__
    monkeypatch.setattr(importlib.metadata, "version", lambda name: ours if "plugin" in name else "0.1")
    with pytest.raises(RuntimeError, match=rf"of jaxlib's version: jaxlib is {ours}, and jax-cuda12-pjrt is 0.1"):
        GPUClusterResolver(topology="h100:8")


@pytest.mark.parametrize(
    ("name", "described"), [("h100:16x8", "16x1x8"), ("gb200:36x4", "2x18x4"), ("gb200:18x4", "1x18x4")]
)
def test_the_compiler_hears_of_domains_of_hosts(monkeypatch: pytest.MonkeyPatch, name: str, described: str) -> None:
    asked: list[str] = []

    def devices(target_config: str, topology: str) -> list[object]:
        asked.append(topology)
        return [object()] * int(np.prod([int(n) for n in topology.split("x")]))

    monkeypatch.setattr(gpu_resolver, "described_devices", devices)
    resolver = GPUClusterResolver(topology=name)
    assert asked == [described]
    assert resolver.devices.shape == (resolver.num_hosts, resolver.num_gpus_per_host)
