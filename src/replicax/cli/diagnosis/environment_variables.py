"""Checks the environment variables that change what JAX, XLA and the workers do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from replicax.cli.diagnosis.findings import Finding, ok, warning, wrong
from replicax.errors import shortened
from replicax.system.environment import FRACTION_VARIABLES, chosen_threads, fraction_in, thread_limit, threads_for

_NAMES = ("CUDA_VISIBLE_DEVICES", "LIBTPU_INIT_ARGS", "NPROC", "OMP_NUM_THREADS", "TF_CONFIG", "XLA_FLAGS")
_PREFIXES = ("JAX_", "NCCL_", "ROCR_", "TPU_", "XLA_CLIENT_", "XLA_PYTHON_CLIENT_")
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")
_LONGEST = 40


def check(seconds: float) -> list[Finding]:
    """The variables that are set, in one line, and a line for each probable mistake."""
    all_ = environment_at_start()
    there = {name: value for name, value in sorted(all_.items()) if name in _NAMES or name.startswith(_PREFIXES)}
    shown = ", ".join(f"{name}={shortened(value, _LONGEST)}" for name, value in there.items())
    return [
        ok("environment", shown or "no variable of JAX's, XLA's or NCCL's is set", variables=there),
        *_mistakes(all_),
    ]


def environment_at_start() -> dict[str, str]:
    """The environment at the start of this process: importing JAX adds variables."""
    try:
        text = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(line).partition("=") for line in text.split(b"\0") if line)
    return {name: value for name, _, value in pairs}


def has_nvidia_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU with a driver, even if this process may not use it."""
    return Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()


def has_tpu() -> bool:
    """Return whether the machine has a TPU."""
    return Path("/dev/accel0").exists() or bool(os.environ.get("TPU_ACCELERATOR_TYPE"))


def _mistakes(environment: Mapping[str, str]) -> Iterator[Finding]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and has_nvidia_gpu() and visible.strip() in ("", "-1"):
        yield warning("environment", f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs", "unset it, or name some: 0,1")
    chosen = chosen_threads(environment)
    made = thread_limit(environment)
    if environment.get("NPROC") and chosen is None:
        what = f"NPROC={environment['NPROC']} is no whole number: XLA ignores it, and takes {made} thread(s)"
        yield warning("environment", what, "set it to a number of threads, or unset it")
    flags = environment.get("XLA_FLAGS", "")
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    if forced:
        devices = int(forced[1])
        if devices > 1 and made < threads_for(devices):
            yield wrong(
                "environment",
                f"XLA_FLAGS emulates {devices} devices with {made} thread(s): replicas that meet may wait for ever",
                f"use replicax.use_cpu_devices({devices}) instead, or set NPROC={threads_for(devices)}",
                devices=devices,
                threads=made,
            )
    yield from _memory_mistakes(environment)
    libraries = environment.get("LD_LIBRARY_PATH", "")
    if has_nvidia_gpu() and re.search("cuda|cudnn|nccl", libraries, re.IGNORECASE):
        what = f"LD_LIBRARY_PATH={shortened(libraries, _LONGEST)} may replace the CUDA that came with JAX"
        yield warning("environment", what, "unset it, unless JAX's CUDA is the one of this machine (cuda12-local)")


def _memory_mistakes(environment: Mapping[str, str]) -> Iterator[Finding]:
    there = [name for name in FRACTION_VARIABLES if environment.get(name)]
    for name in there:
        if fraction_in(environment[name]) is None:
            yield wrong("environment", f"{name}={environment[name]}", "expected a number above 0, such as 0.9")
    if len(there) > 1:
        yield wrong("environment", f"{' and '.join(there)} are both set: JAX refuses that", f"unset {there[1]}")
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    if allocator.lower() not in _ALLOCATORS:
        to_do = f"expected one of {', '.join(_ALLOCATORS)}"
        yield wrong("environment", f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}", to_do)
