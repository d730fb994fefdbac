"""Divide the devices and threads of a machine among its workers.

JAX is not asked, as it would take the devices for the launcher: NVIDIA's GPUs are seen in ``/dev`` and in
``CUDA_VISIBLE_DEVICES``, and whether JAX could use them in the packages that are installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from replicax.launcher import LaunchError
from replicax.system.environment import chosen_threads, threads_for, usable_cores

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_GPU = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class DeviceAllocation:
    """The division of a machine's devices among its workers."""

    gpus: tuple[tuple[str, ...], ...] | None  # of each worker, named as in CUDA_VISIBLE_DEVICES; ``None``: no GPUs
    emulated: int | None  # the number of CPU devices that each worker emulates; ``None`` for JAX's default
    cores: int  # of this machine, for all of its workers

    def variables(self, slot: int, running: int, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables for a worker's devices and threads.

        ``slot`` is the number of its part of the devices; as many workers as are ``running`` share the cores. Numbers
        of threads that the user has chosen in ``environment``, the present one, stay.
        """
        variables = {}
        threads = max(1, self.cores // running)
        if self.gpus is not None:
            variables[_GPU] = ",".join(self.gpus[slot])
        else:
            if self.emulated is not None:
                variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.emulated)}
            least = threads_for(self.emulated or 1)
            if running > 1 or least > threads:
                variables["NPROC"] = str(max(least, chosen_threads(environment) or threads))
        if running > 1 and "OMP_NUM_THREADS" not in environment:
            variables["OMP_NUM_THREADS"] = str(threads)
        return variables

    def __str__(self) -> str:
        if self.gpus is not None:
            return f"{len(self.gpus[0])} GPU(s) each"
        return "the devices that JAX finds" if self.emulated is None else f"{self.emulated} emulated CPU device(s) each"


def allocate_devices(workers: int, devices_per_worker: int | None, environment: Mapping[str, str]) -> DeviceAllocation:
    """The devices of this machine, divided among its workers.

    If ``devices_per_worker`` is ``None``, the workers get all GPUs in equal parts, or else JAX's default, one CPU
    device each. Raises a LaunchError if there are too few devices, or they can't be divided evenly.
    """
    cores = usable_cores()
    gpus = _gpus(environment)
    if gpus is None:
        platforms = environment.get("JAX_PLATFORMS", "")
        if devices_per_worker is not None and "cpu" not in (platforms or "cpu").split(","):
            raise LaunchError(
                f"--devices-per-worker {devices_per_worker} divides NVIDIA GPUs, or emulates CPU devices, and "
                f"JAX_PLATFORMS is {platforms!r}: leave the option out, or set JAX_PLATFORMS=cpu"
            )
        return DeviceAllocation(None, devices_per_worker, cores)
    each = gpus_per_worker(len(gpus), workers, devices_per_worker, ", ".join(gpus) or "none visible")
    return DeviceAllocation(tuple(tuple(gpus[i * each : (i + 1) * each]) for i in range(workers)), None, cores)


def gpus_per_worker(gpus: int, workers: int, devices_per_worker: int | None, names: str) -> int:
    """The number of GPUs of a machine that each of its workers gets: by default all GPUs in equal parts.

    ``names`` stands for the GPUs in the message: their names, or the option that counts them. Raises a LaunchError if
    there are too few GPUs, or they can't be divided evenly.
    """
    each = devices_per_worker or 1
    if gpus < workers * each:
        raise LaunchError(
            f"--workers {workers} with {each} GPU(s) each need {workers * each} GPUs, and there are {gpus} ({names}). "
            "--workers counts those of one machine: start fewer there, or set JAX_PLATFORMS=cpu to emulate devices"
        )
    if devices_per_worker is None and gpus % workers:
        raise LaunchError(
            f"{gpus} GPUs can't be divided evenly among {workers} workers: say with --devices-per-worker how many "
            f"each is to have ({gpus // workers} leaves {gpus % workers} unused)"
        )
    return devices_per_worker or gpus // workers


def _gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that this process may use; ``None`` if JAX would not use any."""
    platforms = environment.get("JAX_PLATFORMS", "").lower().split(",")
    asked_for = bool({"cuda", "gpu"} & set(platforms))
    if not asked_for and (platforms != [""] or all(importlib.util.find_spec(name) is None for name in _PLUGINS)):
        return None
    visible = environment.get(_GPU)
    if visible is not None:
        # As in CUDA: an index that does not exist hides all that follow it.
        names = [name.strip() for name in visible.split(",")]
        gpus = names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))]
    else:
        numbers = [int(m[1]) for path in Path("/dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))]
        gpus = [str(i) for i in range(len(numbers))]  # CUDA numbers what it finds from 0, whatever the names in /dev
    return gpus if gpus or asked_for else None
