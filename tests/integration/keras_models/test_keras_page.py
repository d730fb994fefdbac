"""The page on Keras, and the examples in the docstrings, run as a reader would run them."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import replicax.models.keras
from tests import test_documents

MODULES = [name for _, name, _ in pkgutil.iter_modules(replicax.models.keras.__path__, "replicax.models.keras.")]


def test_the_page() -> None:
    test_documents.run_examples(test_documents.ROOT / "docs" / "keras.md")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
