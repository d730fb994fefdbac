"""Predict the time of a collective between GPUs: rings and trees over NVLink (or PCIe) and the network, as in NCCL.

With ``V`` the bytes that each GPU has when it is done (of a reduce-scatter, before), ``n`` GPUs in ``h`` domains that
NVLink joins (hosts, for most), and ``B`` the lesser of what a GPU sends over its links and what those of a domain send
into the network together:

==================  ======================================================================
ring                ``V (n - 1) / n / B`` and ``n - 1`` steps; an all-reduce twice that
tree, all-reduce    ``2 V / B`` and ``2 (n / h - 1)`` steps inside, ``2 log2 h`` between hosts
all-to-all          what stays on a host over its links, beside what leaves it over the network
permute, send       ``V`` over the slowest way that is used, and a step
==================  ======================================================================

A ragged all-to-all counts as if it filled its result: the program does not say how much it sends.

NCCL sends in one of three protocols, which trade bandwidth for time between steps, and the quickest is taken. Latencies
of steps, shares of bandwidths and what a link carries are those of NCCL's own tuning tables (``src/graph/tuning.cc``,
``src/graph/topo.h`` in https://github.com/NVIDIA/nccl): 20.6 of an H100 link's 25 GB/s.
"""

from __future__ import annotations

import dataclasses
import math

from replicax.planning.chip_specs import Chip

LINK_SHARE = 20.6 / 25
"""Of a link's bandwidth, what NCCL gets through it."""
NETWORK_SHARE = 0.9
"""Of the network's."""


@dataclasses.dataclass(frozen=True)
class _Protocol:
    """Latencies in microseconds: of a call, and of a step over links and over the network; and what it sends."""

    base: float
    link: float
    network: float
    share: float


_RING = (_Protocol(6.6, 0.6, 2.7, 0.25), _Protocol(14.0, 1.9, 4.0, 0.92), _Protocol(8.4, 3.4, 14.0, 1.0))
_TREE = (_Protocol(6.8, 0.6, 5.0, 0.25), _Protocol(14.0, 1.25, 8.5, 0.85), _Protocol(8.4, 4.0, 14.0, 0.92))


def seconds_between_gpus(kind: str, whole: float, hosts: int, gpus: int, chip: Chip) -> float:
    """Return the seconds that one collective takes, by the formulas above; ``whole`` is ``V``, in bytes.

    It is between so many GPUs, of one kind, on so many hosts. Without links, they share a device's memory.
    """
    links = chip.link * chip.links * LINK_SHARE
    network = chip.network * NETWORK_SHARE
    if gpus < 2:
        return 0.0
    if not links:
        return whole / chip.bandwidth
    each = gpus / hosts
    bandwidth = links if hosts == 1 else network * each if each == 1 else min(links, network * each)
    passes = 2 if kind == "all-reduce" else 1
    match kind:
        case "collective-permute" | "send":
            ways = [_seconds_to_send(p, whole, 1, hosts > 1, links if hosts == 1 else network) for p in _RING]
        case "all-to-all" | "ragged-all-to-all":
            inside, between = whole * (each - 1) / gpus / links, 0.0
            if hosts > 1:
                between = whole * (gpus - each) / gpus / network
            ways = [max(inside, between) + _latency(_RING[-1], each - 1, hosts - 1)]
        case _:
            steps = passes * (gpus - hosts)
            sent = passes * whole * (gpus - 1) / gpus
            over = passes * hosts if hosts > 1 else 0
            ways = [_seconds_to_send(p, sent, steps, over, bandwidth) for p in _RING]
            if kind == "all-reduce" and hosts > 1:
                ways += [_seconds_to_send(p, 2 * whole, 2 * (each - 1), 2 * math.log2(hosts), bandwidth) for p in _TREE]
    return min(ways)


def _latency(protocol: _Protocol, inside: float, between: float) -> float:
    return 1e-6 * (protocol.base + inside * protocol.link + between * protocol.network)


def _seconds_to_send(protocol: _Protocol, size: float, inside: float, between: float, bandwidth: float) -> float:
    return size / (bandwidth * protocol.share) + _latency(protocol, inside, between)
