"""The GPUs that plans know: the input of XLA's compiler for each, and the figures for estimates.

Sources, by the key that :class:`GpuModel` has. Data sheets give tensor-core figures with 2:4 sparsity; the figures here
are dense, half of those. Memory is what the driver shows, which is less than what is on the box.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from replicax.gpu.cloud_machines import MACHINES

SOURCES = {
    "cuda": "CUDA C++ Programming Guide, technical specifications per compute capability: threads, registers and "
    "shared memory of an SM",
    "xla": "target configurations in XLA's repository (xla/backends/gpu/target_config/specs): SMs, clocks, caches and "
    "memory as the driver shows them",
    "a100": "NVIDIA A100 Tensor Core GPU data sheet, 2021, https://www.nvidia.com/en-us/data-center/a100",
    "h100": "NVIDIA H100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h100",
    "h200": "NVIDIA H200 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h200",
    "gh200": "NVIDIA GH200 Grace Hopper Superchip data sheet, 2023, "
    "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip",
    "blackwell": "NVIDIA Blackwell architecture technical brief, 2024, tables of HGX B200 and GB200, "
    "https://resources.nvidia.com/en-us-blackwell-architecture",
    "l4": "NVIDIA L4 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/l4",
    "l40s": "NVIDIA L40S GPU data sheet, https://www.nvidia.com/en-us/data-center/l40s",
    "a10g": "NVIDIA A10G data sheet; AWS, instances of the type G5, https://aws.amazon.com/ec2/instance-types/g5",
    "ada": "NVIDIA Ada GPU architecture white paper, 2022, appendix A (GeForce RTX 4090)",
    "rtx": "NVIDIA RTX Blackwell GPU architecture white paper, 2025, appendix A (GeForce RTX 5090)",
    "links": "bandwidth of NVLink and PCIe, one way: S. Bekman, Machine Learning Engineering, network, "
    "https://github.com/stas00/ml-engineering",
    "network": "the usual network between hosts: one adapter for each GPU in NVIDIA's DGX A100 (200 Gb/s), DGX H100, "
    "DGX H200, DGX B200 and DGX GB200 (400 Gb/s) user guides; for the others the instances that clouds sell "
    "(docs/plan_devices.md)",
}


@dataclasses.dataclass(frozen=True)
class SM:
    """A streaming multiprocessor of one compute capability: key ``"cuda"`` of the sources."""

    shared: int  # its shared memory, in KiB; a block may use 1 KiB less
    threads: int  # the number that it keeps
    lanes: int  # float32 units
    is_accelerated: bool = False  # whether it has instructions that no other compute capability has
    # The share of its peak that large matrix products reach for hours: where it is not the usual one, fitted, see
    # ``benchmarks/published_runs.py``.
    sustained: float = 0.8


_SMS = {
    (8, 0): SM(164, 2048, 64, sustained=0.85),
    (8, 6): SM(100, 1536, 128),
    (8, 9): SM(100, 1536, 128),
    (9, 0): SM(228, 2048, 128, is_accelerated=True, sustained=0.72),
    (10, 0): SM(228, 2048, 128, is_accelerated=True),
    (12, 0): SM(100, 1536, 128),
}


@dataclasses.dataclass(frozen=True)
class GpuModel:
    """One kind of GPU.

    Attributes:
      name: as in the names of topologies: ``"h100"`` in ``"h100:16x8"``.
      device_kind: ``jax.Device.device_kind`` of real ones.
      capability: the compute capability.
      sms: how many streaming multiprocessors it has.
      clock: the highest, in GHz.
      l2: the size of its cache, in bytes.
      memory: the size of its main memory, in bytes.
      bandwidth: the bandwidth of its main memory, in bytes per second.
      peaks: FLOPs per second of matrix products by dtype, as HLO calls them (``"bf16"``, ``"f8"``, …) and ``"tf32"``:
        dense ones, with sums in float32.
      link: what it sends to the GPUs beside it over all NVLinks, or else over PCIe, in bytes per second.
      nvlinks: how many NVLinks it has; 0: PCIe only.
      network: what it sends to other hosts, in bytes per second.
      host: what it reads from its host's memory, or writes there, in bytes per second: over PCIe, or NVLink-C2C.
      per_host: how many a host has, at most.
      hosts_per_domain: how many hosts NVLink joins to one domain.
      sources: keys of :data:`SOURCES`.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    sms: int
    clock: float
    l2: int
    memory: int
    bandwidth: float
    peaks: Mapping[str, float]
    link: float
    nvlinks: int
    network: float
    sources: tuple[str, ...]
    host: float = 63e9  # of PCIe 5
    per_host: int = 8
    hosts_per_domain: int = 1

    @property
    def sm(self) -> SM:
        """What one of its streaming multiprocessors has."""
        return _SMS[self.capability]

    def target_config(self) -> str:
        """The description that XLA's compiler takes for a GPU: a ``GpuTargetConfigProto`` as text."""
        sm = self.sm
        major, minor = self.capability
        accelerated = "ACCELERATED_FEATURES" if sm.is_accelerated else "NONE"
        links = f"device_interconnect_info {{ active_links: {self.nvlinks} }}" if self.nvlinks else ""
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {sm.threads}
  shared_memory_per_block: {48 << 10} shared_memory_per_core: {sm.shared << 10}
  shared_memory_per_block_optin: {(sm.shared - 1) << 10}
  core_count: {self.sms} fpus_per_core: {sm.lanes} clock_rate_ghz: {self.clock}
  block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {int(self.bandwidth)} device_memory_size: {self.memory} l2_cache_size: {self.l2}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {accelerated} }}
  device_vendor: "NVIDIA Corporation" name: "{self.device_kind}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  {links}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.device_kind}"
