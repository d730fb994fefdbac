"""Input that is closed soon."""

from __future__ import annotations

import pytest

from replicax.data.batches import prefetch


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits only for a moment for a source that is stuck."""
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.05)
