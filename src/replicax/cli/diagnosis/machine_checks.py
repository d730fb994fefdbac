"""The checks of this machine alone, for ``replicax doctor`` and ``replicax env``."""

from __future__ import annotations

from pathlib import Path

from replicax.cli.diagnosis import device_check, environment_variables, host_machine, installed_packages, nvidia_gpus
from replicax.cli.diagnosis.check_runner import Check


def machine_checks(directory: Path | None = None) -> list[Check]:
    """The checks, in the order of their findings."""
    disk = [] if directory is None else [Check("disk", lambda seconds: host_machine.look_at_disk(directory))]
    return [
        Check("software", installed_packages.check),
        Check("devices", device_check.check),
        Check("GPUs", nvidia_gpus.check),
        Check("machine", host_machine.check),
        *disk,
        Check("environment", environment_variables.check),
    ]
