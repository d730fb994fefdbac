"""XLA's compiler for NVIDIA GPUs, which needs none: its package, and the devices that it describes."""

from __future__ import annotations

import importlib
import importlib.metadata

import jax
import jaxlib.version
from jax.experimental import topologies

from replicax.gpu.compile_process import CompileProcess
from replicax.system.driver_lines import without_driver_lines
from replicax.system.environment import environment_defaults

_PLUGINS = {"jax-cuda12-plugin": "jax_plugins.xla_cuda12", "jax-cuda13-plugin": "jax_plugins.xla_cuda13"}
"""Packages, and the modules in which JAX looks for their ``initialize``."""


def described_devices(target_config: str, topology: str) -> list[jax.Device]:
    """Devices that programs can be compiled for, and that are not there.

    ``target_config`` describes each GPU: see :meth:`GpuModel.target_config`. ``topology`` is the numbers of NVLink
    domains, hosts of each, and GPUs of each host, such as ``"16x1x8"``. Raises a RuntimeError if the packages of
    ``replicax[gpu-plan]`` are missing, or of another version than jaxlib.
    """
    devices = _described_gpus(target_config, topology)
    _processes.append((devices[0].client, CompileProcess(target_config, topology)))
    return devices


def compile_process(device: jax.Device) -> CompileProcess | None:
    """The process that compiles for a described GPU; ``None`` for other devices."""
    return next((process for client, process in _processes if client is device.client), None)


_processes: list[tuple[object, CompileProcess]] = []


def _described_gpus(target_config: str, topology: str) -> list[jax.Device]:
    module = _checked_plugin()
    # Without this the plugin wants CUDA's libraries, of which compiling needs none.
    with environment_defaults({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
        try:
            return _devices(target_config, topology)
        except NotImplementedError:
            # JAX has asked the plugin before, as for its list of devices; the plugin then gave up for want of CUDA.
            importlib.import_module(module).initialize()
            return _devices(target_config, topology)


def _devices(target_config: str, topology: str) -> list[jax.Device]:
    with without_driver_lines():
        found = topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=topology)
    return list(found.devices)


def _checked_plugin() -> str:
    """The module of the plugin; raises as :func:`described_devices`."""
    cure = "pip install 'replicax[gpu-plan]'. Neither a GPU nor CUDA is needed"
    needed = jaxlib.version.__version__
    for package, module in _PLUGINS.items():
        parts = (package, package.replace("-plugin", "-pjrt"))
        try:
            versions = {part: importlib.metadata.version(part) for part in parts}
        except importlib.metadata.PackageNotFoundError:
            continue
        for part, version in versions.items():
            if version != needed:
                raise RuntimeError(
                    f"plans for GPUs need {part} of jaxlib's version: jaxlib is {needed}, and {part} is {version}: "
                    f"{cure}"
                )
        return module
    raise RuntimeError(
        f"plans for GPUs need XLA's compiler for them, in jax-cuda12-plugin and jax-cuda12-pjrt {needed}, which are "
        f"not installed: {cure}"
    )
