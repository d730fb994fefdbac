"""The default strategy: what code outside every scope runs under."""

from __future__ import annotations

import functools

import jax

from replicax.context import register_default_strategy
from replicax.extended import StrategyExtended
from replicax.strategy import Strategy


class DefaultStrategy(Strategy):
    """One replica on JAX's default device; what :func:`replicax.get_strategy` returns outside every scope.

    There is one of it. Code that was written for strategies works under it unchanged, and outside ``run`` too:
    variables are read and assigned at once, and collectives return what they are given.

    >>> import replicax
    >>> replicax.get_strategy()
    DefaultStrategy([cpu:0])
    """

    def __init__(self) -> None:
        default = jax.config.values["jax_default_device"]
        if not isinstance(default, jax.Device):
            default = jax.local_devices(backend=default)[0]
        super().__init__(StrategyExtended([default]))


register_default_strategy(functools.cache(DefaultStrategy), Strategy)
