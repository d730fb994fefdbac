"""Input that is closed soon, and shuffled without computing again and again where an example goes."""

from __future__ import annotations

import functools

import pytest
from grain._src.python.dataset.transformations.shuffle import index_shuffle as grains

from replicax.data.batches import prefetch

# For each of a few examples Grain goes through thousands of numbers.
grains.index_shuffle = functools.lru_cache(None)(grains.index_shuffle)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits only for a moment for a source that is stuck."""
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.05)
