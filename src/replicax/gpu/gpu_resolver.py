"""``GPUClusterResolver``: describes GPUs that are not there, finds those that are, or emulates some."""

from __future__ import annotations

import re

import jax
import numpy as np

from replicax import _jax
from replicax.cluster.accelerators import AcceleratorResolver, attached_devices, devices_by_process, emulated_devices
from replicax.cluster.spec import ClusterSpec
from replicax.devices.mesh import describe_slices
from replicax.gpu.cuda_compiler import described_devices
from replicax.gpu.gpu_models import GpuModel, model_of, parse_cluster
from replicax.system.quantities import counted


@_jax.hiding_frames_of
class GPUClusterResolver(AcceleratorResolver):
    """Finds the NVIDIA GPUs and their hosts, or describes ones that are not there.

    Every strategy takes its ``devices``: ``MirroredStrategy(resolver.devices)``. GPUs that NVLink joins (those of a
    host; of GB200, of 18 hosts) count as one slice, so :class:`GroupPartitioner` makes a group of them by default.
    Emulated GPUs are CPU devices, which have no hosts: ``GroupPartitioner(resolver.num_gpus_per_host)``.

    Args:
      topology: for planning: GPUs that are not there, as hosts x GPUs of each, ``"h100:16x8"``; ``"h100:8"`` is one
        host. Or a machine that a cloud sells, and how many, ``"a3-megagpu-8g:16"``. Steps can be compiled for them, by
        XLA's compiler for GPUs, which needs the extra ``replicax[gpu-plan]`` and neither a GPU nor CUDA.
      emulate: for running with no GPU: hosts x GPUs of each, ``"2x4"``, as CPU devices. Or the name of a topology. Call
        it before anything asks JAX for a device, as :func:`use_cpu_devices`, which it calls.

    Without an argument it finds the GPUs that JAX drives: those of this machine; after :func:`initialize_workers` those
    of all workers.

    Attributes:
      model: what the GPUs are (``name``, ``memory``, …); ``None`` if that is not known.
      devices: the JAX devices: an array ``[hosts, GPUs of each]``; of GPUs that are found ``[processes, …]``.
      kind: ``"absent"``: steps can be compiled for them, and not run; ``"emulated"``; or ``"attached"``.
      task_type: the name of the job, ``"worker"``.
      task_id: which worker this process is.

    Raises:
      ValueError: there is no such GPU or machine, and the message has the right name where one sounds alike; both
        arguments; processes drive different numbers of GPUs.
      RuntimeError: there is no GPU; the extra is missing or of another version than JAX; JAX has made its devices
        already, and they are too few to emulate.

    >>> import replicax
    >>> resolver = replicax.GPUClusterResolver(emulate="2x4")
    >>> resolver, resolver.devices.shape, resolver.num_accelerators()
    (GPUClusterResolver(2 hosts x 4 GPUs, emulated), (2, 4), {'GPU': 4})
    >>> replicax.MirroredStrategy(resolver.devices).num_replicas_in_sync
    8
    """

    accelerator = "GPU"

    def __init__(self, topology: str | None = None, *, emulate: str | None = None) -> None:
        if topology and emulate:
            raise ValueError(
                "GPUClusterResolver: give one of topology (to plan) and emulate (to run on CPU devices), got "
                f"topology={topology!r}, emulate={emulate!r}"
            )
        self.model: GpuModel | None
        if topology is not None:
            self.model, hosts, gpus = parse_cluster(topology)
            found = np.array(_absent(self.model, hosts, gpus), dtype=object)
            kind = "absent"
        elif emulate is not None:
            self.model, hosts, gpus = _parse_emulated(emulate)
            need = f"{hosts} host(s) with {gpus} GPU(s) each take {hosts * gpus} CPU devices to emulate"
            found = emulated_devices(hosts * gpus, need)
            kind = "emulated"
        else:
            found = devices_by_process(_attached_gpus(), "GPUs")
            hosts, gpus = found.shape
            self.model = model_of(found.flat[0].device_kind)
            kind = "attached"
        super().__init__(found.reshape(hosts, gpus), kind)

    @property
    def environment(self) -> str:
        """The place of the devices: ``"absent"``, ``"emulated"`` or ``"local"``."""
        return "local" if self.kind == "attached" else self.kind

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return int(self.devices.shape[0])

    @property
    def num_gpus_per_host(self) -> int:
        """The number of GPUs of each host."""
        return int(self.devices.shape[1])

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({})

    def __repr__(self) -> str:
        gpus = self.num_gpus_per_host
        what = counted(gpus, "GPU") if self.model is None else f"{gpus} {self.model.name}"
        return f"GPUClusterResolver({counted(self.num_hosts, 'host')} x {what}, {self.kind})"


def _absent(model: GpuModel, hosts: int, gpus: int) -> list[jax.Device]:
    per_domain = min(hosts, model.hosts_per_domain)
    describe_slices(model.device_kind, per_domain)
    return described_devices(model.target_config(), f"{hosts // per_domain}x{per_domain}x{gpus}")


def _parse_emulated(text: str) -> tuple[GpuModel | None, int, int]:
    if not isinstance(text, str):
        raise ValueError(f"GPUClusterResolver: emulate must be a string such as '2x4', got {text!r}")
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
        return None, int(match[1]), int(match[2])
    if text[:1].isdigit():
        raise ValueError(
            f"GPUClusterResolver(emulate={text!r}): expected hosts x GPUs of each, such as '2x4', or the name of a "
            "topology, such as 'h100:2x4'"
        )
    return parse_cluster(text)


def _attached_gpus() -> list[jax.Device]:
    return attached_devices(
        "gpu",
        "To compile for GPUs that are not there: GPUClusterResolver(topology='h100:8'); to run with none, emulate "
        "some: GPUClusterResolver(emulate='1x8'). On a machine with GPUs, install 'jax[cuda12]', and "
        "leave JAX_PLATFORMS unset.",
    )
