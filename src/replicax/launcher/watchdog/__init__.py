"""The watchdog finds workers that hang or keep others waiting, from outside the process.

:mod:`~replicax.launcher.watchdog.hang_watch` reads the status of each worker from its heartbeat page and the kernel,
and decides which hang; :mod:`~replicax.launcher.watchdog.stragglers` names those that are slow.
"""
