"""``reproducible=True`` on CPUs: a warning where a process can't keep its promise."""

from __future__ import annotations

import functools
import platform

import jax
import numpy as np

from replicax.devices.cpu_arithmetic import FLAG, is_x86
from replicax.errors import ReproducibilityWarning, warn
from replicax.system.environment import thread_limit, threads_for


def warn_unless_fixed(device: jax.Device, replicas: int) -> None:
    """Warn, once, if a CPU device of this process computes unlike those of other processes with as many replicas."""
    if device.platform != "cpu":
        return
    if not _rounds(device):
        _warn_of_rounding()
    if thread_limit() != threads_for(replicas):
        _warn_of_threads(thread_limit(), threads_for(replicas))


@functools.cache
@jax.disable_jit(False)
def _rounds(device: jax.Device) -> bool:
    """Whether the compiler rounds ``x * x`` in ``x * x - y``, which is then zero."""
    x = np.full(16, 1 + 2**-12, np.float32)
    arguments = jax.device_put((x, x * x), device)
    program = jax.jit(lambda x, y: x * x - y).lower(*arguments).compile()
    return not np.asarray(program(*arguments)).any()


_DIFFERS = "So a step may differ in the last bit on another number of devices."
_FIRST = "The strategies for CPUs do so themselves if they are made before anything else asks JAX for a device"


@functools.cache
def _warn_of_rounding() -> None:
    cure = (
        f"Set XLA_FLAGS={FLAG} in the environment. {_FIRST}"
        if is_x86()
        else f"The compiler for this make of CPU ({platform.machine()}) can't be told otherwise: compare runs on yours"
    )
    warn(
        "reproducible=True: sums over replicas have one order, but programs on this CPU round once where a product is "
        f"added to something, or twice, as the compiler happens to put operations together. {_DIFFERS} {cure}.",
        ReproducibilityWarning,
    )


@functools.cache
def _warn_of_threads(have: int, wanted: int) -> None:
    warn(
        f"reproducible=True: XLA has {have} threads in this process, where all runs of as many replicas should have "
        f"{wanted}: it divides long matrix products among them, and adds up what they find. {_DIFFERS} Set NPROC="
        f"{wanted} in the environment. {_FIRST}, and have num_replicas=….",
        ReproducibilityWarning,
    )
