"""The launcher: a process that starts workers, shows and stores their output, ends them, and restarts them.

``replicax launch`` runs it. It never imports JAX: so it starts quickly, holds no device, and can't hang where a worker
does. Each worker's environment tells it how to find the others
(:mod:`~replicax.launcher.worker_environment`).

From the bottom: :class:`~replicax.launcher.settings.LaunchSettings` are the checked options; an
:class:`~replicax.launcher.attempt.Attempt` is one start of all workers, until all have ended; a
:class:`~replicax.launcher.supervisor.Supervisor` makes attempts for as long as the
:class:`~replicax.launcher.restarts.RestartPolicy` allows. All of it is one thread that waits for the workers' output,
for signals and for the next deadline, whichever comes first.
"""


class LaunchError(Exception):
    """A launch can't be made as requested; the message says what to change, and nothing has been started."""
