from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types

import jax
import pytest

import replicax
from replicax.devices.selection import resolve_devices


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh Python, which has not inherited this one's thread limit."""
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
    )


# --- use_cpu_devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [*(pytest.param(n, marks=pytest.mark.soak) for n in (2, 8)), 16])
def test_emulated_devices_do_not_deadlock(devices: int) -> None:
    """100 steps with an all-reduce, dispatched without waiting. With XLA's own thread pool this hangs."""
    done = run(f"""
        import jax, jax.numpy as jnp, replicax
        from replicax import _jax
        assert not _jax.backends_are_initialized()  # importing it makes no devices
        replicax.use_cpu_devices({devices})
        replicax.use_cpu_devices({devices})
        assert len(jax.devices()) == {devices}
        replicax.use_cpu_devices({devices})
        strategy = replicax.MirroredStrategy()
        assert strategy.num_replicas_in_sync == {devices}
        with strategy.scope():
            total = replicax.Variable(jnp.zeros(1000), aggregation="sum")
        ones = strategy.distribute_values_from_function(lambda ctx: jnp.ones(1000))
        for _ in range(100):
            strategy.run(lambda x: total.assign_add(x), args=(ones,))
        print(float(total[0]))
    """)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 100 * devices


def test_it_must_come_before_the_devices() -> None:
    done = run("""
        import jax, replicax
        jax.devices()
        try:
            replicax.use_cpu_devices(4)
        except RuntimeError as e:
            print(e)
        strategy = replicax.MirroredStrategy(num_replicas=4)  # as the message says
        print(strategy.reduce("sum", strategy.distribute_values_from_function(lambda ctx: 1.0)))
    """)
    assert "use_cpu_devices(4) comes too late: JAX has already made its devices, 1 cpu device(s)" in done.stdout
    assert "restart the kernel. Or run several replicas" in done.stdout
    assert done.stdout.endswith("4.0\n")


def test_devices_emulated_by_other_means_may_deadlock() -> None:
    done = run("""
        import os
        os.environ["NPROC"] = "2"  # as on a machine with two cores
        import jax, replicax
        jax.config.update("jax_num_cpu_devices", 4)
        jax.devices()
        try:
            replicax.use_cpu_devices(4)
        except RuntimeError as e:
            print(e)
    """)
    assert "thread pool may be too small for collectives (2 threads)" in done.stdout, done.stderr


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
