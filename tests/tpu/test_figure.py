from __future__ import annotations

import pathlib
import re
import runpy

import pytest

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
