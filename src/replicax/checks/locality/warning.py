"""Warnings of the locality check: one for each mistake and line."""

from __future__ import annotations

import warnings
from typing import Any

from replicax.errors import LocalityWarning

__warningregistry__: dict[Any, Any] = {}


def warn_at(text: str, file: str, line: int) -> None:
    """Warn of a mistake in a line; under Python's usual filters once, however often the step is traced."""
    warnings.warn_explicit(text, LocalityWarning, file, line, registry=__warningregistry__)
