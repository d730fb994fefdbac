"""Parameter servers on Ray: processes of their own, one of which is killed; none is left in the end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.parameter_server import actors, coordinator as coordinator_module
from tests.parameter_server.regression import batches, in_parts, mirrored, regression

pytest.importorskip("ray")

WAIT = 200.0


@pytest.fixture(scope="module")
def strategy() -> replicax.ParameterServerStrategy:
    partitioner = replicax.variables.FixedShardsPartitioner(2)
    return replicax.ParameterServerStrategy(num_workers=2, num_servers=2, mode="sync", variable_partitioner=partitioner)


@pytest.fixture(scope="module")
def coordinator(strategy: replicax.ParameterServerStrategy) -> Iterator[replicax.ClusterCoordinator]:
    with replicax.ClusterCoordinator(strategy) as coordinator:
        yield coordinator
    assert our_children() == []


def our_children() -> list[str]:
    """The processes that this one has started and that are Ray's."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    ours, found = {str(os.getpid())}, []
    for _ in range(3):  # children, and theirs
        for pid, parent, command in rows:
            if parent in ours and "ray" in command and pid not in ours:
                ours.add(pid)
                found.append(command)
    return found


def test_a_killed_worker_and_a_killed_server_cost_nothing(
    coordinator: replicax.ClusterCoordinator, strategy: replicax.ParameterServerStrategy
) -> None:
    """In 12 steps a worker is killed, and later a server; the result is that of MirroredStrategy.

    Other variables are so large that they are in shared memory, where a program changes its own copies only.
    """
    size, steps = 1 << 16, 12
    model = regression(strategy, optax.sgd(0.02, momentum=0.9))
    with strategy.scope():
        v = replicax.Variable(np.zeros((1, size), np.float32), name="v", aggregation="sum")
        w = replicax.Variable(np.zeros((1, size), np.float32), name="w", aggregation="mean")
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step(x: Any, y: Any) -> Any:
        model.step(x, y)
        seen = v.read_value().sum(), w.read_value().sum()
        v.assign_add(jnp.ones((1, size)))
        optimizer.apply_gradients([(jnp.ones((1, size)), w)])
        return seen

    def train(x: Any, y: Any) -> tuple[Any, int]:
        return strategy.run(step, args=(x, y)), os.getpid()

    server = coordinator._cluster.servers.actors[1]
    results = []
    for number, batch in enumerate(batches(steps)):
        results += [coordinator.schedule(train, args=part) for part in in_parts(batch, 2)]
        if number in (4, 8):
            _, pid = results[-1].fetch(WAIT)
            os.kill(pid, signal.SIGKILL) if number == 4 else server.kill()
    report = coordinator.join(timeout_seconds=WAIT)
    assert report.workers_lost == 1
    assert coordinator._cluster.servers.actors[1] is not server
    assert report.functions >= 2 * steps  # some of them twice
    reference = mirrored(2, steps, optax.sgd(0.02, momentum=0.9))
    assert int(model.iterations) == steps
    for found, expected in zip(model.values, reference.values, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
    # The one that was killed, and another: a process that starts late may find nothing left to do.
    assert len({pid for _, pid in coordinator.fetch(results)}) >= 2
    for number, (seen, _) in enumerate(coordinator.fetch(results)):
        assert [float(total) for total in seen] == [2.0 * (number // 2) * size, -2.0 * (number // 2) * size]
    assert (v.numpy() == 2 * steps).all()
    assert (w.numpy() == -2 * steps).all()


def test_a_function_that_captures_a_large_array(coordinator: replicax.ClusterCoordinator) -> None:
    large = np.arange(1 << 15)  # it goes through the object store
    results = [coordinator.schedule(lambda: int(large[-1])) for _ in range(4)]
    assert coordinator.fetch(results) == [(1 << 15) - 1] * 4


def test_all_of_it_is_on_loopback(coordinator: replicax.ClusterCoordinator) -> None:
    import ray

    assert ray.util.get_node_ip_address() == "127.0.0.1"


def test_the_error_of_a_worker_names_its_line(coordinator: replicax.ClusterCoordinator) -> None:
    class NotKnownHereError(Exception):
        pass

    def fails() -> None:
        raise NotKnownHereError("what went wrong")

    coordinator.schedule(fails)
    with pytest.raises(replicax.errors.WorkerError, match=r"test_ray\.py:\d+: NotKnownHereError: what went wrong"):
        coordinator.join(WAIT)
    assert coordinator.schedule(jax.device_count).fetch(WAIT) == 1
    assert coordinator.schedule(lambda: jax.config.jax_numpy_dtype_promotion).fetch(WAIT) == "strict"  # as here


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_only_a_cluster_that_is_named_is_joined(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address Ray would join what ``ray start`` has left on this machine, and refuse the arguments."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", None)  # restored afterwards
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    actors._start(types.SimpleNamespace(init=lambda **settings: asked.append(settings)))
    [settings] = asked
    assert settings.get("address") == ("local" if address is None else None)  # Ray itself reads RAY_ADDRESS


def test_calls_end_with_an_error_when_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def slow(reference: Any, timeout: float) -> Any:
        raise ray.exceptions.GetTimeoutError

    def has_no_room() -> Any:
        raise ray.exceptions.ObjectStoreFullError("all is full")

    dead = [(kind, types.SimpleNamespace(poll=lambda: 7)) for kind in ("log_monitor", "raylet")]
    monkeypatch.setattr(actors, "_node", lambda: types.SimpleNamespace(dead_processes=lambda: dead))
    monkeypatch.setattr(actors, "TIMEOUT", 0.0)
    monkeypatch.setattr("ray.get", slow)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(
        actors.ActorDiedError, match=r"^server 0 has died: Ray has ended: its process raylet \(exit code 7\) is gone$"
    ):
        actors.all_results([actors._reply(object)], ["server 0"])
    dead.pop()
    with pytest.raises(TimeoutError, match="^server 0 has not answered within 0 seconds$"):
        actors.all_results([actors._reply(object)], ["server 0"])
    with pytest.raises(actors.NoRoomError, match="all is full"):
        actors._reply(has_no_room).result(WAIT)
    connected = actors.Actors()
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    told: list[bool] = []
    reply = actors._reply(has_no_room)
    reply.when_done(lambda: told.append(True))
    assert told == [True]
    assert actors.Actor(None).call("work", 1, reply) is reply  # what needs a result that is none fails as it does
    for fails in (lambda: reply.result(WAIT), lambda: connected.start(object, env={}), actors._check_ray):
        with pytest.raises(actors.ActorDiedError, match="^Ray has been shut down$"):
            fails()


@pytest.mark.parametrize(
    ("platforms", "devices", "more"),
    [
        ("cpu", 1, {}),
        ("cpu", 2, {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "7"}),
        ("cpu", 9, {"JAX_NUM_CPU_DEVICES": "9", "NPROC": "18"}),
        ("cuda", 2, {}),
    ],
)
def test_a_worker_has_the_platform_of_the_program_and_as_many_devices_as_it_is_to_have(
    platforms: str, devices: int, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))  # those that it may use
    assert coordinator_module._worker_environment(devices) == {"JAX_PLATFORMS": platforms} | more
    monkeypatch.delenv("JAX_PLATFORMS")
    assert coordinator_module._worker_environment(1) == {"JAX_PLATFORMS": jax.default_backend()}


@pytest.mark.soak
def test_a_program_that_is_interrupted_leaves_no_process(tmp_path: pathlib.Path) -> None:
    program = textwrap.dedent(
        """
        import os, signal, threading, time
        import replicax

        strategy = replicax.ParameterServerStrategy(num_workers=1)
        coordinator = replicax.ClusterCoordinator(strategy)
        print(coordinator.schedule(os.getpid).fetch(), flush=True)
        coordinator.schedule(time.sleep, args=(1000,))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        coordinator.join()
        """
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=WAIT)
    assert "KeyboardInterrupt" in ended.stderr
    worker = int(ended.stdout.split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
