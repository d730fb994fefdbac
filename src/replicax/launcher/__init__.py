"""The launcher: a process that starts workers, shows and keeps what they print, ends them, and starts them again.

``replicax launch`` is its command. It knows nothing of JAX and never imports it: it starts quickly, holds no device,
and can't be hung by what hangs a worker. What a worker needs to find the others is in its environment
(:mod:`~replicax.launcher.worker_environment`).

From the bottom: :class:`~replicax.launcher.launch_settings.LaunchSettings` is what was asked for, checked; an
:class:`~replicax.launcher.attempt.Attempt` is one start of all workers, until all have ended; a
:class:`~replicax.launcher.supervisor.Supervisor` makes attempts for as long as the
:class:`~replicax.launcher.restarts.RestartPolicy` allows. All of it is one thread that waits for the workers' output,
for signals and for the next deadline, whichever comes first.
"""


class LaunchError(Exception):
    """A launch can't be made as it was asked for; the message says what to change, and nothing has been started."""
