"""The default strategy: the strategy of code outside every scope."""

from __future__ import annotations

import functools

import jax

from replicax import _jax
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy


class DefaultStrategy(Strategy):
    """One replica on JAX's default device; :func:`replicax.get_strategy` returns it outside every scope.

    That is always the same one; the constructor makes another. Code written for strategies works under it unchanged,
    even outside ``run``: variables are read and assigned at once, and collectives return their operands.

    >>> import replicax
    >>> replicax.get_strategy()
    DefaultStrategy([cpu:0])
    """

    def __init__(self) -> None:
        default = _jax.setting("jax_default_device")
        if not isinstance(default, jax.Device):
            default = jax.local_devices(backend=default)[0]
        super().__init__(StrategyExtended([default]))


default = functools.cache(DefaultStrategy)
"""The only default strategy."""
