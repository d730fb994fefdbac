"""Chooses devices by name, and emulates CPU devices."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import jax
import numpy as np

from replicax import _jax
from replicax.argument_checks import as_integer, checked_integer
from replicax.devices.cpu_arithmetic import fix_arithmetic
from replicax.devices.mesh import is_here
from replicax.system.environment import thread_limit, threads_for

_NAME = re.compile(r"/?(?P<owner>(?:\w+:\w+/)*)(?:device:)?(?P<platform>[a-zA-Z]+)(?::(?P<index>\d+))?")


@_jax.hiding_frames
def use_cpu_devices(n: int) -> None:
    """Emulate ``n`` CPU devices, so that code for many devices runs on one machine.

    Call it once, before any code asks JAX for a device. Besides the number of devices it sets how many threads
    XLA may use (the environment variable ``NPROC``): with fewer than two a device, replicas that communicate in a
    collective wait for each other for ever. JAX then uses the CPU even if it finds an accelerator.

    With several processes, each calls it before ``jax.distributed.initialize``, and gets its own devices.

    Args:
      n: the number of devices, at least 1.

    Raises:
      ValueError: ``n`` is not a positive integer.
      RuntimeError: JAX has created its devices already, and they are not ``n`` CPU devices.

    >>> import replicax
    >>> replicax.use_cpu_devices(8)  # a second call with the same number does nothing
    """
    n = checked_integer(n, "use_cpu_devices(n): n")
    threads = threads_for(n)
    if _jax.backends_are_initialized():
        devices = jax.local_devices()
        ready = devices[0].platform == "cpu" and len(devices) == n
        if ready and (n == 1 or thread_limit() >= threads):
            return
        have = f"{len(devices)} {devices[0].platform} device(s)"
        if ready:
            have += f" whose thread pool may be too small for collectives ({thread_limit()} threads)"
        instead = ""
        if n % len(devices) == 0:
            instead = f" Or run several replicas on each device: replicax.MirroredStrategy(num_replicas={n})."
        raise RuntimeError(
            f"use_cpu_devices({n}) comes too late: JAX has already made its devices, {have}. Call it at the "
            "top of the program, before any array is made and before jax.devices() is called; in a notebook, restart "
            f"the kernel.{instead}"
        )
    os.environ["NPROC"] = str(max(threads, thread_limit()))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)


def resolve_devices(
    devices: Sequence[str | jax.Device] | np.ndarray | None,
    reproducible: bool = False,
    num_replicas: int | None = None,
) -> tuple[jax.Device, ...]:
    """The devices that ``devices`` names, in order; ``None`` names all local ones.

    JAX creates its devices here, unless it has already. ``devices`` are JAX devices, or strings such as ``"cpu:1"``,
    ``"/gpu:0"``, ``"/device:GPU:0"`` or ``"/job:worker/task:1/device:GPU:0"``, which only worker 1 may name; an array
    of devices keeps its order. If ``reproducible``, CPU devices must compute as in any process with as many replicas:
    ``num_replicas`` on the devices of all workers, if that is known.

    Raises:
      ValueError: a device is named twice, does not exist (the message lists those that do) or belongs to another
        worker; the devices are of several platforms or topologies; or the list is empty.
      TypeError: an entry is neither a string nor a device.
    """
    if isinstance(devices, np.ndarray):
        devices = devices.ravel().tolist()
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
        cure = f"for one device: [{devices!r}]"
        if hasattr(devices, "devices"):  # a cluster resolver
            cure = "a cluster resolver has them as its attribute devices: pass resolver.devices"
        elif as_integer(devices) is not None:
            cure = (
                f"name them, as in ['gpu:0', 'gpu:1']; replicax.use_cpu_devices({devices}), called first, emulates "
                f"{devices}; num_replicas={devices} puts several replicas on each device"
            )
        raise TypeError(f"devices must be a list of devices or None, got {devices!r}; {cure}")
    if devices is not None and not devices:
        raise ValueError("devices is empty: name at least one, or pass None for all local devices")
    if reproducible is True and _will_be_cpus(devices):
        fix_arithmetic(num_replicas)
    if devices is None:
        return _local_devices()
    resolved = tuple(resolve_device(d) for d in devices)
    first: dict[jax.Device, int] = {}
    for i, device in enumerate(resolved):
        if first.setdefault(device, i) < i:
            raise ValueError(
                f"devices names {_name(device)} twice (entries {first[device]} and {i}): each replica needs "
                "a device of its own. replicax.use_cpu_devices(n) emulates more CPU devices."
            )
        if device.client is not resolved[0].client:
            raise ValueError(
                f"devices names {_name(resolved[0])} ({resolved[0].device_kind}) and {_name(device)} "
                f"({device.device_kind}; entry {i}), and no program runs on both: name devices of one platform, and, "
                "for a plan, of one topology"
            )
    return resolved


def resolve_device(device: str | jax.Device) -> jax.Device:
    """One device, from a JAX device or its name. Raises as :func:`resolve_devices` does."""
    if isinstance(device, jax.Device):
        if device.process_index != jax.process_index() and not _jax.is_absent(device):
            raise ValueError(
                f"{_name(device)} belongs to process {device.process_index}, and this is process "
                f"{jax.process_index()}: each names its own. replicax.MultiWorkerMirroredStrategy is the strategy for "
                "the devices of several"
            )
        return device
    if not isinstance(device, str):
        raise TypeError(f"a device is a jax.Device or a string such as 'cpu:0', got {device!r}")
    available, hint = list(_local_devices()), "replicax.use_cpu_devices(n) emulates more CPU devices"
    if match := _NAME.fullmatch(device):
        _check_owner(match["owner"] or "", device)
        platform, index = match["platform"].lower(), int(match["index"] or 0)
        try:
            available = list(filter(is_here, jax.devices(platform)))
        except RuntimeError:
            hint = f"JAX finds no {platform}: run `replicax doctor` to see why"
        else:
            if index < len(available):
                return available[index]
    raise ValueError(
        f"there is no device {device!r}; available: {', '.join(map(_name, available))}"
        + (f". {hint}." if available[0].platform == "cpu" else "")
    )


def grouped_by_replica(devices: Sequence[jax.Device], num_logical_devices: int) -> np.ndarray:
    """The devices of each replica, ``[replicas, logical devices]``: as many for each, in the order of ``devices``."""
    if as_integer(num_logical_devices) is None:
        raise TypeError(f"num_logical_devices must be an int, got {num_logical_devices!r}")
    if num_logical_devices < 1 or len(devices) % num_logical_devices:
        raise ValueError(
            f"num_logical_devices must divide the number of devices, so that each replica has as many: got "
            f"{num_logical_devices} for {len(devices)} device(s), {', '.join(map(_name, devices))}"
        )
    replicas = np.array(devices, dtype=object)
    return replicas.reshape(-1, num_logical_devices)


def _will_be_cpus(devices: Sequence[str | jax.Device] | None) -> bool:
    """Whether the devices will be CPUs, as far as is known before JAX creates them."""
    if devices is None:
        return _jax.default_platform_is_cpu()
    names = [_NAME.fullmatch(d) if isinstance(d, str) else None for d in devices]
    return all(name is not None and name["platform"].lower() == "cpu" for name in names)


def _check_owner(owner: str, device: str) -> None:
    """Raise a ValueError unless ``owner``, as in ``"job:worker/task:1/"``, is this process."""
    index, count = jax.process_index(), jax.process_count()
    for part in owner.split("/")[:-1]:
        name, value = part.split(":")
        accepted = {"job": ("worker", "localhost"), "replica": ("0",), "task": tuple(map(str, range(count)))}.get(name)
        if accepted is None or value not in accepted:
            there_are = f"has {name} {' or '.join(map(repr, accepted))} only" if accepted else f"knows no {name!r}"
            raise ValueError(
                f"there is no device {device!r}: this program, of {count} process(es), {there_are}. A full name is "
                f"'/job:worker/task:{index}/device:CPU:0'"
            )
        if name == "task" and value != str(index):
            raise ValueError(
                f"{device!r} belongs to worker {value}, and this is worker {index}: each names its own devices. "
                "replicax.MultiWorkerMirroredStrategy is the strategy for the devices of several"
            )


def _local_devices() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.local_devices())
    except AssertionError as error:  # JAX raises it if the chosen platform has no device
        raise ValueError(f"JAX has no device of the platform {_jax.setting('jax_platforms')!r}") from error


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"
