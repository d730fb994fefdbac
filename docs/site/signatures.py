"""Signatures of classes: those of ``__init__``, also where a metaclass has a call of its own, as that of variables."""

from __future__ import annotations

import inspect
from typing import Any

from sphinx.application import Sphinx


def of_init(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, result: str) -> Any:
    """What autodoc is to show, or ``None`` where it is right already."""
    if what != "class" or "__call__" not in vars(type(obj)):
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(shown)), result


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-signature", of_init)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
