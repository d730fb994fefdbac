"""Which values of a parameter are for ``make test``, where the others find nothing else, or only rarely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def soak_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All of ``values``, for ``pytest.mark.parametrize``; those that are not ``quick`` are for ``make soak``.

    A tuple has the values of several parameters.
    """
    every = list(values)
    assert all(value in every for value in quick), (quick, every)
    return [value if value in quick else soaked(*value if isinstance(value, tuple) else (value,)) for value in every]


def soaked(*values: Any) -> Any:
    """Values of parameters that are for ``make soak``."""
    return pytest.param(*values, marks=pytest.mark.soak)
