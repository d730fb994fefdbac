from __future__ import annotations

import pytest

from replicax import DeviceAssignment, Topology


def shown(capsys, monkeypatch, thing, width: int = 80, **colour: str) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    thing.show()
    return capsys.readouterr().out


def test_a_slice(capsys, monkeypatch) -> None:
    out = shown(
        capsys, monkeypatch, DeviceAssignment.build(Topology.from_name("v3:4x4"), [2, 1, 2], num_replicas=6), 100
    )
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[-8:-1] == [
        "",
        " 0·0  0·1   0·2  0·3    2·0  2·1   2·2  2·3",
        " 1·0  1·1   1·2  1·3    3·0  3·1   3·2  3·3",
        "",
        " 4·0  4·1   4·2  4·3    5·0  5·1   5·2  5·3",
        "  ·    ·     ·    ·      ·    ·     ·    ·",
        "",
    ]
    assert lines[-1] == "a core: replica·logical device   · no replica's   x goes right, y down, hosts lie apart"


def test_missing_cores(capsys, monkeypatch) -> None:
    whole = Topology.from_name("v5e:4x4")
    topology = Topology(mesh_shape=whole.mesh_shape, device_coordinates=whole.device_coordinates[1:])
    out = shown(capsys, monkeypatch, topology)
    assert "  ×     ×     0·0   0·1 " in out
    assert "× missing" in out


@pytest.mark.parametrize(("width", "row"), [(120, "00 00  11 11  22 22"), (80, "0000111122223333")])
def test_where_there_is_little_room(capsys, monkeypatch, width: int, row: str) -> None:
    out = shown(capsys, monkeypatch, Topology.from_name("v3:32x32"), width=width)
    assert out.splitlines()[2 if width == 120 else 3].startswith(row) or row in out
    assert max(len(line) for line in out.splitlines()) <= width
    assert "…\n" not in out  # nothing is cut off
    assert "a core: host, counted in 012…z, again and again" in out


def test_planes_of_chips_lie_side_by_side(capsys, monkeypatch) -> None:
    lines = [line.split() for line in shown(capsys, monkeypatch, Topology.of_chips((2, 1, 2))).splitlines()]
    assert lines[2:4] == [["z", "=", "0", "z", "=", "1"], ["0·0", "0·1", "1·0", "1·1"]]
