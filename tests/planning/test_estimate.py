"""Formulas: against the numbers of their source, and against what must hold for any."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.hlo.collective_instructions import CollectiveUse, ProgramDevices
from replicax.hlo.instructions import parse
from replicax.planning.chip_specs import CHIPS, Chip
from replicax.planning.estimate import estimate_of, scaling_of
from replicax.planning.network import HOP, Line, Network, seconds_of
from replicax.planning.timeline.walk import ScheduleWalk

CHIP = Chip("chip", flops=1e12, memory=1e9, bandwidth=1e11, link=1e9, links=6)


def ring(n: int) -> Line:
    return Line(n, n, wraps=True)


def line(n: int) -> Line:
    return Line(n, n, wraps=False)


@pytest.mark.parametrize(
    ("kind", "lines", "expected"),
    [
        ("all-gather", [ring(8)], 1e6 * 7 / 8 / 2e9 + 4 * HOP),
        ("reduce-scatter", [ring(8)], 1e6 * 7 / 8 / 2e9 + 4 * HOP),
        ("all-reduce", [ring(8)], 2 * (1e6 * 7 / 8 / 2e9 + 4 * HOP)),
        ("all-gather", [line(8)], 1e6 * 7 / 8 / 1e9 + 7 * HOP),
        ("all-gather", [ring(8), ring(4), line(1)], 1e6 * 31 / 32 / 4e9 + 6 * HOP),
        ("all-gather", [Line(4, 8, wraps=True)], 1e6 * 3 / 4 / 1e9 + 4 * HOP),  # every second chip, of two groups
        ("all-to-all", [ring(8)], 1e6 * 8 / 4 / 2e9 + 4 * HOP),
        ("all-to-all", [ring(4), ring(8), line(1)], 1e6 * 8 / 4 / 2e9 + 6 * HOP),  # as long as the longest dim takes
        ("all-to-all", [ring(8), line(8)], 1e6 * 8 / 4 / 1e9 + 11 * HOP),
        ("ragged-all-to-all", [ring(8)], 1e6 * 8 / 4 / 2e9 + 4 * HOP),
        ("collective-permute", [ring(8)], 1e6 / 1e9 + HOP),
        ("all-reduce", [], 1e6 / 1e11),  # within a chip
    ],
)
def test_collectives(kind: str, lines: list[Line], expected: float) -> None:
    assert seconds_of(kind, 1e6, lines, CHIP) == pytest.approx(expected)


def devices_of(shape: tuple[int, int, int], kind: str, cores: int = 1) -> np.ndarray:
    made = [
        SimpleNamespace(coords=(x, y, z), core_on_chip=core, device_kind=kind)
        for z in range(shape[2])
        for y in range(shape[1])
        for x in range(shape[0])
        for core in range(cores)
    ]
    return np.array(made, dtype=object)[:, None]


def use_of(kind: str, members: int, axes: tuple[str, ...] = ("replica",), size: int = 10_000_000) -> CollectiveUse:
    return CollectiveUse(kind, size, axes, (tuple(range(members)),), 1)


@pytest.mark.parametrize(("links", "inside"), [(18, "NVLink"), (1, "PCIe")])
def test_what_collectives_of_gpus_go_over(links: int, inside: str) -> None:
    card = Chip("card", 1, 1, 1, link=1e9, links=links, network=1e9)
    made = [SimpleNamespace(platform="gpu", device_kind="card", slice_index=i // 2) for i in range(4)]
    network = Network(np.array(made, dtype=object)[:, None], card, 2)
    uses = [CollectiveUse("all-reduce", 8, ("replica",), (m,), 1) for m in ((0, 1), (0, 2), (0, 1, 2, 3))]
    assert [network.way(use) for use in uses] == [inside, "network", f"{inside}, network"]


def test_each_send_counts() -> None:
    network = Network(devices_of((2, 2, 1), "TPU v5e"), CHIPS["v5e"])
    sends = [CollectiveUse("send", size, ("logical0",), ((0, 1),), count) for size, count in ((10**6, 3), (8, 1))]
    found = estimate_of([], sends, CHIPS["v5e"], network)
    assert found.communication == pytest.approx((3 * 10**6 + 8) / CHIPS["v5e"].link + 4 * HOP)
    assert found.at_least == found.communication


def test_lines_of_a_whole_slice() -> None:
    network = Network(devices_of((4, 8, 4), "TPU v5p"), CHIPS["v5p"])
    assert (network.shape, network.grid, network.name) == ((4, 8, 4), (4, 8, 4), "4x8x4")
    assert network.lines(use_of("all-reduce", 128)) == [ring(4), ring(8), ring(4)]
    # Half of it has no full cubes any more, and so no wrap-around links.
    assert network.lines(use_of("all-reduce", 128), (2, 8, 4)) == [line(2), line(8), line(4)]
    flat = Network(devices_of((4, 16, 1), "TPU v5e"), CHIPS["v5e"])
    assert flat.lines(use_of("all-reduce", 64)) == [line(4), ring(16), line(1)]


def test_lines_of_replicas_of_four_chips() -> None:
    devices = devices_of((4, 4, 4), "TPU v5p")[:, 0].reshape(4, 4, 4)  # z, y, x
    blocks = devices.reshape(2, 2, 2, 2, 4).transpose(0, 2, 4, 1, 3).reshape(16, 4)  # a replica has 2 along z and y
    network = Network(blocks, CHIPS["v5p"])
    assert (network.grid, network.replicas_per_block) == ((4, 2, 2), 1)
    inside = CollectiveUse("all-reduce", 8, ("logical0", "logical1"), ((0, 1, 2, 3),), 1)
    assert network.lines(inside) == [line(1), line(2), line(2)]
    last = dataclasses.replace(inside, groups=((60, 61, 62, 63),))
    assert network.lines(last, (1, 1, 1)) == network.lines(inside)  # of one replica, whichever
    between = CollectiveUse("all-reduce", 8, ("replica",), (tuple(range(0, 64, 4)),), 1)
    assert network.lines(between) == [ring(4), Line(2, 4, True), Line(2, 4, True)]
    assert network.chips((1, 1, 2)) == (1, 2, 4)


def test_lines_of_groups_of_replicas() -> None:
    network = Network(devices_of((4, 8, 4), "TPU v5p"), CHIPS["v5p"])
    inside = CollectiveUse("all-gather", 8, ("replica",), (tuple(range(16)),), 1)  # x, and four along y
    between = CollectiveUse("all-reduce", 8, ("replica",), (tuple(range(0, 128, 16)),), 1)
    assert network.lines(inside) == [ring(4), line(4), line(1)]
    assert network.lines(between) == [line(1), Line(2, 8, True), ring(4)]
    # A smaller slice has less of a group, or fewer groups.
    assert network.lines(inside, (4, 2, 1)) == [line(4), line(2), line(1)]
    assert network.lines(between, (4, 8, 2)) == [line(1), Line(2, 8, False), line(2)]
    assert network.lines(between, (4, 4, 1)) == [line(1), line(1), line(1)]
    assert network.seconds(between, (4, 4, 1)) == 0
    outside = dataclasses.replace(between, groups=(tuple(range(15, 128, 16)),))
    assert network.seconds(outside, (1, 1, 1)) == 0
    assert network.seconds(inside, (4, 8, 4)) == network.seconds(inside)


def test_cores_of_a_chip_share_its_links() -> None:
    network = Network(devices_of((4, 4, 1), "TPU v3", cores=2), CHIPS["v3"])
    assert (network.grid, network.replicas_per_block) == ((4, 4, 1), 2)
    assert network.lines(use_of("all-reduce", 32)) == [line(4), line(4), line(1)]
    whole, half = CHIPS["v3"], CHIPS["v3"].share(2)
    assert (half.flops, half.memory, half.usable) == (whole.flops / 2, whole.memory / 2, whole.usable / 2)
    card = dataclasses.replace(whole, arithmetic=8e9, launch=1e-6, meeting=1e-5, network=1e9, peaks={"f32": 3e12})
    common = ("name", "link", "links", "network", "launch", "meeting", "sources", "is_serial", "sustained")
    divided = ("flops", "memory", "bandwidth", "usable", "arithmetic")
    assert {name: getattr(card.share(4), name) for name in common} == {name: getattr(card, name) for name in common}
    assert all(getattr(card.share(4), name) == getattr(card, name) / 4 for name in divided)
    assert card.share(4).peaks == {"f32": 3e12 / 4}
    with pytest.raises(ValueError, match="devices must be an int of at least 1, got 0"):
        CHIPS["v3"].share(0)


def walk_of(chip: Chip, axes: dict[str, int], slices: int = 1, groups: str = "") -> ScheduleWalk:
    """Through a step that goes through 1e9 bytes, and then sums 1e9 bytes."""
    module = parse(
        f"""
