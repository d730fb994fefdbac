from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from replicax import DeviceAssignment, Topology, TPUClusterResolver, _jax
from replicax.tpu.resolver import topology_of


@dataclass(eq=False)
class Chip:
    """What a TPU device says of itself."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    device_kind: str = "TPU v5 lite"
    slice_index: int = 0
    platform: str = field(default="tpu")


def chips(name: str, **changes) -> list[Chip]:
    """The devices of a slice, in an order that means nothing."""
    topology = Topology.from_name(name)
    found = [
        Chip(
            task * topology.num_tpus_per_task + ordinal,
            task,
            tuple(int(n) for n in topology.device_coordinates[task, ordinal, :3]),
            int(topology.device_coordinates[task, ordinal, 3]),
            **changes,
        )
        for task in range(topology.num_tasks)
        for ordinal in range(topology.num_tpus_per_task)
    ]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def run(code: str) -> str:
    """What ``code`` prints in a fresh Python, where JAX has no devices yet."""
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- emulated -------------------------------------------------------------------------------------------


def test_emulated_cores_are_cpu_devices() -> None:
    resolver = TPUClusterResolver(emulate="2x2x1x2")
    assert resolver.topology == Topology.of_chips((2, 2, 1), cores=2)
    assert resolver.devices.shape == (1, 8)
    assert resolver.devices[0].tolist() == jax.devices()
    assert resolver.environment == "emulated"
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {"TPU": 8}
    assert resolver.cluster_spec() == {}
    assert resolver.master() == resolver.get_master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.get_job_name()) == ("worker", 0, "worker")
    assert repr(resolver) == "TPUClusterResolver(Topology(2x2x1 chips of 2 devices, 1 host, no wrap-around), emulated)"


@pytest.mark.parametrize("emulate", ["v5e:2x4", Topology.from_name("v5e:2x4")])
def test_a_real_slice_emulated(emulate) -> None:
    resolver = TPUClusterResolver(emulate=emulate)
    assert resolver.topology == Topology.from_name("v5e:2x4")
    assert resolver.topology.num_tasks == 2
    assert [[d.id for d in row] for row in resolver.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_it_emulates_the_devices_itself() -> None:
    printed = run("""
        import replicax
        resolver = replicax.TPUClusterResolver(emulate="v3:2x2")
        strategy = replicax.TPUStrategy(resolver)
        ones = strategy.distribute_values_from_function(lambda ctx: 1)
        print(strategy.reduce("sum", ones), len(__import__("jax").devices()), __import__("os").environ["NPROC"])
    """)
    assert printed.split()[:2] == ["8", "8"]
    assert int(printed.split()[2]) >= 16


def test_too_few_devices() -> None:
    with pytest.raises(
        RuntimeError, match="takes 16 CPU devices, but .* and 8 of them are CPUs.*use_cpu_devices\\(16\\)"
    ):
        TPUClusterResolver(emulate="4x4x1x1")


@pytest.mark.parametrize("emulate", ["2x2", "2x2x1", "2x2x0x1", "2x2x1x2x1", "v3", "", 8])
def test_what_can_not_be_emulated(emulate) -> None:
    with pytest.raises(ValueError, match="emulate.*'2x2x1x2'"):
        TPUClusterResolver(emulate=emulate)


def test_several_emulated_slices() -> None:
    resolver = TPUClusterResolver(emulate="2x1x1x2", slices=2)
    assert (resolver.slices, resolver.topology.num_devices, resolver.devices.shape) == (2, 4, (2, 4))
    pairs = DeviceAssignment.build(resolver.topology, [1, 1, 2], num_replicas=None)
    numbers = [[d.id for d in replica] for replica in resolver.logical_devices(pairs)]
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]  # slice by slice
    assert repr(resolver).startswith("TPUClusterResolver(2 × Topology(2x1x1 chips of 2 devices, 1 host")
    assert resolver.num_accelerators("worker", 1) == {"TPU": 4}
    with pytest.raises(ValueError, match="no worker 2: there are 2"):
        resolver.num_accelerators("worker", 2)
    with pytest.raises(RuntimeError, match="^3 × Topology.* takes 12 CPU devices"):
        TPUClusterResolver(emulate="2x1x1x2", slices=3)


@pytest.mark.parametrize("slices", [0, -1, True, "2", 1.5])
def test_numbers_of_slices_that_can_not_be(slices) -> None:
    with pytest.raises(ValueError, match=f"slices must be an int of at least 1, got {slices!r}"):
        TPUClusterResolver(emulate="2x1x1x2", slices=slices)
    with pytest.raises(ValueError, match="slices must be at most 4,096, got 1,099,511,627,776"):
        TPUClusterResolver(topology="v4-8", slices=2**40)


def test_slices_that_are_there_are_found() -> None:
    with pytest.raises(ValueError, match="slices=2.*are found; leave slices out"):
        TPUClusterResolver(slices=2)


# --- real -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("v5e:4x4", "TPU v5 lite"), ("v3:4x4", "TPU v3"), ("v5p:4x4x4", "TPU v5"), ("v6e:8x16", "TPU v6 lite")],
)
def test_what_devices_say_of_themselves(name: str, kind: str) -> None:
    found = chips(name, device_kind=kind)
    topology, devices = topology_of(found)
    assert topology == Topology.from_name(name)
    assert topology.name == name
    for device in found:
        task = topology.task_ordinal_at_coordinates((*device.coords, device.core_on_chip))
        ordinal = topology.tpu_device_ordinal_at_coordinates((*device.coords, device.core_on_chip))
        assert task == device.process_index
        assert devices[task, ordinal] is device


def test_part_of_a_slice_and_an_unknown_kind() -> None:
    part = [d for d in chips("v5e:8x8", device_kind="TPU v99") if 4 <= d.coords[0] < 8 and d.coords[1] < 4]
    topology, devices = topology_of(part)
    assert topology.mesh_shape.tolist() == [4, 4, 1, 1]
    assert topology.num_tasks == 4
    assert topology.name is None
    assert not any(topology.torus.wrap)
    assert {d.process_index for d in devices[0]} == {min(d.process_index for d in part)}


def test_several_slices() -> None:
    one = chips("v5e:4x4")
    found = [replace(d, slice_index=s, process_index=4 * s + d.process_index) for s in (1, 0) for d in one]
    topology, devices = topology_of(found)
    assert topology == Topology.from_name("v5e:4x4")
    assert devices.shape == (8, 4)  # [slices * tasks, devices of a task]
    assert [[d.process_index for d in row] for row in devices] == [[task] * 4 for task in range(8)]
    assert [row[0].slice_index for row in devices] == [0] * 4 + [1] * 4
    assert [d.coords for d in devices[5]] == [d.coords for d in devices[1]]


def test_devices_that_make_no_topology() -> None:
    two = [*chips("v5e:2x2", slice_index=1), *chips("v5e:2x4", slice_index=3)]
    differ = "slices differ: slice 1 is Topology\\('v5e:2x2', .*, and slice 3 is Topology\\('v5e:2x4'.*of one shape"
    with pytest.raises(ValueError, match=differ):
        topology_of(two)
    with pytest.raises(ValueError, match="process 0 has 4, process 1 has 3"):
        topology_of([d for d in chips("v5e:2x4") if d.id != 7])
    with pytest.raises(ValueError, match="CpuDevice.* is not a TPU: it has no coordinates"):
        topology_of(jax.devices())


def test_the_tpus_that_jax_finds(monkeypatch) -> None:
    found = chips("v5e:4x4")
    monkeypatch.setattr(jax, "devices", lambda platform=None: found)
    monkeypatch.setattr(_jax, "tpu_cluster", lambda: ("google_cloud", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]))
    for resolver in (
        TPUClusterResolver(),
        TPUClusterResolver(""),
        TPUClusterResolver("local"),
        TPUClusterResolver.connect(),
    ):
        assert resolver.topology == Topology.from_name("v5e:4x4")
    assert resolver.environment == "google_cloud"
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]}
    assert resolver.master() == "10.0.0.1"
    assert resolver.master("worker", 2, rpc_layer="grpc") == "grpc://10.0.0.3"
    assert resolver.num_accelerators() == {"TPU": 4}
    monkeypatch.setattr(_jax, "tpu_cluster", lambda: None)
    assert (resolver.environment, resolver.cluster_spec(), resolver.master()) == ("local", {}, "")


@pytest.mark.parametrize("variable", ["TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"])
def test_workers_of_a_kubernetes_job(monkeypatch, variable: str) -> None:
    assert _jax.tpu_cluster() is None  # there is no TPU here
    monkeypatch.setattr(_jax.runtime._clusters, "running_in_cloud_tpu_vm", True)
    monkeypatch.delenv("TPU_PROCESS_ADDRESSES", raising=False)
    monkeypatch.setenv(variable, "host-0,host-1")
    assert _jax.tpu_cluster() == ("gke", ["host-0", "host-1"])


def test_there_is_no_tpu_here() -> None:
    with pytest.raises(
        RuntimeError, match="there is no TPU: JAX has cpu:0, .*emulate='2x2x1x2'.*topology='v5e:4x4'.*tpu"
    ):
        TPUClusterResolver()
    with pytest.raises(ValueError, match="tpu='grpc://10.0.0.1:8470'.*connects to no others by name or address"):
        TPUClusterResolver("grpc://10.0.0.1:8470")


# --- absent ---------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch) -> list[tuple[str, dict[str, object], str]]:
    """In place of libtpu: what was asked of it, and in which environment."""
    import importlib.util

    from jax.experimental import topologies

    asked = []

    def describe(name, platform, **options):
        assert platform == "tpu"
        asked.append((name, options, os.environ["TPU_ACCELERATOR_TYPE"]))
        if name == "v5e:2x6":
            raise RuntimeError("INVALID_ARGUMENT: no")
        return SimpleNamespace(devices=chips(name))

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    return asked


def test_a_slice_that_is_not_there(compiler) -> None:
    resolver = TPUClusterResolver(topology="v5e:4x4")
    assert resolver.topology == Topology.from_name("v5e:4x4")
    assert (resolver.environment, resolver.cluster_spec(), resolver.master()) == ("absent", {}, "")
    assert resolver.num_accelerators() == {"TPU": 4}
    TPUClusterResolver(topology="v4:2x2x1")
    TPUClusterResolver(topology="v5e:1x1")
    host = {"chips_per_host_bounds": [2, 2, 1]}
    assert compiler == [
        ("v5e:4x4", host, "v5litepod-16"),
        ("v4:2x2x1", {**host, "chip_config_name": "megacore"}, "v4-8"),
        ("v5e:1x1", {"chips_per_host_bounds": [1, 1, 1]}, "v5litepod-1"),
    ]
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


def test_a_slice_that_libtpu_does_not_know(compiler) -> None:
    with pytest.raises(ValueError, match="libtpu knows no TPU slice 'v5e:2x6': INVALID_ARGUMENT: no"):
        TPUClusterResolver(topology="v5e:2x6")
    with pytest.raises(ValueError, match="'v9:2x2' is not a TPU slice: .*v5e"):
        TPUClusterResolver(topology="v9:2x2")
    assert len(compiler) == 1
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


def test_without_libtpu(monkeypatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(
        RuntimeError, match=r"'v5e:4x4' come from libtpu, which is not installed: pip install 'replicax\[tpu\]'"
    ):
        TPUClusterResolver(topology="v5e:4x4")


# --- the rest -------------------------------------------------------------------------------------------


def test_one_source_of_devices() -> None:
    with pytest.raises(
        ValueError, match="give one of tpu, topology .* got tpu=None, topology='v5e:4x4', emulate='2x2x1x2'"
    ):
        TPUClusterResolver(topology="v5e:4x4", emulate="2x2x1x2")


def test_workers_that_do_not_exist() -> None:
    resolver = TPUClusterResolver(emulate="2x2x1x2")
    for ask in (resolver.master, resolver.num_accelerators):
        with pytest.raises(ValueError, match="no job 'ps': the TPUs belong to the job 'worker'"):
            ask("ps")
        with pytest.raises(ValueError, match="no worker 1: there are 1, numbered from 0"):
            ask("worker", 1)
