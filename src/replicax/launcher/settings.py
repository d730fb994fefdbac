"""The options of a launch, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from replicax.launcher import LaunchError
from replicax.launcher.worker_program import WorkerProgram

DEFAULT_RESTARTS = 3
"""How many faults are followed by another attempt, by default."""
Show = Literal["all", "chief", "none"]


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """The options of a launch: what to run, where, and how often.

    Raises a LaunchError if a number is out of range, or options contradict each other.
    """

    program: WorkerProgram
    workers: int  # the largest number on this machine; as many start first
    least: int  # the smallest number to go on with if some are lost
    devices_per_worker: int | None = None  # ``None`` leaves it to the platform
    hosts: tuple[str, ...] = ()  # the machines of the workers, the chief's first; empty for this machine alone
    node: int = 0  # the number of this machine among the hosts
    port: int | None = None  # the chief's; ``None`` for any free one
    bind: str | None = None  # the address at which the chief listens; ``None`` for that of its host
    log_dir: Path = Path("replicax-logs")  # of the workers' output
    show: Show = "all"  # the workers whose output is shown
    grace: float = 30.0  # seconds that workers have to end when they are asked to
    hang_timeout: float = 10.0  # seconds for which a worker may go without a step, at least; 0: for ever
    finish_timeout: float | None = None  # seconds that the others have to end when one has finished; ``None``: for ever
    max_restarts: int | None = None  # after faults; ``None`` also looks at the kind of the fault: see RestartPolicy
    max_preemptions: int = 100  # restarts after preemptions
    max_resizes: int = 100  # changes of the number of workers
    backoff: float = 1.0  # seconds before the first attempt after a fault, doubled for each further one

    def __post_init__(self) -> None:
        for option, seconds in (
            ("--grace", self.grace),
            ("--backoff", self.backoff),
            ("--hang-timeout", self.hang_timeout),
        ):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise LaunchError(f"{option} must be a number of seconds, 0 or more, got {seconds:g}")
        if self.finish_timeout is not None and not (math.isfinite(self.finish_timeout) and self.finish_timeout > 0):
            raise LaunchError(f"--finish-timeout must be a positive number of seconds, got {self.finish_timeout:g}")
        if len(self.hosts) > 1:
            self._check_hosts()

    def _check_hosts(self) -> None:
        """Several launchers don't communicate, so each makes one attempt, with a fixed number of workers."""
        if self.least != self.workers:
            raise LaunchError(
                f"--workers {self.least}:{self.workers} with {len(self.hosts)} hosts: the number of workers can change "
                "on a single machine only; give one number"
            )
        if self.max_restarts:
            raise LaunchError(
                f"--max-restarts {self.max_restarts} with {len(self.hosts)} hosts: one launcher can't start "
                "the workers of other hosts again. Leave it out: the scheduler starts all (see --sbatch and --jobset)"
            )
        if self.port is None:
            raise LaunchError(
                f"{len(self.hosts)} hosts need --port, the same on all, as they can't agree on a free one"
            )

    @property
    def total(self) -> int:
        """The largest number of workers on all hosts."""
        return self.workers * max(1, len(self.hosts))

    @property
    def restarts(self) -> int:
        """The largest number of faults that are followed by another attempt."""
        return DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def is_alone(self) -> bool:
        """Return whether all workers are on this machine."""
        return len(self.hosts) < 2

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of workers may change."""
        return self.least < self.workers
