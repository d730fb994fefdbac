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


def test_planes_and_links_around(tmp_path) -> None:
    path = tmp_path / "slice.svg"
    Topology.from_name("v5p:4x4x4").plot(path)
    words = texts(path)
    assert {
        "z = 0",
        "z = 3",
        "open end: a link around",
        "each plane is linked to the next, and the last to the first",
    } <= set(words)
    Topology.from_name("v5p:2x2x4").plot(path)
    assert "each plane is linked to the next" in texts(path)
    assert "open end: a link around" not in texts(path)


def test_what_is_missing(tmp_path) -> None:
    whole = Topology.from_name("v5e:4x4")
    path = tmp_path / "slice.svg"
    Topology(mesh_shape=whole.mesh_shape, device_coordinates=whole.device_coordinates[1:]).plot(path)
    assert texts(path).count("×") == 4
    assert "missing" in texts(path)


@pytest.mark.parametrize("name", ["v5e:1x1", "v3:32x32", "v5p:16x16x24"])
def test_any_size(tmp_path, name: str) -> None:
    from PIL import Image

    path = tmp_path / "slice.png"
    topology = Topology.from_name(name)
    DeviceAssignment.one_core_each(topology).plot(path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert 1000 < image.width < 2600
        assert image.height < 2000
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert (0x44, 0x77, 0xAA) in colours


def test_other_formats(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"must end in .png or .svg, got '.*slice.pdf'"):
        Topology.from_name("v5e:2x2").plot(str(tmp_path / "slice.pdf"))
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
