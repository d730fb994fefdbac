"""Speed: examples and tokens a second, and the share of the devices' peak that the steps reach (MFU)."""

from __future__ import annotations

import collections
from typing import Any

from replicax import _jax
from replicax.errors import warn
from replicax.planning.chip_specs import chip_and_share
from replicax.planning.report import Plan
from replicax.strategy import Strategy
from replicax.system.quantities import counted

RATED = 4
"""Over how many logging intervals speed is measured: one alone may have waited for another's."""


class Speed:
    """The speed of a run's steps, in examples, tokens, and as shares of the devices' peak and of the plan's speed."""

    def __init__(self, strategy: Strategy, tokens_per_example: int | None, plan: Plan | None = None) -> None:
        self.flops = 0  # of a step on all replicas; 0: unknown
        self.peak = peak_of(strategy)
        self._tokens = tokens_per_example
        self._predicted = None if plan is None else predicted_seconds(plan, strategy)
        # Steps, examples, and seconds of training.
        self._rates = collections.deque([(0, 0, 0.0)], maxlen=RATED + 1)

    @property
    def names(self) -> list[str]:
        """The names of the numbers that :meth:`after` may return."""
        known = {"tokens_per_second": self._tokens, "mfu": self.peak, "of_plan": self._predicted}
        return ["examples_per_second", *(name for name, needed in known.items() if needed is not None)]

    @property
    def seconds(self) -> float:
        """The time at which the last interval was over."""
        return self._rates[-1][2]

    def start(self, step: int, seconds: float) -> None:
        """Begin after ``step`` steps, for which training has taken ``seconds``."""
        self._rates[-1] = step, 0, seconds

    def after(self, step: int, examples: int, seconds: float) -> dict[str, float]:
        """The numbers to log after another interval."""
        self._rates.append((step, examples, seconds))
        first_step, first_examples, since = self._rates[0]
        taken = max(seconds - since, 1e-9)
        values = {"examples_per_second": (examples - first_examples) / taken}
        if self._tokens is not None:
            values["tokens_per_second"] = values["examples_per_second"] * self._tokens
        if self.peak is not None and self.flops:
            values["mfu"] = self.flops * (step - first_step) / taken / self.peak
        if self._predicted is not None:
            values["of_plan"] = self._predicted * (step - first_step) / taken
        return values


def flops_of(jaxpr: Any) -> int:
    """The floating-point operations of the matrix products and convolutions of a traced step, on one replica.

    Two for each multiplication and its addition. Loops and branches count as in ``_jax.executed_sum``.

    >>> import jax, jax.numpy as jnp
    >>> flops_of(jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((4, 8)), jnp.ones((8, 3))).jaxpr)
    192
    """
    return sum(_jax.executed_sum(equation, _jax.product_flops) for equation in jaxpr.eqns)


def predicted_seconds(plan: Plan, strategy: Strategy) -> float | None:
    """Return the seconds that a step takes, according to the plan; raises a ValueError if it does not say.

    ``None``, with a warning, if it is a plan for other devices than those of ``strategy``: a run may go on with fewer.
    """
    devices, replicas = strategy.extended.mesh.devices, strategy.num_replicas_in_sync
    if (plan.replicas, plan.devices, plan.platform) != (replicas, devices.size, devices.flat[0].platform):
        warn(
            f"replicax.train: the plan is for {counted(plan.replicas, 'replica')} on {plan.devices} × "
            f"{plan.device_kind}, and the step runs on {counted(replicas, 'replica')} on {devices.size} × "
            f"{devices.flat[0].device_kind}: 'of_plan' is not logged. Pass the plan of this strategy"
        )
        return None
    if plan.timeline is None:
        raise ValueError(
            f"replicax.train: the plan (of {plan.device_kind}) has no predicted time, as the speed of its devices is "
            "not known: pass a replicax.planning.Chip to replicax.plan(chip=…)"
        )
    return plan.timeline.seconds


def peak_of(strategy: Strategy) -> float | None:
    """Return the peak of all devices of a strategy together, in bfloat16 FLOPs per second; ``None`` if unknown.

    >>> import replicax
    >>> peak_of(replicax.MirroredStrategy(["cpu:0", "cpu:1"])) is None
    True
    """
    devices = strategy.extended.mesh.devices
    _, each = chip_and_share(devices)
    return None if each is None else each.flops * devices.size
