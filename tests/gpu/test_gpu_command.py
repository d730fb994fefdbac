"""``replicax plan`` for GPUs that are not there, as a user would start it."""

from __future__ import annotations

import json
import re

import pytest

import replicax
from replicax.cli import main
from tests.cli.test_plan import MODEL, replicax_command
from tests.gpu.described import devices, needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_tables_page_and_data(model, tmp_path) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    done = replicax_command(
        *(f"{model}:plan", "--topology", "a3-megagpu-8g:2", "--strategy", "groups:8", "--html", page, "--json", data),
        XLA_CLIENT_MEM_FRACTION="0.5",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "step on 16 replicas, 16 × NVIDIA H100 80GB HBM3 (2x8)"
    assert re.match(r"fits: needs [\d.]+ KiB on each device, of 39.55 GiB", lines[1])
    words = " ".join(done.stdout.split())
    assert "JAX takes 50% of 79.11 GiB, or as XLA_CLIENT_MEM_FRACTION says" in words
    assert re.search(r"all-gather +1 × .* replica +8 .* NVLink", done.stdout)
    assert "network" in words
    assert page.read_text().startswith("<!DOCTYPE html>")
    found = json.loads(data.read_text())
    assert {c["way"] for c in found["collectives"]} >= {"NVLink"}
    assert found["chip"]["peaks"]["f8"] > found["chip"]["flops"] == 989.4e12


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--logical", "4"], "step on 2 replicas, 8 × ", marks=pytest.mark.soak),
        (["--microbatches", "2", "--strategy", "sharded", "--batch", "1024"], "step on 16 replicas, 8 × "),
    ],
)
def test_placements(model, capsys, monkeypatch, arguments, expected: str) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["plan", f"{model}:plan", "--topology", "h100:8", *arguments]) == 0
    assert capsys.readouterr().out.startswith(expected)


def test_a_model_that_fits_nowhere(model, capsys) -> None:
    assert main(["plan", f"{model}:too_large", "--topology", "l4:2"]) == 1
    assert re.search(r"step does not fit: needs [\d.,]+ GiB on each device, of 16.87 GiB", capsys.readouterr().err)


def test_a_network_of_ones_own(model, capsys) -> None:
    assert main(["plan", f"{model}:plan", "--topology", "h100:2x8", "--network", "3"]) == 0
    slow = capsys.readouterr().out
    assert main(["plan", f"{model}:plan", "--topology", "h100:2x8"]) == 0
    assert slow != capsys.readouterr().out


def test_a_chip_whose_network_is_not_known(model, capsys) -> None:
    card = {"name": "card", "flops": 1e15, "memory": 80e9, "bandwidth": 3e12, "link": 25e9, "links": 18}
    file = model.with_name("card.json")
    file.write_text(json.dumps(card))
    assert main(["plan", f"{model}:plan", "--topology", "h100:2x8", "--chip", str(file)]) == 2
    assert "what a card chip can send to other slices or hosts: give it, as --network" in capsys.readouterr().err
    strategy = replicax.MirroredStrategy(devices("h100:2x8"))
    with pytest.raises(ValueError, match=r"2 NVLink domains, and for card .* dataclasses.replace\(chip, network="):
        replicax.plan(strategy, lambda x: x, chip=replicax.planning.Chip(**card))