ENTRY %main (x: f32[125000000], y: f32[250000000]) -> f32[250000000] {{
  %x = f32[125000000]{{0}} parameter(0)
  %y = f32[250000000]{{0}} parameter(1)
  %z = f32[125000000]{{0}} negate(%x)
  ROOT %sum = f32[250000000]{{0}} all-reduce(%y), replica_groups={{{groups}}}, to_apply=%add
}}"""
    )
    return ScheduleWalk(module, chip, ProgramDevices(axes, slices))


def test_no_step_is_faster_than_the_bound() -> None:
    chip = Chip("card", flops=1e9, memory=1e9, bandwidth=1e12, peaks={"f32": 2e9})
    strategy = replicax.OneDeviceStrategy("cpu:0")
    arms = [lambda h: h @ h, lambda h: jnp.sin(h @ h) @ h]
    element = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((), "int32")
    plan = replicax.plan(strategy, lambda x: jax.lax.switch(x[1], arms, x[0]), element, chip=chip)
    product = 2 * 64**3
    assert plan.cost.matrix_flops == 3 * product
    assert plan.estimate.compute == pytest.approx(product / 2e9)
    assert plan.estimate.at_least < plan.timeline.seconds
    assert plan.timeline.utilization == pytest.approx(2 * product / 2e9 / plan.timeline.seconds)


def test_a_collective_of_a_processor_that_does_it_all_is_counted_once() -> None:
    figures = {"flops": 1e9, "bandwidth": 1e9, "link": 1e9, "arithmetic": 1e8, "launch": 1e-6, "meeting": 1e-5}
    chip = Chip("cpu", memory=1e9, links=1, is_serial=True, **figures)
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(x: jax.Array) -> jax.Array:
        return replicax.get_replica_context().all_reduce("sum", x @ x)

    plan = replicax.plan(strategy, step, jax.ShapeDtypeStruct((64, 64), "float32"), chip=chip)
    assert plan.estimate.communication > 0
    assert plan.timeline.seconds == pytest.approx(plan.estimate.at_least)


def test_scaling() -> None:
    network = Network(devices_of((8, 8, 8), "TPU v5p"), CHIPS["v5p"])
    points = scaling_of([walk_of(CHIPS["v5p"], {"replica": 512})], network)
    assert [p.replicas for p in points] == [2**i for i in range(10)]
    assert points[-1].chips == (8, 8, 8)
    assert points[-1].communication == network.seconds(use_of("all-reduce", 512, size=10**9))
    assert (points[0].communication, points[0].exposed, points[0].efficiency) == (0, 0, 1.0)
    assert all(p.efficiency == pytest.approx(points[0].seconds / p.seconds) for p in points)
    # The batch of a replica stays, and so does what it computes; nothing runs beside a sum that is one instruction.
    assert all(p.seconds - p.communication == pytest.approx(points[0].seconds) for p in points)
    assert all(p.exposed == pytest.approx(p.communication) for p in points)


def test_scaling_of_an_odd_slice_and_of_a_ring() -> None:
    v5p = CHIPS["v5p"]
    odd = scaling_of([walk_of(v5p, {"replica": 24})], Network(devices_of((2, 3, 4), "TPU v5p"), v5p))
    assert [p.chips for p in odd] == [(1, 1, 1), (1, 1, 2), (2, 1, 2), (2, 3, 2), (2, 3, 4)]
    assert [p.replicas for p in odd] == [1, 2, 4, 12, 24]
    bent = Network(devices_of((2, 2, 1), "TPU v5p")[:3], v5p)
    assert scaling_of([walk_of(v5p, {"replica": 3})], bent) == ()  # they fill no box
    turned = devices_of((3, 2, 1), "TPU v5p")[[0, 1, 2, 5], 0].reshape(2, 2)  # replicas along x and along y
    assert scaling_of([walk_of(v5p, {"replica": 2})], Network(turned, v5p)) == ()
    cards = np.array([SimpleNamespace(device_kind="card") for _ in range(8)], dtype=object)[:, None]
    points = scaling_of([walk_of(CHIP, {"replica": 8})], Network(cards, CHIP))
    assert [p.replicas for p in points] == [1, 2, 4, 8]
    # A ring in which each has all its links to the others: 2 × V × 7/8 over six links, and eight half rounds of hops.
    assert points[-1].communication == pytest.approx(2 * (1e9 * 7 / 8 / 6e9 + 4 * HOP))
    assert points[1].communication == pytest.approx(2 * (1e9 * 1 / 2 / 6e9 + HOP))  # so have two


def slices_of_four(slices: int, cores: int = 1) -> np.ndarray:
    found = []
    for index in range(slices):
        devices = devices_of((2, 2, 1), "TPU v5 lite", cores)
        for device in devices.flat:
            device.slice_index = index
        found.append(devices)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("kind", "whole", "sent"),
    [
        ("all-reduce", 1e6, 2 * 1e6 * 3 / 4),
        ("all-gather", 1e6, 1e6 * 3 / 4),
        ("reduce-scatter", 4e6, 4e6 * 3 / 4),  # its result is a quarter of what it takes
        ("all-to-all", 1e6, 1e6 * 3 / 4),
        ("collective-permute", 1e6, 1e6),
    ],
)
def test_between_slices(kind: str, whole: float, sent: float) -> None:
    chip = Chip("chip", 1, 1, 1, link=1e9, links=4, network=1e8)
    use = use_of(kind, 4, ("slice",), size=1_000_000)
    assert use.whole == whole
    network = Network(slices_of_four(4), chip)
    assert (network.slices, network.grid, network.shape) == (4, (2, 2, 1), (2, 2, 1))
    assert network.seconds(use) == pytest.approx(sent / 1e8)
    assert network.seconds(use, slices=1) == 0
    # Two devices of a chip send through what the chip has.
    assert Network(slices_of_four(4, cores=2), chip).seconds(use) == pytest.approx(2 * sent / 1e8)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_among_several_devices_of_each_slice(kind: str) -> None:
    """As one inside of slices, and one between them in which each device of a slice has a part of the value."""
    network = Network(slices_of_four(2), Chip("chip", 1, 1, 1, link=1e9, links=4, network=1e8))

    def among(participants: int, axes: tuple[str, ...], whole: int) -> CollectiveUse:
        return use_of(kind, participants, axes, whole // participants if kind == "reduce-scatter" else whole)

    whole = 1 << 20
    found = network.seconds(among(8, ("slice", "replica"), whole))
    inside, between = among(4, ("replica",), whole), among(2, ("slice",), whole // 4)
    assert found == pytest.approx(network.seconds(inside) + network.seconds(between))
    assert network.seconds(among(8, ("slice", "replica"), whole), slices=1) == pytest.approx(network.seconds(inside))


def test_it_does_not_matter_which_slices_a_group_is_in() -> None:
    network = Network(slices_of_four(3), Chip("chip", 1, 1, 1, link=1e9, links=4, network=1e8))
    first, last = (
        CollectiveUse("all-reduce", 8, ("slice", "replica"), (group,), 1) for group in ((0, 1, 4, 5), (4, 5, 8, 9))
    )
    assert network.seconds(first) == network.seconds(last)


def test_a_gather_from_fewer_slices_is_smaller() -> None:
    network = Network(slices_of_four(4), Chip("chip", 1, 1, 1, network=1e8))
    assert network.seconds(use_of("all-gather", 4, ("slice",), 1_000_000), slices=2) == pytest.approx(5e5 / 2 / 1e8)
    assert network.seconds(use_of("all-reduce", 4, ("slice",), 1_000_000), slices=2) == pytest.approx(1e6 / 1e8)


def test_scaling_over_slices() -> None:
    chip = CHIPS["v5e"]
    network = Network(slices_of_four(6), chip)
    lines = ",".join("{" + ",".join(str(4 * s + i) for s in range(6)) + "}" for i in range(4))
    points = scaling_of([walk_of(chip, {"replica": 24}, slices=6, groups=lines)], network)
    assert [(p.replicas, p.slices, p.chips) for p in points] == [
        (1, 1, (1, 1)),
        (2, 1, (1, 2)),
        (4, 1, (2, 2)),
        (12, 3, (2, 2)),
        (24, 6, (2, 2)),
    ]
    assert [p.communication for p in points[:3]] == [0, 0, 0]
    assert points[-1].communication == pytest.approx(2 * 1e9 * 5 / 6 / chip.network)


@pytest.mark.parametrize(
    "change",
    [
        *({"flops": 0}, {"memory": -1}, {"bandwidth": 0}, {"link": -1}, {"links": -2}),
        *({"memory": np.inf}, {"flops": np.nan}, {"link": 10**400}, {"network": "3"}, {"usable": "12"}, {"usable": 0}),
        *({"peaks": [1, 2]}, {"peaks": {"tf32": 0}}, {"sources": 5}, {"sources": [5]}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_chip_that_can_not_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Chip 'c': {next(iter(change))}.* must"):
        Chip(**{"name": "c", "flops": 1, "memory": 1, "bandwidth": 1, **change})


def test_the_table_has_sources_for_every_generation_and_model() -> None:
    from replicax.gpu.gpu_models import MODELS
    from replicax.tpu.generations import GENERATIONS

    assert set(CHIPS) == {g.name for g in GENERATIONS} | set(MODELS)
    for chip in CHIPS.values():
        assert (chip.usable or 0) <= chip.memory
        assert len(chip.sources) > 1
        assert chip.network <= chip.link * chip.links < chip.bandwidth < chip.flops
    assert len(set(CHIPS.values())) == len(CHIPS)
