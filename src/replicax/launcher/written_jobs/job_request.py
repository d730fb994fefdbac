"""What a job needs beside its launch: machines, time, a name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from replicax.launcher import LaunchError
from replicax.launcher.device_shares import gpus_each
from replicax.launcher.launch_settings import LaunchSettings

_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?")


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """A launch, and what a scheduler has to be told of it.

    Attributes:
      settings: of the launch on each machine; its hosts are not known yet.
      name: of the job.
      nodes: how many machines.
      gpus: how many GPUs each machine needs.
      cpus: how many processor cores each machine needs; ``None`` for the whole machine, or what the scheduler gives.
      seconds: how long the job may run; ``None`` for what the scheduler allows.
      image: the container to run in; for Kubernetes.
      log_dir: as the user has named it; ``None`` for a folder of the job's own.

    Raises:
      LaunchError: the launch can't be a job of so many machines.
    """

    settings: LaunchSettings
    name: str
    nodes: int = 1
    gpus: int = 0
    cpus: int | None = None
    seconds: int | None = None
    image: str | None = None
    log_dir: str | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        if self.nodes > 1 and settings.is_elastic:
            raise LaunchError(
                f"--workers {settings.least}:{settings.workers} with --nodes {self.nodes}: the number of workers can "
                "change on a single machine only; give one number"
            )
        if self.gpus:
            gpus_each(self.gpus, settings.workers, settings.devices_per_worker, f"--gpus {self.gpus}")

    def options(self, log_dir: str) -> Sequence[str]:
        """The launcher's options on each machine, but for those that say where the others are."""
        settings = self.settings
        workers = f"{settings.least}:{settings.workers}" if settings.is_elastic else str(settings.workers)
        found = ["--workers", workers]
        if settings.devices_per_worker is not None:
            found += ["--devices-per-worker", str(settings.devices_per_worker)]
        found += ["--grace", f"{settings.grace:g}", "--log-dir", log_dir]
        found += _differing(settings, "show", "hang_timeout", "finish_timeout")
        if self.nodes == 1:  # the scheduler starts workers of several machines again
            found += _differing(settings, "max_restarts", "max_resizes", "backoff", "port", "bind")
            found += ["--max-preemptions", "0"]  # whoever asked the job to leave wants the machine
        return found


def _differing(settings: LaunchSettings, *names: str) -> list[str]:
    """The options of these names that are not as they are by default."""
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value != field.default:
            found += ["--" + field.name.replace("_", "-"), f"{value:g}" if isinstance(value, float) else str(value)]
    return found


def seconds_of(text: str) -> int:
    """A duration as Slurm writes it: ``30`` and ``30:00`` are half an hour, ``2-00:00:00`` two days.

    Raises:
      ValueError: it is none.

    >>> from replicax.launcher.written_jobs.job_request import seconds_of
    >>> [seconds_of(text) for text in ("30", "30:00", "12:00:00", "2-00:00:00")]
    [1800, 1800, 43200, 172800]
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a duration such as 30:00 (minutes) or 12:00:00 or 2-00:00:00, got {text!r}")
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        found = int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    elif match["third"] is not None:
        found = first * 3600 + second * 60 + third
    else:
        found = first * 60 + second
    if not found:
        raise ValueError(f"expected a duration of more than 0 seconds, got {text!r}")
    return found
