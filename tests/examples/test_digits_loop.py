"""The digits as a run that lasts."""

import pathlib

import jax
import pytest

from examples import digits, digits_loop
from tests.conftest import strategy_of


def test_the_run_goes_on_and_learns(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "BATCH", 256)  # five steps to an epoch
    folder = str(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first = digits_loop.train(strategy_of(4), folder, epochs=5, progress=False)
        second = digits_loop.train(strategy_of(2), folder, epochs=10, progress=False)
    assert (first.step, second.resumed_at, second.step) == (25, 25, 50)
    assert 0.5 < first.evaluation["accuracy"] < second.evaluation["accuracy"]
    lines = (tmp_path / "logs" / "train.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(5, 51, 5))
