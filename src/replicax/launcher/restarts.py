"""Restarts: whether another attempt follows one, with how many workers, and after which pause."""

from __future__ import annotations

import dataclasses

from replicax.launcher.attempt import AttemptResult
from replicax.launcher.settings import LaunchSettings
from replicax.launcher.worker_process import Ending
from replicax.system.quantities import counted

LOST_AFTER = 2
"""A worker's place is lost if its worker was the first to fail in so many attempts in a row."""
LONGEST_PAUSE = 60.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision after an attempt."""

    pause: float | None  # seconds before another attempt; ``None`` if none follows
    why: str  # the reason, for the user


class RestartPolicy:
    """The budgets of a launch, and the places of its workers on this machine.

    A *place* has a part of the devices; each attempt numbers its workers by the places that are left.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self.places = list(range(settings.workers))  # of the workers of the next attempt
        self.faults = self.preemptions = self.resizes = 0  # those that were followed by another attempt
        self._suspect: int | None = None
        self._in_a_row = 0

    def after(self, result: AttemptResult) -> Decision:
        """Decide after an attempt that neither finished nor was stopped; changes the places and budgets."""
        if result.resize:
            return self._after_resize(result.resize)
        assert result.cause is not None
        if not self._settings.is_alone:
            return Decision(None, "with several hosts it is for the scheduler to start all of them again")
        if result.is_preempted:
            self._suspect = None
            return self._after_preemption()
        return self._after_fault(result.cause)

    def _after_resize(self, change: int) -> Decision:
        if self.resizes >= self._settings.max_resizes:
            return Decision(None, f"--max-resizes {self._settings.max_resizes}: all are used up")
        self.resizes += 1
        if change < 0:
            self.places.pop()
        else:
            self.places.append(next(i for i in range(self._settings.workers) if i not in self.places))
            self.places.sort()
        return Decision(0.0, f"going on with {counted(len(self.places), 'worker')}")

    def _after_preemption(self) -> Decision:
        if self.preemptions >= self._settings.max_preemptions:
            return Decision(None, f"--max-preemptions {self._settings.max_preemptions}: all are used up")
        self.preemptions += 1
        return Decision(0.0, f"starting again, after preemption {self.preemptions}")

    def _after_fault(self, cause: Ending) -> Decision:
        if self._has_lost_a_place(cause):
            return Decision(
                0.0,
                f"worker {cause.worker} was the first to fail {LOST_AFTER} times in a row: its place is given up, "
                f"going on with {counted(len(self.places), 'worker')}",
            )
        limit = self._settings.restarts
        if self._settings.max_restarts is None and not cause.is_killed and not self._settings.is_elastic:
            return Decision(
                None,
                "not starting again, as the program itself has failed, and would probably fail again "
                "(--max-restarts R starts again after any fault, R times)",
            )
        if self.faults >= limit:
            used = "none is allowed" if limit == 0 else "all are used up"
            return Decision(None, f"not starting again: --max-restarts {limit}, {used}")
        pause = min(self._settings.backoff * 2**self.faults, LONGEST_PAUSE)
        self.faults += 1
        return Decision(pause, f"starting all workers again in {pause:g} s (restart {self.faults} of {limit})")

    def _has_lost_a_place(self, cause: Ending) -> bool:
        """Remove the worker's place if it fails again and again, and the others can go on; returns whether it did."""
        if not cause.is_certain:
            self._suspect = None
            return False
        place = self.places[cause.worker]
        self._in_a_row = self._in_a_row + 1 if place == self._suspect else 1
        self._suspect = place
        if (
            self._in_a_row < LOST_AFTER
            or len(self.places) <= self._settings.least
            or self.resizes >= self._settings.max_resizes
        ):
            return False
        self.resizes += 1
        self.places.remove(place)
        self._suspect = None
        return True
