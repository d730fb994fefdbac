"""The character model, as its users run it without the launcher."""

from __future__ import annotations

import glob

import jax

import replicax
from examples import characters
from tests.launcher.launches import ROOT


def test_without_the_launcher_it_is_one_worker(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(characters, "WIDTH", 32)
    monkeypatch.setattr(characters, "LENGTH", 12)
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    files = glob.glob(str(ROOT / "docs" / "metrics.md"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run = characters.train(strategy, files, tmp_path, 4)
    assert run.step == 4
    assert run.numbers["bits per character"] < 8
