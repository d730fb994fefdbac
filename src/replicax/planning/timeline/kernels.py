"""Predict the time of one kernel: the longer of its arithmetic and its reads and writes, at what kernels like it reach.

No kernel reaches a chip's peaks. ``EFFICIENCY`` has what each kind is known to reach of them on accelerators, beside
what the shape of a product costs (:mod:`replicax.planning.timeline.products`) and what the chip sustains
(``Chip.sustained``). None was fitted on the published runs that predictions are held against
(``benchmarks/published_runs.py``). Of a processor that was measured (``Chip.is_serial``) the figures are what its
kernels reach.
"""

from __future__ import annotations

import dataclasses

from replicax.hlo.executed import parts_of
from replicax.hlo.instructions import HOST_SPACE, Computation, Instruction, Module
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import bytes_moved, other_flops
from replicax.planning.timeline.attention import attention_of
from replicax.planning.timeline.products import peak_of, product_of, seconds_of_product

EFFICIENCY = {
    "product": 0.9,
    "elementwise": 0.9,
    "reduction": 0.85,
    "transposition": 0.75,
    "gather": 0.5,
    "sort": 0.1,
    "opaque": 0.8,
    "attention": 0.62,
    "attention, backward": 0.5,
}
"""Of the memory's bandwidth, by the kind of kernel; of attention, of the peak of products."""
HOST_SHARE = 0.87
"""Of the bandwidth to the host's memory, what copies over PCIe reach: 55 of 63 GB/s."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel."""

    kind: str  # one of those of ``EFFICIENCY``
    seconds: float  # its time, with its launch
    flops: int  # the flops of matrix products
    model_flops: int  # the same, without what the backward pass computes a second time
    at_peak: float  # seconds that these products take at the chip's peak for their dtype
    bytes: int  # read from and written to main memory
    # What takes longest: ``"compute"``, ``"memory"``, ``"host memory"``, ``"arithmetic"`` or ``"launch"``.
    bound_by: str


def kernel_of(module: Module, computation: Computation, instruction: Instruction, chip: Chip) -> Kernel:
    """The kernel that an instruction outside of fusions is."""
    parts = list(parts_of(module, computation, instruction))
    products = [p for home, part in parts if (p := product_of(part, home)) is not None]
    attention = attention_of(instruction, computation)
    moving = parts if instruction.opcode == "async-start" else [(computation, instruction)]
    size, offloaded = (sum(bytes_moved(module, *each, space) for each in moving) for space in (0, HOST_SPACE))
    kind = "product" if products else _kind_of({part.opcode for _, part in parts})
    compute = sum(seconds_of_product(p, chip) for p in products)
    flops = sum(p.flops for p in products)
    model_flops = sum(p.flops for p in products if not p.is_recomputed)
    at_peak = sum(p.flops / peak_of(p.arithmetic, chip) for p in products)
    efficiency = EFFICIENCY[kind]
    if attention is not None:
        kind = "attention, backward" if attention.is_backward else "attention"
        flops = attention.flops
        model_flops = 0 if instruction.is_recomputed else attention.model_flops
        at_peak = flops / chip.flops
        compute = at_peak / EFFICIENCY[kind]
    numbers = sum(other_flops(part, home) for home, part in parts) if chip.arithmetic else 0
    times = {
        "compute": compute,
        "memory": size / (chip.bandwidth * (1.0 if chip.is_serial else efficiency)),
        "host memory": offloaded / (chip.host * HOST_SHARE) if chip.host else 0.0,
        "arithmetic": numbers / (chip.arithmetic or 1.0),
        "launch": chip.launch,
    }
    bound_by = max(times, key=times.__getitem__)
    longest = max(times[what] for what in times if what != "launch") + times["launch"]
    seconds = sum(times.values()) if chip.is_serial else longest
    return Kernel(kind, seconds, flops, model_flops, at_peak, size, bound_by)


def _kind_of(opcodes: set[str]) -> str:
    for kind, marks in (
        ("sort", {"sort"}),
        ("gather", {"gather", "scatter"}),
        ("opaque", {"custom-call"}),
        ("reduction", {"reduce", "reduce-window"}),
        ("transposition", {"transpose"}),
    ):
        if opcodes & marks:
            return kind
    return "elementwise"
