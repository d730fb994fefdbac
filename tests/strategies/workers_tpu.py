"""What each worker of a slice of two hosts does, in tests."""

from __future__ import annotations

import jax
import numpy as np

import replicax
from replicax.tpu import resolver


def slice_of_two_hosts() -> replicax.TPUClusterResolver:
    """The resolver of 2x2 chips, of which each process drives a row."""
    rows = [[(0, 0, 0, 0), (1, 0, 0, 0)], [(0, 1, 0, 0), (1, 1, 0, 0)]]
    found = replicax.Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=rows)
    devices = np.array(jax.devices(), dtype=object).reshape(2, 2)
    original = resolver._attached, resolver.topology_of
    resolver._attached, resolver.topology_of = (lambda tpu: list(devices.flat)), (lambda _: (found, devices))
    try:
        return replicax.TPUClusterResolver()
    finally:
        resolver._attached, resolver.topology_of = original


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
    message = ""
    try:
        replicax.TPUStrategy(resolver, replicax.DeviceAssignment.build(resolver.topology, num_replicas=2))
    except ValueError as error:
        message = str(error)
    hosts = strategy.num_hosts, strategy.num_replicas_per_host
    cpus = [strategy.get_host_cpu_device(host).process_index for host in range(2)]
    return w.numpy().tolist(), hosts, cpus, resolver.task_id, message
