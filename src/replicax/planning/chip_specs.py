"""The chip table: what each generation of TPUs and each model of GPUs has, by public sources, for estimates.

Every estimate is made from these figures and from the formulas in :mod:`replicax.planning.estimate`; pass a
:class:`Chip` of your own to :func:`replicax.plan` where you know better, or for devices that are not in the table.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax.argument_checks import checked_integer, is_number
from replicax.devices.mesh import slice_of
from replicax.gpu.gpu_models import MODELS, SOURCES, model_of
from replicax.system.environment import FRACTION_VARIABLES, memory_fraction
from replicax.tpu.generations import generation_of

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Attributes:
      name: such as ``"v5p"``.
      flops: the peak of bfloat16 matrix products, in FLOPs per second.
      memory: the size of its main memory (HBM), in bytes.
      bandwidth: the bandwidth of its main memory, in bytes per second.
      link: the bandwidth of one link to another chip, one way, in bytes per second.
      links: how many it has.
      usable: how much of the main memory a program may use, in bytes; ``None`` means all of it.
      sources: where the figures are from.
      network: what it can send to chips of other slices (of GPUs: those that no NVLink joins), through the data-center
        network: its share of what its host can, in bytes per second; 0 if that is not known.
      host: what it reads from its host's memory, or writes there, in bytes per second; 0 if that is not known.
      arithmetic: what it computes besides matrix products, in FLOPs per second; 0: that is not counted.
      launch: what each operation takes besides its work, in seconds.
      meeting: what each collective takes besides its bytes, in seconds, where there are no links with hops.
      is_serial: whether the same processor computes, copies and communicates, so that nothing overlaps, as that of
        emulated devices. See :func:`replicax.planning.calibration.measured_chip`.
      peaks: of matrix products by dtype, as HLO calls them (``"f32"``, ``"f8"``, …) and ``"tf32"``, in FLOPs per
        second; empty where only ``flops`` is known.
      multiprocessors: of a GPU, how many compute tiles of a matrix product at a time; 0: its matrix units are one.
      sustained: the share of ``flops`` that large matrix products reach for hours, at the clocks that the chip's power
        and cooling allow.

    >>> import replicax
    >>> chip = replicax.planning.Chip("card", flops=1e15, memory=80e9, bandwidth=3.35e12, link=50e9, links=9)
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> replicax.plan(strategy, lambda: None, chip=chip).chip.name
    'card'
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float = 0.0
    links: int = 0
    usable: float | None = None
    sources: tuple[str, ...] = ()
    network: float = 0.0
    arithmetic: float = 0.0
    launch: float = 0.0
    meeting: float = 0.0
    is_serial: bool = False
    peaks: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    multiprocessors: int = 0
    sustained: float = 1.0
    host: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.peaks, Mapping):
            raise ValueError(f"Chip {self.name!r}: peaks must have a number for each dtype, got {self.peaks!r}")
        if not isinstance(self.sources, tuple | list) or not all(isinstance(source, str) for source in self.sources):
            raise ValueError(f"Chip {self.name!r}: sources must be a list of texts, got {self.sources!r}")
        above = {field: getattr(self, field) for field in ("flops", "memory", "bandwidth", "sustained")}
        above |= {f"peaks[{dtype!r}]": peak for dtype, peak in self.peaks.items()}
        above |= {} if self.usable is None else {"usable": self.usable}
        for field, value in above.items():
            if not (_is_number(value) and value > 0):
                raise ValueError(f"Chip {self.name!r}: {field} must be a finite number above 0, got {value!r}")
        for field in ("link", "links", "network", "host", "arithmetic", "launch", "meeting", "multiprocessors"):
            if not (_is_number(value := getattr(self, field)) and value >= 0):
                raise ValueError(f"Chip {self.name!r}: {field} must be a finite number, not below 0, got {value!r}")

    def share(self, devices: int) -> Chip:
        """Return what each of ``devices`` JAX devices of a chip has: an even share; links and network are common."""
        devices = checked_integer(devices, "Chip.share: devices")
        usable = None if self.usable is None else self.usable / devices
        return dataclasses.replace(
            self,
            flops=self.flops / devices,
            memory=self.memory / devices,
            bandwidth=self.bandwidth / devices,
            usable=usable,
            arithmetic=self.arithmetic / devices,
            peaks={dtype: peak / devices for dtype, peak in self.peaks.items()},
        )


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number below infinity."""
    return is_number(value) and bool(value <= sys.float_info.max)


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_CACM = "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7), 2020"
_V4 = "Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer, ISCA 2023, https://arxiv.org/abs/2304.01433"
_USABLE = "usable memory: what the compiler of libtpu 0.0.42 says that it has, when a program does not fit"

