"""Settings of the compiler for GPUs: this JAX knows each."""

from __future__ import annotations

import jax
import pytest

from replicax.backends.gpu import GATHERS_AHEAD


@pytest.mark.parametrize("name", GATHERS_AHEAD)
def test_this_jax_knows_the_setting(name: str) -> None:
    value = GATHERS_AHEAD[name]
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile({name: value})  # any compiler takes those of all
    with pytest.raises(Exception, match="No such compile option"):
        lowered.compile({name + "_not": value})
