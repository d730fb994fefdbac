"""CPU arithmetic: what the last bit of a value depends on, on CPUs, besides the program.

A CPU that multiplies and adds in one instruction rounds once, and its compiler uses that where the two operations end
up in one piece of code; that depends on the number of devices. And XLA divides the sum of a long matrix product among
all threads, so the order of its additions depends on their number.
"""

from __future__ import annotations

import functools
import os
import platform

import jax
import numpy as np

from replicax import _jax
from replicax.errors import ReproducibilityWarning, warn

FLAG = "--xla_cpu_max_isa=AVX"
"""For the compiler, in ``XLA_FLAGS``: avoid the instructions that round once. No option of a single program does that,
because the compiler chooses the instructions for all programs when JAX creates its devices."""


def fix_arithmetic(replicas: int | None) -> None:
    """Make CPU devices compute as in any process with as many replicas, if JAX has yet to create its devices.

    Args:
      replicas: the number on all workers; ``None`` if it follows from the devices.
    """
    if _jax.backends_are_initialized():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _is_x86() and "--xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    if type(replicas) is int and replicas >= max(1, jax.config.values["jax_num_cpu_devices"]):
        os.environ["NPROC"] = str(_threads(replicas))


def thread_limit() -> int:
    """The number of XLA's threads: the variable ``NPROC``, or one for each core."""
    value = os.environ.get("NPROC", "")
    return int(value) if value.isdigit() else (os.cpu_count() or 1)


def warn_unless_fixed(device: jax.Device, replicas: int) -> None:
    """Warn, once, if a CPU device of this process computes unlike those of other processes with as many replicas."""
    if device.platform != "cpu":
        return
    if not _rounds(device):
        _warn_of_rounding()
    if thread_limit() != _threads(replicas):
        _warn_of_threads(thread_limit(), _threads(replicas))


def _threads(replicas: int) -> int:
    """The number of threads of each process: enough for a device for each replica."""
    return 2 * replicas


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
        if _is_x86()
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


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
