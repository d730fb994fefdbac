from __future__ import annotations

import itertools
import pathlib
import re
import runpy

import numpy as np
import pytest
from matplotlib.figure import Figure

from replicax import DeviceAssignment, Topology


def texts(path) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())]


def test_an_svg_has_what_there_is(tmp_path) -> None:
    path = tmp_path / "slice.svg"
    topology = Topology.from_name("v3:4x4")
    DeviceAssignment.build(topology, [2, 1, 2], num_replicas=6).plot(path)
    words = texts(path)
    assert words.count("5") == 4  # the cores of replica 5
    assert {"v3:4x4", "x = 0", "y = 0", "replica: its number, below it the logical device", "no replica's"} <= set(
        words
    )
    assert "6 replicas of 4 cores  ·  16 chips of 2 devices  ·  4 hosts  ·  no wrap-around" in words
    again = tmp_path / "again.svg"
    DeviceAssignment.build(topology, [2, 1, 2], num_replicas=6).plot(str(again))
    assert again.read_bytes() == path.read_bytes()


def test_what_is_missing(tmp_path) -> None:
    whole = Topology.from_name("v5e:4x4")
    path = tmp_path / "slice.svg"
    Topology(mesh_shape=whole.mesh_shape, device_coordinates=whole.device_coordinates[1:]).plot(path)
    assert texts(path).count("×") == 4
    assert "missing" in texts(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("v3:4x4", [2, 1, 2]), ("v3:2x2", [1, 1, 2]), ("v5e:4x4", [2, 2, 1]), ("v5e:4x4", [1, 1, 1])],
)
def test_cores_and_links_lie_where_the_assignment_says(tmp_path, monkeypatch, name: str, shape: list[int]) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    assignment = DeviceAssignment.build(Topology.from_name(name), shape, num_replicas=None)
    assignment.plot(tmp_path / "slice.svg")
    [axes] = figures[0].axes
    lines, chips, cores = (next(c for c in axes.collections if c.zorder == level) for level in (1, 2, 3))
    chip_boxes = [path.get_extents() for path in chips.get_paths()]
    core_boxes = [path.get_extents() for path in cores.get_paths()]
    at: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for chip in chip_boxes:
        x, y = np.round((chip.min + chip.max) / 2).astype(int).tolist()
        on_chip = sorted((box for box in core_boxes if chip.contains(*box.min)), key=lambda box: box.x0)
        assert all(chip.contains(*box.max) for box in on_chip)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(on_chip))
        for core, box in enumerate(on_chip):
            inside = [text for text in axes.texts if box.contains(*text.get_position())]
            at[x, y, core] = tuple(int(text.get_text()) for text in sorted(inside, key=lambda t: t.get_position()[1]))
    assert at == {
        (x, y, core): (r, c)[: len(replica)]  # of a replica of one core its number says it all
        for r, replica in enumerate(assignment.core_assignment.tolist())
        for c, (x, y, _, core) in enumerate(replica)
    }
    thick = [np.round(s) for s, width in zip(lines.get_segments(), lines.get_linewidths(), strict=True) if width > 3]
    found = {frozenset(map(tuple, segment.astype(int).tolist())) for segment in thick}
    following = np.roll(assignment.core_assignment, -1, axis=1)
    ends = np.stack([assignment.core_assignment, following], axis=2)[..., :2].reshape(-1, 2, 2)
    assert found == {frozenset(map(tuple, pair)) for pair in ends.tolist() if np.abs(np.subtract(*pair)).sum() == 1}
    keys = [text.get_text() for text in figures[0].legends[0].texts]
    assert ("from one logical device to the next" in keys) == bool(found)


def test_hosts_lie_under_their_chips_and_links_around_are_open_ends(tmp_path, monkeypatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    topology = Topology.of_chips((4, 6, 1), wrap=(True, True, False))
    topology.plot(tmp_path / "slice.svg")
    [axes] = figures[0].axes
    sheets, lines, boxes = (next(c for c in axes.collections if c.zorder == level) for level in (0, 1, 2))
    chips = list(itertools.product(range(4), range(6)))
    places = [box.get_extents() for box in boxes.get_paths()]
    found = [
        {
            tuple(np.round((p.min + p.max) / 2).astype(int).tolist())
            for p in places
            if sheet.contains(*p.min) and sheet.contains(*p.max)
        }
        for sheet in (path.get_extents() for path in sheets.get_paths())
    ]
    hosts = [{(x, y) for x, y, *_ in own} for own in topology.device_coordinates.tolist()]
    assert sorted(map(sorted, found)) == sorted(map(sorted, hosts))
    segments = [tuple(map(tuple, segment.tolist())) for segment in lines.get_segments()]
    inside = [pair for pair in segments if set(pair) <= set(chips)]
    assert {frozenset(pair) for pair in inside} == {
        frozenset(pair) for pair in itertools.combinations(chips, 2) if np.abs(np.subtract(*pair)).sum() == 1
    }
    begins, ends = zip(*(pair for pair in segments if pair not in inside), strict=True)
    assert sorted(begins) == sorted(
        [(x, y) for x in (0, 3) for y in range(6)] + [(x, y) for y in (0, 5) for x in range(4)]
    )
    for (x, y), (to_x, to_y) in zip(begins, ends, strict=True):
        assert (x == to_x) != (y == to_y)
        assert not (0 <= to_x <= 3 and 0 <= to_y <= 5)  # away from the slice


def test_other_formats(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"must end in .png or .svg, got '.*slice.pdf'"):
        Topology.from_name("v5e:2x2").plot(str(tmp_path / "slice.pdf"))
    with pytest.raises(TypeError, match="must be a path.*got None"):
        Topology.from_name("v5e:2x2").plot(None)
    with pytest.raises(TypeError, match="the device assignment must be a replicax.DeviceAssignment or None, got 3"):
        Topology.from_name("v5e:2x2").plot(tmp_path / "slice.svg", assignment=3)
    assert list(tmp_path.iterdir()) == []


def test_the_pictures_of_the_documents(tmp_path) -> None:
    docs = pathlib.Path(__file__).parents[2] / "docs"
    runpy.run_path(str(docs.parent / "tools" / "docs" / "tpu_pictures.py"))["main"](tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in docs.glob("tpu-*") if path.suffix in (".svg", ".png")}
    text = (docs / "tpu.md").read_text()
    assert all(f"]({name})" in text for name in made)
    for name in made:
        if name.endswith(".svg"):
            assert texts(tmp_path / name) == texts(docs / name)
