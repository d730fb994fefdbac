"""The commonest mistake is found in 50 wrong steps, and in no right one."""

from __future__ import annotations

import functools
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest

import replicax
from tests.shares.right_steps import RIGHT
from tests.shares.seeded_mistakes import MISTAKES
from tests.shares.training_steps import Model


@pytest.fixture(scope="module")
def m() -> Model:
    return Model()


def told(m: Model, step: Callable[[Model, Any], Any]) -> list[warnings.WarningMessage]:
    """The warnings while ``step`` is traced."""
    with (
        warnings.catch_warnings(record=True) as found,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("always")
        m.strategy.extended.trace(functools.partial(step, m), args=(m.batch,))
    return found


@pytest.mark.parametrize(("step", "text"), MISTAKES, ids=[step.__name__ for step, _ in MISTAKES])
def test_mistake_is_found(m: Model, step: Callable[[Model, Any], Any], text: str) -> None:
    found = told(m, step)
    assert len(found) == 1, [str(w.message) for w in found]
    assert found[0].category is replicax.ShareWarning
    assert text in str(found[0].message)
    assert "# wrong" in linecache.getline(found[0].filename, found[0].lineno)


@pytest.mark.parametrize("step", RIGHT, ids=[step.__name__ for step in RIGHT])
def test_right_step_is_not_called_wrong(m: Model, step: Callable[[Model, Any], Any]) -> None:
    assert [str(w.message) for w in told(m, step)] == []
