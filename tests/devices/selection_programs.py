"""What ``test_selection.py`` does with JAX's devices in a process that has none yet: ``python -m … NAME``."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp

import replicax
from replicax import _jax


def steps(devices: int) -> None:
    """Print the sum of 100 steps with an all-reduce, dispatched without waiting."""
    assert not _jax.backends_are_initialized()  # importing Replicax makes no devices
    replicax.use_cpu_devices(devices)
    replicax.use_cpu_devices(devices)
    assert len(jax.devices()) == devices
    replicax.use_cpu_devices(devices)
    strategy = replicax.MirroredStrategy()
    assert strategy.num_replicas_in_sync == devices
    with strategy.scope():
        total = replicax.Variable(jnp.zeros(1000), aggregation="sum")
    ones = strategy.distribute_values_from_function(lambda ctx: jnp.ones(1000))
    for _ in range(100):
        strategy.run(lambda x: total.assign_add(x), args=(ones,))
    print(float(total[0]))


def too_late() -> None:
    jax.devices()
    print_error_of_four_devices()
    strategy = replicax.MirroredStrategy(num_replicas=4)  # as the message says
    print(strategy.reduce("sum", strategy.distribute_values_from_function(lambda ctx: 1.0)))


def by_other_means() -> None:
    os.environ["NPROC"] = "2"  # as on a machine with two cores
    jax.config.update("jax_num_cpu_devices", 4)
    jax.devices()
    print_error_of_four_devices()


def print_error_of_four_devices() -> None:
    try:
        replicax.use_cpu_devices(4)
    except RuntimeError as error:
        print(error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(int, sys.argv[2:]))
