"""The checks that look at this machine alone, as ``replicax doctor`` and ``replicax env`` both do."""

from __future__ import annotations

from pathlib import Path

from replicax.cli.diagnosis import device_check, environment_variables, host_machine, installed_packages, nvidia_gpus
from replicax.cli.diagnosis.examination import Check


def machine_checks(directory: Path | None = None) -> list[Check]:
    """The checks, in the order of their findings.

    Args:
      directory: a folder whose disk is looked at, too.
    """
    disk = [] if directory is None else [Check("disk", lambda seconds: host_machine.look_at_disk(directory))]
    return [
        Check("software", installed_packages.look),
        Check("devices", device_check.look),
        Check("GPUs", nvidia_gpus.look),
        Check("machine", host_machine.look),
        *disk,
        Check("environment", environment_variables.look),
    ]
