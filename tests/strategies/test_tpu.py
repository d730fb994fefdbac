from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests import processes
from tests.conftest import strategy_of
from tests.strategies import workers_tpu

DATA = np.random.default_rng(7).normal(size=(2, 8, 3)).astype(np.float32)


def on(emulate: str, slices: int | None = None, **build) -> replicax.TPUStrategy:
    resolver = replicax.TPUClusterResolver(emulate=emulate, slices=slices)
    return replicax.TPUStrategy(
        resolver, replicax.DeviceAssignment.build(resolver.topology, **build) if build else None
    )


def train(strategy: replicax.Strategy, executor: str) -> list[np.ndarray]:
    """What two steps leave in parameters, slots, statistics and losses."""
    with strategy.scope():
        w = replicax.Variable(jnp.zeros((3, 2)), name="w")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        mean = replicax.Variable(jnp.zeros(3), name="mean", synchronization="on_read", aggregation="mean")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(x):
        seen.assign_add(x.shape[0])
        mean.assign(x.mean(0))
        loss, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.square(x @ w - 1.0).sum(-1)), [w]
        )()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        return loss

    losses = []
    for batch in strategy.distribute_dataset(DATA):
        losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,), options=replicax.RunOptions(executor))))
    return [np.asarray(losses), *(v.numpy() for v in (w, seen, mean, *optimizer.variables))]


