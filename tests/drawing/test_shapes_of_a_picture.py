"""The shapes of a picture, read back from it: parts of values, groups that communicate, and panels."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.drawing.holdings import Column, Exchange, devices_that_hold
from replicax.drawing.placement_picture import placement_picture
from replicax.drawing.svg import cut_to, width_of
from tests.drawing.test_holdings import PLACEMENTS

SVG = "{http://www.w3.org/2000/svg}"


@dataclasses.dataclass
class Box:
    left: float
    top: float
    width: float
    height: float
    kind: str

    def has(self, x: float, y: float) -> bool:
        return self.left <= x <= self.left + self.width and self.top <= y <= self.top + self.height


class Picture:
    """The shapes of a picture, in the order in which they are drawn."""

    def __init__(self, text: str) -> None:
        root = ET.fromstring(text)
        self.boxes = [
            Box(*(float(r.get(k, "")) for k in ("x", "y", "width", "height")), r.get("fill") or r.get("class") or "")
            for r in root.iter(f"{SVG}rect")
            if r.get("x") is not None
        ]
        self.texts = [
            (text.text or "", float(text.get("x", "")), float(text.get("y", ""))) for text in root.iter(f"{SVG}text")
        ]
        self.lines = {
            kind: [
                [tuple(map(float, point.split())) for point in path.get("d", "")[1:].split("L")]
                for path in root.iter(f"{SVG}path")
                if path.get("class") == kind
            ]
            for kind in ("line", "link")
        }
        self.dots = [tuple(float(dot.get(k, "")) for k in ("cx", "cy")) for dot in root.iter(f"{SVG}circle")]
        self.columns = [x for text, x, _ in self.texts if re.fullmatch(r"cpu:\d+", text)]
        half = (self.columns[1] - self.columns[0]) / 2
        self.edges = [(x - half, x + half) for x in self.columns]

    def place(self, text: str) -> tuple[float, float]:
        """Where a text is."""
        [at] = [(x, y) for found, x, y in self.texts if found == text]
        return at

    def row(self, name: str) -> list[list[Box]]:
        """The boxes of each device in the row of a variable."""
        _, y = self.place(name)
        rules = sorted(line[0][1] for line in self.lines["line"])
        top, bottom = max(r for r in rules if r < y), min((r for r in rules if r > y), default=np.inf)
        return [[b for b in self.boxes if left < b.left < right and top < b.top < bottom] for left, right in self.edges]


def drawn(strategy: replicax.Strategy, path: pathlib.Path, *arguments: object) -> Picture:
    strategy.extended.plot(path / "picture.svg", *arguments)
    return Picture((path / "picture.svg").read_text())


CASES = [(placement, None) for placement in PLACEMENTS]
CASES += [(placement, parts) for placement in ("logical", "both") for parts in ([1, 2], [2, 1])]


@pytest.mark.parametrize(("placement", "parts"), CASES)
def test_parts_have_the_place_and_the_colour_of_their_numbers(
    tmp_path, placement: str, parts: list[int] | None
) -> None:
    """The arrays of the devices say which numbers are the same, and which part of the value they are."""
    strategy = PLACEMENTS[placement]()
    value = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    with strategy.scope():
        v = replicax.Variable(value, name="v", partition_dimensions=parts)
        own = replicax.Variable(jnp.zeros(3), name="own", synchronization="on_read", aggregation="sum")

    def step() -> None:
        own.assign(jnp.full(3, replicax.get_replica_context().replica_id_in_sync_group, jnp.float32))

    strategy.run(step)
    picture = drawn(strategy, tmp_path)
    devices = devices_that_hold(strategy.extended.mesh, [v, own])
    assert len(picture.columns) == len(devices)
    for variable in (v, own):
        held = {shard.device: np.asarray(shard.data) for shard in variable.stored().addressable_shards}
        colours: dict[bytes, str] = {}
        for device, boxes in zip(devices, picture.row(variable.name), strict=True):
            outlines, filled = boxes[::2], boxes[1::2]
            assert all(box.kind == "rest" for box in outlines)
            if device not in held:
                assert not boxes
                continue
            numbers = [held[device]] if variable is v else list(held[device])[:4]
            assert len(filled) == len(numbers)
            for outline, box, part in zip(outlines, filled, numbers, strict=True):
                assert colours.setdefault(part.tobytes(), box.kind) == box.kind
                if variable is v:
                    rows = np.array([box.top - outline.top, box.top + box.height - outline.top]) / outline.height
                    columns = np.array([box.left - outline.left, box.left + box.width - outline.left]) / outline.width
                    (up, down), (first, end) = np.round(rows * 48).astype(int), np.round(columns * 64).astype(int)
                    np.testing.assert_array_equal(part, value[up:down, first:end])
        assert len(set(colours.values())) == len(colours)
    total = sum(variable.size * variable.dtype.itemsize for variable in (v, own))
    for device, (outline, *bar) in zip(devices, picture.row("kept on each device"), strict=True):
        arrays = [s.data for x in (v, own) for s in x.stored().addressable_shards if s.device == device]
        kept = sum(array.nbytes for array in arrays) / total
        assert sum(box.width for box in bar) / outline.width == pytest.approx(
            min(kept, 1), abs=0.005 + 0.05 * (kept < 0.05)
        )


def test_groups_that_communicate_have_a_dot_on_each_device() -> None:
    groups = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0, 17), (1, 2)), ((16, 17),)]
    columns = [Column(f"cpu:{i}", (i,), None, "", "") for i in range(18)]
    exchanges = [Exchange(f"kind {i}", found, 1, 8) for i, found in enumerate(groups)]
    picture = Picture(placement_picture("title", "facts", columns, [], exchanges))
    assert len(picture.columns) == 16  # no more are drawn
    edge = picture.edges[-1][1]
    for number, expected in enumerate(groups):
        _, y = picture.place(f"kind {number}")
        below = [picture.place(f"kind {number + 1}")[1]] if number + 1 < len(groups) else []
        top, bottom = y - 19, below[0] - 19 if below else np.inf
        found = set()
        for (left, at), (right, end) in picture.lines["link"]:
            if not top < at < bottom:
                continue
            assert at == end
            members = tuple(i for i, x in enumerate(picture.columns) if (x, at) in picture.dots and left <= x <= right)
            assert picture.columns[members[0]] == left
            found.add((members, right == edge))
            assert right == edge or picture.columns[members[-1]] == right
        assert found == {
            (tuple(i for i in group if i < 16), max(group) >= 16) for group in expected if min(group) < 16
        }, exchanges[number]


@pytest.mark.parametrize("bold", [False, True])
def test_as_much_of_a_text_is_left_as_there_is_room_for(bold: bool) -> None:
    text = "transpose(jvp(MLP)) of Wide m×W things"
    for room in np.linspace(10, 300, 60):
        cut = cut_to(text, 11, room, bold)
        assert width_of(cut, 11, bold) <= room
        if cut != text:
            kept = cut.removesuffix("…")
            assert text.startswith(kept)
            longer = text[: len(kept) + 1 + text[len(kept) :].startswith(" ")]
            assert width_of(f"{longer}…", 11, bold) > room


@pytest.mark.parametrize("options", [{}, {"num_replicas": 16}, {"num_logical_devices": 2}], ids=str)
def test_a_group_has_each_piece_once(tmp_path, options: dict[str, int]) -> None:
    strategy = replicax.MirroredStrategy(
        [f"cpu:{i}" for i in range(8)], variable_partitioner=replicax.variables.GroupPartitioner(2), **options
    )
    with strategy.scope():
        v = replicax.Variable(np.arange(4096, dtype=np.float32), name="v")
    picture = drawn(strategy, tmp_path, None, [v])
    pieces = {shard.device: float(np.asarray(shard.data)[0]) for shard in v.stored().addressable_shards}
    logical = strategy.extended.num_logical_devices
    devices = list(strategy.extended.mesh.devices.flat)
    brackets = picture.lines["link"]
    assert len(brackets) == 8 // (2 * logical)
    for number, bracket in enumerate(brackets):
        x, _ = picture.place(f"group {number}")
        inside = [d for d, at in zip(devices, picture.columns, strict=True) if bracket[0][0] < at < bracket[-1][0]]
        assert x == np.mean([bracket[0][0], bracket[-1][0]])
        assert len(inside) == 2 * logical
        assert len({pieces[device] for device in inside[::logical]}) == 2


def test_a_panel_for_each_slice(tmp_path) -> None:
    resolver = replicax.TPUClusterResolver(emulate=replicax.Topology.of_chips((2, 2, 1)), slices=2)
    strategy = replicax.TPUStrategy(resolver)
    with strategy.scope():
        kept = replicax.Variable(1.0, name="v")
    picture = drawn(strategy, tmp_path)
    panels = [box for box in picture.boxes if box.kind == "panel"]
    assert len(panels) == 2
    foot = picture.place("kept on each device")[1]
    for number, panel in enumerate(panels):
        assert panel.has(*picture.place(f"slice {number}"))
        for i, x in enumerate(picture.columns):
            for y in (picture.place(kept.name)[1], foot):
                assert panel.has(x, y) == (i // 4 == number)
    assert picture.boxes[:2] == panels  # beneath everything else


def test_only_devices_that_are_left_out_are_said_to_be() -> None:
    for count in (16, 17):
        columns = [Column(f"cpu:{i}", (i,), None, "", "") for i in range(count)]
        picture = placement_picture("title", "facts", columns, [], None)
        said = " ".join(itertools.chain(*([text] for text, _, _ in Picture(picture).texts)))
        assert ("the first 16 devices of" in said) == (count > 16)
