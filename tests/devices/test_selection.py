from __future__ import annotations

import types

import jax
import pytest

import replicax
from replicax.devices.selection import resolve_devices
from tests import processes


def printed_by(*program: str) -> str:
    [printed] = processes.run_programs([[*processes.MODULE, "tests.devices.selection_programs", *program]], timeout=240)
    return printed


# --- use_cpu_devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [*(pytest.param(n, marks=pytest.mark.soak) for n in (2, 8)), 16])
def test_emulated_devices_do_not_deadlock(devices: int) -> None:
    """With XLA's own thread pool this hangs."""
    assert float(printed_by("steps", str(devices))) == 100 * devices


def test_it_must_come_before_the_devices() -> None:
    printed = printed_by("too_late")
    assert "use_cpu_devices(4) comes too late: JAX has already made its devices, 1 cpu device(s)" in printed
    assert "restart the kernel. Or run several replicas" in printed
    assert printed.endswith("4.0\n")


def test_devices_emulated_by_other_means_may_deadlock() -> None:
    assert "thread pool may be too small for collectives (2 threads)" in printed_by("by_other_means")


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True])
def test_the_number_must_be_a_positive_integer(n) -> None:
    with pytest.raises(ValueError, match="n must be an int of at least 1, got"):
        replicax.use_cpu_devices(n)


# --- naming devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "cpu:3",
        "CPU:3",
        "/device:CPU:3",
        "/cpu:3",
        "/job:worker/replica:0/task:0/cpu:3",
        "/job:worker/task:0/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:3",
        "device:cpu:3",
    ],
)
def test_devices_by_name(name: str) -> None:
    assert resolve_devices([name]) == (jax.devices()[3],)


def test_a_platform_alone_is_its_first_device() -> None:
    assert resolve_devices(["cpu"]) == (jax.devices()[0],)


def test_none_means_all_local_devices() -> None:
    assert resolve_devices(None) == tuple(jax.local_devices())
    assert replicax.MirroredStrategy().num_replicas_in_sync == 8


def test_devices_keep_their_order() -> None:
    strategy = replicax.MirroredStrategy(["cpu:2", jax.devices()[0]])
    assert [d.id for d in strategy.extended.worker_devices] == [2, 0]
    ids = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group)
    assert [next(iter(x.devices())).id for x in strategy.local_results(ids)] == [2, 0]


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (["cpu:0", "cpu:1", "cpu:0"], ValueError, r"names cpu:0 twice \(entries 0 and 2\).*use_cpu_devices"),
        (["cpu:99"], ValueError, "no device 'cpu:99'; available: cpu:0, .*use_cpu_devices"),
        (["quantum:0"], ValueError, "no device 'quantum:0'; available"),
        (["/job:worker/task:1/device:CPU:0"], ValueError, r"'/job:worker/task:1/.*1 process.*, has task '0' only"),
        (["/job:ps/task:0/device:CPU:0"], ValueError, "no device '/job:ps/.* has job 'worker' or 'localhost' only"),
        (["/job:worker/index:0/device:CPU:0"], ValueError, "no device .* knows no 'index'.*/job:worker/task:0/device"),
        (["nonsense/device:CPU:0"], ValueError, "no device 'nonsense/device:CPU:0'; available"),
        (["cpu:one"], ValueError, "no device 'cpu:one'"),
        ([], ValueError, "devices is empty"),
        ("cpu:0", TypeError, r"for one device: \['cpu:0'\]"),
        ([3], TypeError, "got 3"),
        (5, TypeError, "must be a list of devices or None, got 5"),
        (types.SimpleNamespace(devices=()), TypeError, "a cluster resolver has them .*: pass resolver.devices"),
    ],
)
def test_devices_that_are_off(devices, error, message) -> None:
    with pytest.raises(error, match=message):
        replicax.MirroredStrategy(devices)
