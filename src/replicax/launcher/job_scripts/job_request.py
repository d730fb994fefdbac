"""The request for a job: a launch, and the machines, time and name that the scheduler needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from replicax.launcher import LaunchError
from replicax.launcher.device_allocation import gpus_per_worker
from replicax.launcher.settings import LaunchSettings

_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """A launch, with what a scheduler has to know; raises a LaunchError if it can't be a job of so many machines."""

    settings: LaunchSettings  # of the launch on each machine; its hosts are not known yet
    name: str
    nodes: int = 1  # the number of machines
    gpus: int = 0  # of each machine
    cpus: int | None = None  # cores of each machine; ``None`` for all, or the scheduler's default
    seconds: int | None = None  # the longest time that the job may run; ``None`` for the scheduler's limit
    image: str | None = None  # the container to run in; for Kubernetes
    log_dir: str | None = None  # as the user named it; ``None`` for one folder for each job

    def __post_init__(self) -> None:
        settings = self.settings
        if self.nodes > 1 and settings.is_elastic:
            raise LaunchError(
                f"--workers {settings.least}:{settings.workers} with --nodes {self.nodes}: the number of workers can "
                "change on a single machine only; give one number"
            )
        if self.gpus:
            gpus_per_worker(self.gpus, settings.workers, settings.devices_per_worker, f"--gpus {self.gpus}")

    def options(self, log_dir: str) -> Sequence[str]:
        """The launcher's options on each machine, without the addresses of the others."""
        settings = self.settings
        workers = f"{settings.least}:{settings.workers}" if settings.is_elastic else str(settings.workers)
        options = ["--workers", workers]
        if settings.devices_per_worker is not None:
            options += ["--devices-per-worker", str(settings.devices_per_worker)]
        options += ["--grace", f"{settings.grace:g}", "--log-dir", log_dir]
        options += _differing(settings, "show", "hang_timeout", "finish_timeout")
        if self.nodes == 1:  # the scheduler restarts workers of several machines
            options += _differing(settings, "max_restarts", "max_resizes", "backoff", "port", "bind")
            options += ["--max-preemptions", "0"]  # the scheduler wants the machine
        return options


def _differing(settings: LaunchSettings, *names: str) -> list[str]:
    """The options among ``names`` that differ from their defaults."""
    options = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value != field.default:
            options += ["--" + field.name.replace("_", "-"), f"{value:g}" if isinstance(value, float) else str(value)]
    return options


def seconds_of(text: str) -> int:
    """Parse a duration in Slurm's format: ``30`` and ``30:00`` are half an hour, ``2-00:00:00`` two days.

    Raises:
      ValueError: ``text`` is not a duration.

    >>> [seconds_of(text) for text in ("30", "30:00", "12:00:00", "2-00:00:00")]
    [1800, 1800, 43200, 172800]
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a duration such as 30:00 (minutes) or 12:00:00 or 2-00:00:00, got {text!r}")
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        seconds = int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    elif match["third"] is not None:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    if not seconds:
        raise ValueError(f"expected a duration of more than 0 seconds, got {text!r}")
    return seconds
