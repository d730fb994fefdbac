"""The version of Replicax, and packages that only some features need."""

from __future__ import annotations

import importlib.util

VERSION = "0.1.0"
"""The version of Replicax, public as ``replicax.__version__``."""

PICTURES = ("matplotlib", "pictures")
"""The package that draws, and the extra that brings it."""


def is_installed(package: str) -> bool:
    """Return whether ``package`` is installed."""
    return importlib.util.find_spec(package) is not None


def check_installed(what: str, package: str, extra: str) -> None:
    """Raise unless ``package`` is installed, which ``what`` needs.

    Raises:
      ImportError: the message says which extra brings it.

    >>> check_installed("Topology.plot", "no_package", "pictures")
    Traceback (most recent call last):
    ImportError: Topology.plot needs the package no_package, which is not installed: pip install 'replicax[pictures]'
    """
    if not is_installed(package):
        raise ImportError(
            f"{what} needs the package {package}, which is not installed: pip install 'replicax[{extra}]'"
        )
