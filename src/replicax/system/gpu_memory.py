"""The part of a GPU's memory that JAX takes, according to the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The variables, a new and an old one, that set this part."""

DEFAULT_FRACTION = 0.75
"""The part without them."""


def memory_fraction(environment: Mapping[str, str]) -> float:
    """The fraction that JAX takes; the default if the environment has none, or no number above 0.

    >>> memory_fraction({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}), memory_fraction({})
    (0.9, 0.75)
    """
    text = next((environment[name] for name in FRACTION_VARIABLES if environment.get(name)), "")
    try:
        fraction = float(text)
    except ValueError:
        return DEFAULT_FRACTION
    return fraction if math.isfinite(fraction) and fraction > 0 else DEFAULT_FRACTION