"""


def _peaks(bf16: float, tf32: float, f32: float, f64: float, f8: float = 0.0, s8: float = 0.0) -> dict[str, float]:
    """TFLOPs per second, as data sheets give them."""
    given = {"bf16": bf16, "f16": bf16, "tf32": tf32, "f32": f32, "f64": f64, "f8": f8, "s8": s8 or f8}
    return {dtype: tera * 1e12 for dtype, tera in given.items() if tera}


_MIB = 2**20
_A100 = _peaks(312, 156, 19.5, 19.5, s8=624)
_H100 = _peaks(989.4, 494.7, 66.9, 66.9, 1978.9)
_PCIE4, _PCIE5 = 31.5e9, 63e9
_GBIT = 1e9 / 8

MODELS = {
    model.name: model
    for model in (
        GpuModel(
            "a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 40 * _MIB, 42331013120, 1555.2e9, _A100,
            300e9, 12, 200 * _GBIT, ("a100", "xla", "cuda", "links", "network"), _PCIE4, per_host=16,
        ),
        GpuModel(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 40 * _MIB, 85100068864, 2039.04e9, _A100,
            300e9, 12, 200 * _GBIT, ("a100", "xla", "cuda", "links", "network"), _PCIE4,
        ),
        GpuModel(
            "h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 50 * _MIB, 84942979072, 3352.32e9, _H100,
            450e9, 18, 400 * _GBIT, ("h100", "xla", "cuda", "links", "network"),
        ),
        GpuModel(
            "h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 1.755, 50 * _MIB, 84942979072, 2039.04e9,
            _peaks(756, 378, 51, 51, 1513), _PCIE5, 0, 200 * _GBIT, ("h100", "xla", "cuda", "links", "network"),
        ),
        GpuModel(
            "h200", "NVIDIA H200", (9, 0), 132, 1.98, 50 * _MIB, 151397597184, 4800e9, _H100,
            450e9, 18, 400 * _GBIT, ("h200", "xla", "cuda", "links", "network"),
        ),
        GpuModel(
            "gh200", "NVIDIA GH200 480GB", (9, 0), 132, 1.98, 50 * _MIB, 101468602368, 4000e9, _H100,
            450e9, 0, 400 * _GBIT, ("gh200", "cuda", "links"), 450e9, per_host=1,
        ),
        GpuModel(
            "b200", "NVIDIA B200", (10, 0), 148, 1.965, 132644864, 191514411008, 7672.32e9,
            _peaks(2250, 1125, 80, 40, 4500), 900e9, 18, 400 * _GBIT, ("blackwell", "xla", "cuda", "links", "network"),
        ),
        GpuModel(
            "gb200", "NVIDIA GB200", (10, 0), 152, 2.062, 135528448, 197897748480, 7928.064e9,
            _peaks(2500, 1250, 90, 45, 5000), 900e9, 18, 400 * _GBIT, ("blackwell", "xla", "cuda", "links", "network"),
            225e9, per_host=4, hosts_per_domain=18,
        ),
        GpuModel(
            "l4", "NVIDIA L4", (8, 9), 58, 2.04, 48 * _MIB, 23034 * _MIB, 300e9,
            _peaks(121, 60, 30.3, 0.47, 242.5), _PCIE4, 0, 100 * _GBIT / 8, ("l4", "cuda", "links", "network"), _PCIE4,
        ),
        GpuModel(
            "l40s", "NVIDIA L40S", (8, 9), 142, 2.52, 96 * _MIB, 46068 * _MIB, 864e9,
            _peaks(362, 183, 91.6, 1.43, 733), _PCIE4, 0, 400 * _GBIT / 8, ("l40s", "cuda", "links", "network"), _PCIE4,
        ),
        GpuModel(
            "a10g", "NVIDIA A10G", (8, 6), 80, 1.71, 6 * _MIB, 23028 * _MIB, 600e9,
            _peaks(70, 35, 35, 0.55, s8=140), _PCIE4, 0, 100 * _GBIT / 8, ("a10g", "cuda", "links", "network"), _PCIE4,
        ),
        GpuModel(
            "rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 72 * _MIB, 24564 * _MIB, 1008e9,
            _peaks(165.2, 82.6, 82.6, 1.29, 330.3, 660.6), _PCIE4, 0, 10 * _GBIT, ("ada", "cuda", "links"), _PCIE4,
        ),
        GpuModel(
            "rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 96 * _MIB, 32607 * _MIB, 1792e9,
            _peaks(209.5, 104.8, 104.8, 1.64, 419, 838), _PCIE5, 0, 10 * _GBIT, ("rtx", "cuda", "links"),
        ),
    )
}  # fmt: skip
"""By name."""

_ALIASES = {
    "h100-sxm": "h100", "h100-80gb": "h100", "h100-sxm5": "h100", "a100-sxm-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb", "h200-sxm": "h200", "rtx-4090": "rtx4090", "rtx-5090": "rtx5090", "4090": "rtx4090",
    "5090": "rtx5090", "gb200-nvl72": "gb200",
}  # fmt: skip


def gpu_model(name: str) -> GpuModel:
    """The model of that name.

    >>> gpu_model("h100").sms
    132
    """
    wanted = name.lower().replace("_", "-").removeprefix("nvidia-")
    if model := MODELS.get(_ALIASES.get(wanted, wanted)):
        return model
    alike = [known for known in MODELS if known.startswith(wanted)] if wanted else []
    alike = alike or difflib.get_close_matches(wanted, MODELS)
    hint = f"; did you mean {' or '.join(alike)}?" if alike else ";"
    raise ValueError(
        f"no GPU is called {name!r}{hint} known: {', '.join(MODELS)}; TPUs are called v5e:4x4, v5p:2x2x2, …"
    )


def model_of(device_kind: str) -> GpuModel | None:
    """The model whose devices are of ``device_kind``; ``None`` for what is no known GPU."""
    return next((model for model in MODELS.values() if model.device_kind == device_kind), None)


def is_gpu_topology(name: Any) -> bool:
    """Return whether a topology is meant to be of GPUs, rather than of TPUs: its model, or machine, is one of them.

    >>> is_gpu_topology("h100:8"), is_gpu_topology("p5.48xlarge"), is_gpu_topology("v5p:4x4x4")
    (True, True, False)
    """
    model = str(name).partition(":")[0].lower()
    return model in MACHINES or not re.fullmatch(r"v\d{1,2}(?!\d)[\w-]*|tpu[\w-]*", model)


def parse_cluster(name: str) -> tuple[GpuModel, int, int]:
    """The model, the number of hosts and of GPUs on each, that a name means.

    Args:
      name: ``"h100:16x8"``, 16 hosts with 8 GPUs each; ``"h100:8"``, one host; or a machine that a cloud sells, such as
        ``"a3-megagpu-8g"``, with how many: ``"a3-megagpu-8g:16"``.

    >>> [(model.name, hosts, gpus) for model, hosts, gpus in map(parse_cluster, ("h100:16x8", "p5.48xlarge:2"))]
    [('h100', 16, 8), ('h100', 2, 8)]
    """
    kind, colon, shape = str(name).partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape) else []
    if machine := MACHINES.get(kind.lower()):
        model, gpus = MODELS[machine[0]], machine[1]
        if colon and len(sizes) != 1:
            raise ValueError(
                f"{name!r}: {kind} is a machine with {gpus} {model.name} GPU(s); say how many machines, such as "
                f"'{kind}:2', or write '{model.name}:2x{gpus}'"
            )
        return _checked_cluster(str(name), model, sizes[0] if sizes else 1, gpus)
    try:
        model = gpu_model(kind)
    except ValueError as error:
        machines = difflib.get_close_matches(kind.lower(), MACHINES, 2)
        more = f"; of machines, {' and '.join(machines)} sound like it" if machines else ""
        raise ValueError(f"{name!r} is no cluster of GPUs: {error}{more}") from None
    if not sizes:
        raise ValueError(
            f"{name!r} is no cluster of GPUs: expected hosts x GPUs of each, such as "
            f"'{model.name}:2x{model.per_host}', or the GPUs of one host, such as '{model.name}:{model.per_host}'"
        )
    return _checked_cluster(str(name), model, *(sizes if len(sizes) == 2 else (1, sizes[0])))


def _checked_cluster(name: str, model: GpuModel, hosts: int, gpus: int) -> tuple[GpuModel, int, int]:
    if gpus > model.per_host:
        each = next(n for n in range(model.per_host, 0, -1) if hosts * gpus % n == 0)
        raise ValueError(
            f"{name!r}: a host has at most {model.per_host} {model.name} GPUs, got {gpus}; for {hosts * gpus} GPUs "
            f"write '{model.name}:{hosts * gpus // each}x{each}'"
        )
    domain = model.hosts_per_domain
    if hosts > domain and hosts % domain:
        raise ValueError(
            f"{name!r}: NVLink joins {domain} hosts of {model.name}, and {hosts} hosts do not fill whole domains: use "
            f"at most {domain}, or a multiple, such as '{model.name}:{-(-hosts // domain) * domain}x{gpus}'"
        )
    return model, hosts, gpus
