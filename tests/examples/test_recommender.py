"""``examples/recommender.py``, small: servers rank as well as MirroredStrategy."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

import replicax
from examples import recommender
from replicax.parameter_server import coordinator as coordinator_module
from tests.parameter_server.thread_actors import ThreadActors


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"USERS": 60, "ITEMS": 40, "CLICKS": 2048, "EPOCHS": 2, "BATCH": 256}.items():
        monkeypatch.setattr(recommender, name, value)
    monkeypatch.setattr(coordinator_module, "_make_actors", ThreadActors)
    strict = {name: getattr(jax.config, name) for name in ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")}
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # on all threads, as users have it
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("small")
def test_all_ways_rank_alike(capsys: pytest.CaptureFixture[str]) -> None:
    found = recommender.main([])
    unseen = recommender.clicks(seed=3, count=5000)
    untrained = recommender.TwoTowers(replicax.MirroredStrategy(["cpu:0"])).recall(*unseen)
    assert found["mirrored"] > untrained + 0.2
    assert found["sync"] == pytest.approx(found["mirrored"], abs=0.005)
    assert found["async"] == pytest.approx(found["mirrored"], abs=0.05)
    assert "staleness" in capsys.readouterr().out