_LAUNCH = 2e-6  # seconds between two kernels of a GPU's stream

# Links: the documents give the sum over a chip's links and both ways; here it is one link, one way. The network: of v5e
# and v6e they give what a pod of 256 chips has, of v5p and TPU7x what a chip has, in bits; of earlier ones nothing.
CHIPS = {
    chip.name: dataclasses.replace(chip, sources=(*chip.sources, _USABLE))
    for chip in (
        Chip("v2", 46e12, 16 * _GIB, 700e9, 62e9, 4, 2 * 7.48 * _GIB, (_CACM,)),
        Chip("v3", 123e12, 32 * _GIB, 900e9, 82e9, 4, 2 * 15.48 * _GIB, (_CACM, _DOCS + "v3")),
        Chip("v4", 275e12, 32 * _GIB, 1200e9, 50e9, 6, 30.75 * _GIB, (_V4, _DOCS + "v4")),
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 50e9, 4, 15.75 * _GIB, (_DOCS + "v5e",), 25e9 / 8),
        Chip("v5p", 459e12, 95.74 * _GIB, 2765e9, 100e9, 6, 95.74 * _GIB, (_DOCS + "v5p",), 50e9 / 8),
        Chip("v6e", 918e12, 32 * _GIB, 1638e9, 100e9, 4, 31.25 * _GIB, (_DOCS + "v6e",), 100e9 / 8),
        Chip("tpu7x", 2307e12, 192 * _GIB, 7380e9, 100e9, 6, 2 * 94.75 * _GIB, (_DOCS + "tpu7x",), 100e9 / 8),
    )
} | {
    model.name: Chip(
        model.name,
        model.peaks["bf16"],
        model.memory,
        model.bandwidth,
        model.link / max(1, model.nvlinks),
        max(1, model.nvlinks),
        sources=tuple(SOURCES[key] for key in model.sources),
        network=model.network,
        launch=_LAUNCH,
        peaks=model.peaks,
        multiprocessors=model.sms,
        sustained=model.sm.sustained,
        host=model.host,
    )
    for model in MODELS.values()
}
"""By the name of the generation or the model, as in the names of topologies."""

MEMORY_FRACTION = FRACTION_VARIABLES[0]
"""The environment variable that tells JAX which part of a GPU's memory programs may use."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip whose devices are of that kind; ``None`` for what is not in the table.

    Of a GPU's memory JAX takes three quarters, or what :data:`MEMORY_FRACTION` says.

    >>> h100 = chip_of("NVIDIA H100 80GB HBM3")
    >>> h100.name, h100.usable / h100.memory
    ('h100', 0.75)
    """
    if (model := model_of(device_kind)) is not None:
        return dataclasses.replace(CHIPS[model.name], usable=model.memory * memory_fraction(os.environ))
    generation = generation_of(device_kind)
    return None if generation is None else CHIPS.get(generation.name)


def chip_and_share(devices: np.ndarray, given: Chip | None = None) -> tuple[Chip | None, Chip | None]:
    """The chip of these devices, ``given`` or from the table, and what each device has of it; ``None`` if unknown."""
    chip = given or chip_of(devices.flat[0].device_kind)
    if chip is None:
        return None, None
    places = {getattr(d, "coords", None) and (slice_of(d), *d.coords) for d in devices.flat}
    return chip, chip.share(1 if None in places else devices.size // len(places))
