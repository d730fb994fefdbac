"""The part of a GPU's memory that JAX takes, according to the environment."""

from __future__ import annotations

from collections.abc import Mapping

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The variables, a new and an old one, that set this part."""

DEFAULT_FRACTION = 0.75
"""The part without them."""


def fraction_in(environment: Mapping[str, str]) -> str:
    """The fraction in the environment, as written there; empty if there is none.

    >>> from replicax.system.gpu_memory import fraction_in
    >>> fraction_in({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}), fraction_in({})
    ('.9', '')
    """
    return next((environment[name] for name in FRACTION_VARIABLES if environment.get(name)), "")
