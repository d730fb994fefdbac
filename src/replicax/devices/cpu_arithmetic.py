"""CPU arithmetic: makes the last bits of values on CPUs depend on the program alone.

A CPU that multiplies and adds in one instruction rounds once, and its compiler uses that where the two operations end
up in one piece of code; that depends on the number of devices. And XLA divides the sum of a long matrix product among
all threads, so the order of its additions depends on their number.
"""

from __future__ import annotations

import os
import platform

from replicax import _jax
from replicax.system.environment import threads_for

FLAG = "--xla_cpu_max_isa=AVX"
"""For the compiler, in ``XLA_FLAGS``: avoid the instructions that round once. No option of a single program does that,
because the compiler chooses the instructions for all programs when JAX creates its devices."""


def fix_arithmetic(replicas: int | None) -> None:
    """Make CPU devices compute as in any process with as many replicas, if JAX has yet to create its devices.

    ``replicas`` is the number on all workers; ``None`` if it follows from the devices.
    """
    if _jax.backends_are_initialized():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if is_x86() and "--xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    if type(replicas) is int and replicas >= max(1, _jax.setting("jax_num_cpu_devices")):
        os.environ["NPROC"] = str(threads_for(replicas))


def is_x86() -> bool:
    """Whether the CPU is of the make for which :data:`FLAG` is."""
    return platform.machine().lower() in ("x86_64", "amd64")
