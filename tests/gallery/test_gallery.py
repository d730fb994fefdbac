"""The gallery: each program has the losses of one device on four replicas."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.programs.programs import third_party

PROGRAMS: dict[str, dict[str, Any]] = {
    "nnx.cnn": {"epochs": 3, "steps": 1, "dropout": 0.0},
    "nnx.gpt": {"steps": 3},
    "nnx.vit": {"steps": 3},
    "nnx.diffusion": {"steps": 3},
    "equinox.cnn": {"steps": 3},
    "equinox.rnn": {"steps": 3},
    "equinox.bert": {"steps": 3},
    "linen.vae": {"steps": 3},
    "linen.resnet": {"steps": 3},
    "linen.seq2seq": {"steps": 3},
    "pytrees.two_tower": {"steps": 3},
}
"""How short each is here."""


def losses(name: str, strategy: replicax.Strategy, **shorter: Any) -> list[float]:
    """What the program prints."""
    found = importlib.import_module(f"examples.gallery.{name}").main(strategy, **{**PROGRAMS[name], **shorter})
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", PROGRAMS)
@third_party
def test_losses_are_those_of_one_device(name: str) -> None:
    expected = losses(name, strategy_of(1))
    assert len(expected) == 3
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(losses(name, strategy_of(4)), expected, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "resnet" not in name])
@third_party
def test_it_learns(name: str) -> None:
    """In a few dozen steps, as the same on any number of replicas."""
    longer = {"epochs": 2, "steps": None} if name == "nnx.cnn" else {"steps": 60}
    found = losses(name, strategy_of(4), **longer)
    assert np.mean(found[-5:]) < 0.95 * np.mean(found[:5]) or found[-1] < found[0] / 2
