"""What each worker of a slice of two hosts does, in tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax.tpu import resolver
from replicax.variables.partitioners import over_all


def slice_of_two_hosts() -> replicax.TPUClusterResolver:
    """The resolver of 2x2 chips, of which each process drives a row."""
    rows = [[(0, 0, 0, 0), (1, 0, 0, 0)], [(0, 1, 0, 0), (1, 1, 0, 0)]]
    found = replicax.Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=rows)
    devices = np.array(jax.devices(), dtype=object).reshape(2, 2)
    original = resolver._attached_devices, resolver.topology_of
    resolver._attached_devices, resolver.topology_of = (lambda tpu: list(devices.flat)), (lambda _: (found, devices))
    try:
        return replicax.TPUClusterResolver()
    finally:
        resolver._attached_devices, resolver.topology_of = original


def train(data: np.ndarray) -> tuple[object, ...]:
    resolver = slice_of_two_hosts()
    strategy = replicax.TPUStrategy(resolver)
    with strategy.scope():
        w = replicax.Variable(np.zeros(3, np.float32), name="w", aggregation="mean")
    strategy.initialize()
    batch = strategy.distribute_values_from_function(lambda ctx: data[ctx.replica_id_in_sync_group])
    for _ in range(3):
        strategy.run(lambda x: w.assign_sub(0.1 * (w - x)), args=(batch,))
    strategy.finalize()
    messages = []
    half = replicax.DeviceAssignment.build(resolver.topology, num_replicas=2)
    for assignment, reproducible in ((half, False), (None, jax.process_index() == 1)):
        try:
            replicax.TPUStrategy(resolver, assignment, reproducible=reproducible)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    hosts = strategy.num_hosts, strategy.num_replicas_per_host
    cpus = [strategy.get_host_cpu_device(host).process_index for host in range(2)]
    return w.numpy().tolist(), hosts, cpus, resolver.task_id, messages


def train_in_parts(strategy: replicax.Strategy, splits: bool, executor: str = "compiled") -> list[np.ndarray]:
    """What two steps leave in variables; on the slice in parts, and these in pieces."""
    rng = np.random.default_rng(4)
    with strategy.scope():
        a, b, c = (
            replicax.Variable(
                rng.normal(size=shape).astype(np.float32), name=name, partition_dimensions=parts if splits else None
            )
            for name, shape, parts in [("a", (4, 8), [1, 2]), ("b", (8,), [2]), ("c", (8, 8), [2, 1])]
        )
        optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)))

    def step(x: Any) -> None:
        def loss() -> Any:
            return replicax.compute_average_loss(jnp.square(jnp.tanh(x @ a + b.value[None]) @ c).sum(-1))

        _, gradients = replicax.value_and_grad(loss, [a, b, c])()
        optimizer.apply_gradients(zip(gradients, [a, b, c], strict=True))

    for x in strategy.distribute_dataset([rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2)]):
        strategy.run(step, args=(x,), options=replicax.RunOptions(executor))
    if splits:
        kept.extend([a, b, c])
    return [v.numpy() for v in (a, b, c)]


kept: list[replicax.Variable] = []
"""The variables of the runs so far."""


def parts_and_pieces() -> tuple[list[np.ndarray], str, list[tuple[int, ...]]]:
    """A replica on the two devices of each host: what both executors compute, and what is shown and held here."""
    resolver = slice_of_two_hosts()
    rows = replicax.DeviceAssignment.build(resolver.topology, [2, 1, 1], num_replicas=2)
    pieces = replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0))
    strategy = replicax.TPUStrategy(resolver, rows, variable_partitioner=pieces)
    found = [value for e in ("compiled", "per_replica") for value in train_in_parts(strategy, True, e)]
    shown = ", ".join(map(repr, kept[:3]))
    return found, shown, [v.slot.array.addressable_shards[0].data.shape for v in kept[:3]]
