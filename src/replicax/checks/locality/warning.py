"""How the locality check warns: each mistake of a line once."""

from __future__ import annotations

import warnings
from typing import Any

from replicax.errors import LocalityWarning

__warningregistry__: dict[Any, Any] = {}


def warn_at(text: str, file: str, line: int) -> None:
    """Warn of something in a line, once under Python's usual filters, however often the step is traced."""
    warnings.warn_explicit(text, LocalityWarning, file, line, registry=__warningregistry__)
