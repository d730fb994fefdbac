"""The environment of a worker: its number, the addresses of the others, and the limits of the launch.

==============================  ======================================================================================
``JAX_COORDINATOR_ADDRESS``     where the chief is; ``jax.distributed.initialize`` reads it
``JAX_COORDINATOR_BIND_ADDRESS``  where the chief listens; ``jax.distributed.initialize`` reads it
``JAX_NUM_PROCESSES``           how many workers there are
``JAX_PROCESS_ID``              which of them this is
``TF_CONFIG``                   the same three, as ``tf.distribute`` has them
``JAX_NUM_CPU_DEVICES`` …       its devices and threads: see :mod:`~replicax.launcher.device_allocation`
``REPLICAX_ATTEMPT``            how often all workers have been started before, from 0
``REPLICAX_MAX_RESTARTS``       how often they are started again after a fault, at most
``REPLICAX_MIN_WORKERS``        with how many the launch goes on, at least
``REPLICAX_MAX_WORKERS``        how many there can be
``REPLICAX_GRACE_SECONDS``      how long a worker has to end after SIGTERM or Ctrl-C
``REPLICAX_LOG_DIR``            the folder of the launch's output
``REPLICAX_HEARTBEAT``          where it reports its progress: see :mod:`~replicax.launcher.watchdog`
``REPLICAX_LAUNCH_ID``          marks all processes of a launch: see :mod:`~replicax.launcher.orphans`
``COLUMNS``                     how wide a line can be
``PYTHONUNBUFFERED``            1, unless set: output appears at once, even if the worker is killed then
==============================  ======================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from replicax.launcher.rendezvous import LaunchRendezvous
from replicax.launcher.settings import LaunchSettings

MARK = "REPLICAX_LAUNCH_ID"
# These say which task of a scheduler the launcher's own process is; a worker is another task, or none.
_OF_THE_LAUNCHER = (
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
)


def worker_environment(
    inherited: Mapping[str, str],
    settings: LaunchSettings,
    rendezvous: LaunchRendezvous,
    *,
    worker: int,
    attempt: int,
    launch_id: str,
    devices: Mapping[str, str],
    columns: int | None,
) -> dict[str, str]:
    """The environment of one worker; the module's docstring describes its variables.

    ``worker`` is its number among those of all hosts, ``attempt`` how often all workers have been started before,
    ``inherited`` the launcher's environment, and ``columns`` is ``None`` if the output is not a terminal.
    """
    cluster = {"cluster": {"worker": rendezvous.addresses}, "task": {"type": "worker", "index": worker}}
    environment = {name: value for name, value in inherited.items() if name not in _OF_THE_LAUNCHER}
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    outer = inherited.get(MARK)  # of a launch that contains this one
    return environment | {
        "JAX_COORDINATOR_ADDRESS": rendezvous.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": rendezvous.bind,
        "JAX_NUM_PROCESSES": str(len(rendezvous.addresses)),
        "JAX_PROCESS_ID": str(worker),
        "TF_CONFIG": json.dumps(cluster),
        "REPLICAX_ATTEMPT": str(attempt),
        "REPLICAX_MAX_RESTARTS": str(settings.restarts),
        "REPLICAX_MIN_WORKERS": str(settings.least * max(1, len(settings.hosts))),
        "REPLICAX_MAX_WORKERS": str(settings.total),
        "REPLICAX_GRACE_SECONDS": f"{settings.grace:g}",
        "REPLICAX_LOG_DIR": str(settings.log_dir.absolute()),
        MARK: f"{outer}/{launch_id}" if outer else launch_id,
        **devices,
    }
