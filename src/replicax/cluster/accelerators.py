"""The common part of the resolvers of GPUs and of TPUs: devices that are there, emulated, or only described."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from replicax import _jax
from replicax.cluster.resolver import ClusterResolver
from replicax.devices.selection import use_cpu_devices
from replicax.errors import described

JOB = "worker"
"""The job of the processes that drive accelerators."""


@_jax.hiding_frames_of
class AcceleratorResolver(ClusterResolver):
    """The base of the resolvers of one kind of accelerator, of which all workers drive the same number.

    Args:
      devices: the JAX devices: ``[workers, devices of each]``.
      kind: ``"attached"``, ``"emulated"`` or ``"absent"``.

    Attributes:
      accelerator: ``"GPU"`` or ``"TPU"``; each class sets it.
    """

    accelerator: ClassVar[str]

    def __init__(self, devices: np.ndarray, kind: str) -> None:
        self.devices = devices
        self.kind = kind
        super().__init__(JOB, jax.process_index() if kind == "attached" else 0)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """The number of devices that each worker drives, by kind: ``{"TPU": 8}``.

        Args:
          task_type: only ``"worker"``, or ``None``.
          task_id: any of the workers: all drive the same number.

        Raises:
          ValueError: there is no such worker.
        """
        self._check_task(task_type, task_id)
        return {self.accelerator: self.devices.shape[1]}

    def _check_task(self, task_type: str | None, task_id: int | None) -> None:
        if task_type not in (None, JOB):
            raise ValueError(f"there is no job {task_type!r}: the {self.accelerator}s belong to the job {JOB!r}")
        if task_id is not None and not 0 <= task_id < len(self.devices):
            raise ValueError(f"there is no worker {task_id}: there are {len(self.devices)}, numbered from 0")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is immutable, and devices can't be copied


def emulated_devices(count: int, need: str) -> np.ndarray:
    """Return ``count`` CPU devices. If JAX has made too few already, the message of the error begins with ``need``."""
    if not _jax.backends_are_initialized() and _jax.setting("jax_num_cpu_devices") < count:
        use_cpu_devices(count)  # otherwise use the devices that were requested before
    have = jax.local_devices(backend="cpu")
    if len(have) < count:
        raise RuntimeError(
            f"{need}, but JAX has already made its devices, and {len(have)} of them are CPUs. Make the resolver, or "
            f"call replicax.use_cpu_devices({count}), at the top of the program."
        )
    return np.array(have[:count], dtype=object)


def attached_devices(platform: str, to_do: str) -> list[jax.Device]:
    """The devices of a platform that JAX drives; if there are none, the message of the error ends with ``to_do``."""
    try:
        return list(jax.devices(platform))
    except _FAILURES as error:
        raise RuntimeError(f"there is no {platform.upper()}: {_what_there_is()}. {to_do}") from error


_FAILURES = RuntimeError, AssertionError
"""JAX's, the second if it has no plugin for a platform that ``JAX_PLATFORMS`` names."""


def _what_there_is() -> str:
    try:
        return "JAX has " + ", ".join(f"{d.platform}:{d.id}" for d in jax.devices()[:8])
    except _FAILURES as error:
        return f"JAX has no devices for jax_platforms={_jax.setting('jax_platforms')!r} ({described(error)})"


def devices_by_process(devices: Sequence[jax.Device], what: str) -> np.ndarray:
    """The devices, which messages call ``what``, in the order of their ids: ``[processes, devices of each]``."""
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    driven = {process: list(its) for process, its in itertools.groupby(ordered, key=lambda d: d.process_index)}
    if len({len(its) for its in driven.values()}) > 1:
        each = ", ".join(f"process {process} has {len(its)}" for process, its in driven.items())
        raise ValueError(f"processes drive different numbers of {what}: {each}")
    return np.array(list(driven.values()), dtype=object)
