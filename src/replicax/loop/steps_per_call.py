"""Steps per call: how many steps go to the devices at once.

All calls go through the same loop program (``run_steps``), whose body does not depend on how often it runs. So the
number changes the time, and not the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from replicax.argument_checks import checked_integer
from replicax.execution.run import default_options
from replicax.workers.lockstep import Lockstep

MEASURED = 16
"""How many steps are measured, after those that compile."""
TOGETHER = 4
"""How many of these are timed together; the quickest count, as others may have waited for a busy machine."""
SMALL = 2e-3
"""Seconds of a step from which on it is not worth while to join steps."""
CALL = 20e-3
"""Seconds that a call of joined steps is to take, about."""
GAIN = 0.3
"""The share of a small step's time that joining saves, at least: to compile another program has to be worth it."""
MOST = 64
"""How many steps are joined at most, unless the user says how many."""
MOST_BYTES = 64 * 2**20
"""How large the elements of a call may be together, unless the user says how many."""


class StepsPerCall:
    """The number of steps of each call: the one that the user has ``given``, or else the best by measurements.

    The choice divides all ``periods``, the numbers of steps after which something happens between two calls.
    """

    def __init__(
        self, given: int | None, periods: Iterable[int], lockstep: Lockstep, clock: Callable[[], float]
    ) -> None:
        if given is not None:
            given = checked_integer(given, "replicax.train(steps_per_call=…)", note=", or None to have it chosen")
        self.chosen = 1 if given is None else given
        self.is_per_replica = default_options().executor == "per_replica"  # where nothing is joined
        self._open = given is None and not self.is_per_replica
        self._periods = math.gcd(*periods)
        self._lockstep = lockstep
        self._clock = clock
        self._counted = -2  # the first call compiles, and the second may find the devices busy
        self._since = 0.0
        self._quickest = math.inf
        self._compiled = 0.0

    def next(self, until_boundary: int) -> int:
        """Return the number of steps of the next call, if something happens after ``until_boundary`` of them.

        Each number of steps has to be compiled, so there are few: the chosen one, and 1.
        """
        if self._open and self._counted == -2:
            self._since = self._clock()
        return self.chosen if until_boundary >= self.chosen else 1

    def ran(self, done: Any, bytes_per_step: int, left: int) -> None:
        """Measure a call that has been launched, and choose when enough calls have been measured.

        ``done`` is an output of the call. An element has ``bytes_per_step`` bytes on all devices together. The run has
        ``left`` steps still to run.
        """
        if not self._open:
            return
        self._counted += 1
        if self._counted == -1:
            self._compiled = self._clock() - self._since
        if self._counted < 0 or self._counted % TOGETHER:
            return
        jax.block_until_ready(done)
        now = self._clock()
        if self._counted:
            self._quickest = min(self._quickest, now - self._since)
        self._since = now
        if self._counted == MEASURED:
            seconds = self._quickest / TOGETHER
            is_worth_it = GAIN * seconds * left > self._compiled
            proposal = joined_steps(seconds, self._periods, bytes_per_step) if is_worth_it else 1
            self.chosen = self._lockstep.from_chief("chooses how many steps a call has", proposal)
            self._open = False


def joined_steps(seconds: float, period: int, size: int) -> int:
    """Return the number of steps to join in a call; it divides ``period``, unless that is 0.

    A step takes so many ``seconds``, and an element has ``size`` bytes.

    >>> joined_steps(0.0005, 100, 1000), joined_steps(0.0005, 0, 1000), joined_steps(0.05, 100, 1000)
    (25, 40, 1)
    """
    if seconds >= SMALL:
        return 1
    wanted = int(min(MOST, CALL / max(seconds, 1e-9), MOST_BYTES / max(size, 1)))
    return max((k for k in range(1, wanted + 1) if period % k == 0), default=1)
