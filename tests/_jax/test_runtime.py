"""What depends on JAX's settings."""

from __future__ import annotations

import itertools

import jax

from replicax import _jax


def test_a_setting_that_jax_gets_later_changes_nothing_until_somebody_sets_it():
    before = _jax.trace_settings()
    late = jax.make_user_context(None)  # as Pallas makes some of its own when it is imported
    assert _jax.trace_settings() == before
    with late(3):
        changed = _jax.trace_settings()
        assert changed != before
    with late(4):
        assert _jax.trace_settings() not in (before, changed)
    assert _jax.trace_settings() == before


def test_settings_that_change_what_is_traced_are_seen():
    with jax.default_matmul_precision("highest"):
        high = _jax.trace_settings()
    with jax.default_matmul_precision("default"):
        low = _jax.trace_settings()
    with jax.debug_nans(True):
        nans = _jax.trace_settings()
    for one, other in itertools.combinations((_jax.trace_settings(), high, low, nans), 2):
        assert one != other
