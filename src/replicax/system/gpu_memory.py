"""Which part of a GPU's memory JAX takes, by the environment."""

from __future__ import annotations

from collections.abc import Mapping

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The variables, a new one and an old one, that tell JAX which part of a GPU's memory to take."""

DEFAULT_FRACTION = 0.75
"""What JAX takes without them."""


def fraction_in(environment: Mapping[str, str]) -> str:
    """The fraction that the environment names, as it stands there; empty if it names none.

    >>> from replicax.system.gpu_memory import fraction_in
    >>> fraction_in({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}), fraction_in({})
    ('.9', '')
    """
    return next((environment[name] for name in FRACTION_VARIABLES if environment.get(name)), "")
