"""Pictures of placements: all that is there is in them, no words lie on others, and those of the documents are new."""

from __future__ import annotations

import base64
import pathlib
import re
import runpy
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.drawing.svg import width_of
from tests import processes
from tests.conftest import logical_strategy, strategy_of
from tests.drawing import workers_drawing

SVG = "{http://www.w3.org/2000/svg}"


def draw(folder: pathlib.Path, strategy: replicax.Strategy, *arguments: object) -> ET.Element:
    strategy.extended.plot(folder / "picture.svg", *arguments)
    return ET.parse(folder / "picture.svg").getroot()


def words(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def test_every_variable_and_device_is_in_it(tmp_path) -> None:
    strategy = replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        w = replicax.Variable(jnp.ones((64, 8)), name="a <b> & c")
        scalar = replicax.Variable(1.0, name="scalar")
    picture = draw(tmp_path, strategy, strategy.extended.trace(lambda x: x @ w, args=(jnp.ones((1, 64)),)))
    found = words(picture)
    assert {"ShardedStrategy", "a <b> & c", "scalar", "all-gather", "kept on each device"} < set(found)
    assert [f"replica {i}" for i in range(4)] == [text for text in found if text.startswith("replica ")]
    assert found.count("1/4") == 4
    assert found.count("all") == 4
    del scalar
    assert "scalar" not in words(draw(tmp_path, strategy))
    assert "Collectives of a step" not in words(draw(tmp_path, strategy))
    assert "none" in words(draw(tmp_path, strategy, strategy.extended.trace(lambda: 1.0)))
    pairs = replicax.variables.GroupPartitioner(2)
    groups = replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)], variable_partitioner=pairs)
    with groups.scope():
        half = replicax.Variable(jnp.ones((64, 8)), name="half")
    assert words(draw(tmp_path, groups, None, iter([half]))).count("1/2") == 4


def test_names_may_have_characters_that_svg_has_not(tmp_path) -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        w = replicax.Variable(1.0, name="w\x1b\ud800\uffff")
    assert r"w\x1b\ud800\uffff" in words(draw(tmp_path, strategy, None, [w]))


@pytest.mark.parametrize("kind", [replicax.MirroredStrategy, replicax.ShardedStrategy])
def test_a_notebook_shows_it(tmp_path, kind) -> None:
    strategy = kind([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        kept = replicax.Variable(jnp.ones((64, 8)), name="a <b> & c")
    shown = strategy._repr_html_()
    encoded = re.fullmatch(r'<code>(\w+)\(.*\)</code><br><img src="data:image/svg\+xml;base64,(.*)">', shown)
    assert encoded[1] == type(strategy).__name__
    strategy.extended.plot(tmp_path / "picture.svg")
    assert base64.b64decode(encoded[2]).decode() == (tmp_path / "picture.svg").read_text()
    assert kept.name in words(ET.fromstring(base64.b64decode(encoded[2]).decode()))


@pytest.mark.parametrize("replicas", [1, 2, 40, 800])
def test_words_do_not_lie_on_each_other(tmp_path, replicas: int) -> None:
    """By the estimate of their width, which is on the safe side."""
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_replicas=2 * replicas)
    logical = replicax.ShardedStrategy(
        variable_partitioner=replicax.variables.GroupPartitioner(2), num_logical_devices=2
    )
    for one in (strategy, logical):
        with one.scope():
            kept = [
                replicax.Variable(
                    np.zeros(shape, np.float32), name="a name that is longer than there is room " * longer
                )
                for longer, shape in enumerate([(), (1,), (7, 3, 5), (1, 4096), (4096, 1), (0, 4)])
            ]
            kept.append(replicax.Variable(0, synchronization="on_read", aggregation="sum"))
        program = one.extended.trace(lambda v=kept[3]: v.value * 2)
        boxes = []
        picture = draw(tmp_path, one, program)
        for text in picture.iter(f"{SVG}text"):
            size, x, y = (float(text.get(name) or 0) for name in ("font-size", "x", "y"))
            width = width_of(text.text or "", size, "b" in (text.get("class") or "").split())
            left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
            boxes.append((left, y - 0.75 * size, left + width, y + 0.2 * size, text.text))
        page = [float(n) for n in picture.get("viewBox", "").split()]
        for i, (left, top, right, bottom, said) in enumerate(boxes):
            assert left >= 0, said
            assert right <= page[2], said
            assert bottom <= page[3], said
            for other in boxes[i + 1 :]:
                apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
                assert apart, (said, other[4])


def test_many_devices_and_variables(tmp_path) -> None:
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    pairs = replicax.TPUStrategy(
        resolver, replicax.DeviceAssignment.build(resolver.topology, [1, 1, 1, 2], num_replicas=4)
    )
    with pairs.scope():
        kept = [replicax.Variable(np.zeros(4 + i, np.float32), name=f"v{i}") for i in range(15)]
    found = words(draw(tmp_path, pairs))
    assert [text for text in found if re.fullmatch(r"v\d+", text)] == [f"v{i}" for i in range(3, 15)]
    assert "15 variables of 660 B, the 12 largest" in " ".join(found)
    assert words(draw(tmp_path, pairs, None, kept[:2])).count("v0") == 1


def test_any_of_several_workers_draws_all_of_them(tmp_path) -> None:
    assert processes.run(workers_drawing.draw_alone, tmp_path, workers=2, devices=2) == [2, 2]
    found = words(ET.parse(tmp_path / "picture.svg").getroot())
    assert [text for text in found if text.startswith(("worker", "replica ", "cpu:"))] == [
        *("worker 0", "worker 1", "replica 0", "replica 1", "cpu:0", "cpu:1", "cpu:0", "cpu:1")
    ]
    assert found.count("1/4") == 4
    assert "all-gather" in found, found


def test_what_is_wrong(tmp_path) -> None:
    pair, other = strategy_of(2), logical_strategy(2, 2)
    with other.scope():
        v = replicax.Variable(1.0, name="v")
    with pytest.raises(ValueError, match=r"must end in .svg, got '.*picture.png'"):
        pair.extended.plot(tmp_path / "picture.png")
    with pytest.raises(ValueError, match=r"<Variable 'v' .* is no variable of MirroredStrategy"):
        pair.extended.plot(tmp_path / "picture.svg", variables=[v])
    placed = other.extended.trace(lambda x: other.assign_to_logical_device(x, 1) + 1, args=(1.0,))
    with pytest.raises(ValueError, match="is several programs: leave program out"):
        other.extended.plot(tmp_path / "picture.svg", placed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak  # each of their parts is looked at above
def test_the_pictures_of_the_page(tmp_path) -> None:
    docs = pathlib.Path(__file__).parents[2] / "docs"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(docs.parent / "tools" / "docs" / "placement_pictures.py"))["main"](tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in docs.glob("placement-*.svg"))
    assert len(made) == 6
    for name in made:
        assert (tmp_path / name).read_text() == (docs / name).read_text(), name