@pytest.mark.parametrize(
    ("emulate", "slices", "replicas", "executor"),
    [
        ("1x1x1x1", None, 1, "compiled"),
        ("2x1x1x2", 2, 8, "compiled"),
        ("1x1x1x1", 2, 2, "per_replica"),
        pytest.param("1x1x1x2", None, 2, "compiled", marks=pytest.mark.soak),
        pytest.param("2x2x1x2", None, 8, "compiled", marks=pytest.mark.soak),
        pytest.param("1x1x1x2", None, 2, "per_replica", marks=pytest.mark.soak),
    ],
)
def test_training_is_that_of_mirrored_replicas(emulate: str, slices: int | None, replicas: int, executor: str) -> None:
    strategy = on(emulate, slices)
    assert strategy.num_replicas_in_sync == replicas
    for mine, theirs in zip(train(strategy, executor), train(strategy_of(replicas), executor), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_training_on_some_cores_is_that_of_mirrored_replicas() -> None:
    strategy = on("2x2x1x2", computation_stride=[2, 1, 1, 1], num_replicas=4)
    for mine, theirs in zip(train(strategy, "compiled"), train(strategy_of(4), "compiled"), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_replicas_are_where_the_assignment_says() -> None:
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    assignment = replicax.DeviceAssignment(resolver.topology, [[(1, 1, 1)], [(0, 0, 0)], [(1, 0, 1)]])
    strategy = replicax.TPUStrategy(resolver, assignment)
    assert [d.id for d in strategy.extended.worker_devices] == [7, 0, 3]
    ids = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group)
    assert [next(iter(x.devices())).id for x in strategy.local_results(ids)] == [7, 0, 3]
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.device_assignment is assignment
    assert strategy.cluster_resolver is resolver


def test_a_replica_may_have_several_devices() -> None:
    strategy = on("2x2x1x2", computation_shape=[2, 1, 2], num_replicas=2)
    assert strategy.num_replicas_in_sync == 2
    assert strategy.extended.logical_devices.shape == (2, 4)
    for replica in range(2):
        for core in range(4):
            ordinal = strategy.device_assignment.tpu_ordinal(replica, core)
            assert strategy.extended.logical_devices[replica, core] is jax.devices()[ordinal]
    assert dict(strategy.extended.mesh.shape) == {"replica": 2, "logical0": 2, "logical1": 2}
    assert strategy.extended.worker_devices == tuple(strategy.extended.logical_devices[:, 0])


@pytest.mark.parametrize(
    ("emulate", "build", "hosts", "per_host"),
    [
        ("2x2x1x2", {}, 1, 8),
        ("4x2x1x1", {}, 2, 4),
        ("4x2x1x1", {"computation_shape": [4, 1, 1], "num_replicas": 2}, 2, 2),
        ("4x2x1x1", {"computation_shape": [1, 2, 1], "num_replicas": 3}, 2, 2),
        ("4x2x1x1", {"num_replicas": 2}, 1, 2),
    ],
)
def test_hosts(emulate, build, hosts, per_host) -> None:
    strategy = on(emulate, **build)
    assert (strategy.num_hosts, strategy.num_replicas_per_host) == (hosts, per_host)
    for host in range(hosts):
        assert strategy.get_host_cpu_device(host) is jax.devices("cpu")[0]
    for host in (-1, hosts):
        with pytest.raises(ValueError, match=f"there is no host {host}: the strategy has {hosts}, numbered from 0"):
            strategy.get_host_cpu_device(host)


def test_a_host_can_keep_what_is_reduced() -> None:
    strategy = on("2x2x1x1")
    value = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
    total = strategy.extended.reduce_to("sum", value, strategy.get_host_cpu_device(0))
    assert float(total) == 6.0
    assert total.devices() == {jax.devices("cpu")[0]}


def test_initialize_and_finalize_wait_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = on("2x2x1x1")
    assert strategy.initialize() is None
    with strategy.scope():
        strategy.initialize()
    heard = []
    strategy.run(lambda: jax.debug.callback(lambda: heard.append(1)))
    barrier = jax.effects_barrier  # on CPUs, the all-reduce would wait for callbacks by itself
    monkeypatch.setattr(jax, "effects_barrier", lambda: (barrier(), heard.append("all")))
    assert strategy.finalize() is None
    assert heard[0] == 1
    assert heard[-1] == "all"
    for method in ("initialize", "finalize"):
        with pytest.raises(
            replicax.errors.ContextError, match=f"^strategy.{method} .* inside a replica. Call it outside"
        ):
            strategy.run(getattr(strategy, method))
    strategy.initialize()


@pytest.mark.parametrize("executor", ["compiled", pytest.param("per_replica", marks=pytest.mark.soak)])
def test_several_replicas_on_each_core(executor: str) -> None:
    """A group of what is split is a slice by default, of whose cores each has two replicas."""
    resolver = replicax.TPUClusterResolver(emulate="1x1x1x2", slices=2)
    by_slices = replicax.variables.GroupPartitioner(partitioner=over_all(2, min_bytes=0))
    strategy = replicax.TPUStrategy(resolver, variable_partitioner=by_slices, num_replicas=8)
    assert (strategy.num_replicas_in_sync, strategy.num_hosts, strategy.num_replicas_per_host) == (8, 2, 4)
    for mine, theirs in zip(train(strategy, executor), train(strategy_of(8), executor), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    with strategy.scope():
        v = replicax.Variable(jnp.arange(4.0), name="v")
    where = v.layout.describe(strategy.extended.mesh, 2)
    assert where == "split along dim 0 over the 2 devices of each of 2 groups"
    strategy.initialize()


def test_what_is_wrong_is_said() -> None:
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x1")
    other = replicax.DeviceAssignment.build(replicax.Topology.from_name("v3:4x4"))
    with pytest.raises(ValueError, match="another topology: it has .*v3:4x4.* found .*2x2x1 chips.*resolver.topology"):
        replicax.TPUStrategy(resolver, other)
    with pytest.raises(TypeError, match="expected a TPUClusterResolver, got 'v3'"):
        replicax.TPUStrategy("v3")
    with pytest.raises(TypeError, match="expected a DeviceAssignment, got 4"):
        replicax.TPUStrategy(resolver, 4)
    with pytest.raises(ValueError, match=r"multiple of the number of devices, .*: got 6 replica\(s\) for 4 device"):
        replicax.TPUStrategy(resolver, num_replicas=6)
    with pytest.raises(RuntimeError, match="there is no TPU: JAX has cpu:0, .*emulate='2x2x1x2'"):
        replicax.TPUStrategy()


def test_a_slice_that_is_not_there_has_no_host(monkeypatch) -> None:
    strategy = on("2x2x1x1")
    monkeypatch.setattr(strategy.cluster_resolver, "kind", "absent")
    with pytest.raises(RuntimeError, match="host 0 has no CPU device: .*2x2x1.* is not there"):
        strategy.get_host_cpu_device(0)


def test_a_slice_of_several_hosts() -> None:
    data = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    expected = np.zeros(3, np.float32)
    for _ in range(3):
        expected = (expected - 0.1 * (expected - data)).mean(0)
    for worker, (w, hosts, cpus, task, messages) in enumerate(processes.run(workers_tpu.train, data, devices=2)):
        np.testing.assert_allclose(w, expected, rtol=1e-5)
        assert (hosts, cpus, task) == ((2, 2), [0, 1], worker)
        assert "has devices of 1 processes, [0], but 2 run this program" in messages[0]
        assert "reproducible" in messages[1]
