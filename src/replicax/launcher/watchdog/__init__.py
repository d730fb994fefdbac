"""The watchdog finds workers that hang or keep others waiting, from outside the process.

:mod:`~replicax.launcher.watchdog.worker_monitor` reads the status of one worker from its heartbeat page and the kernel.
:mod:`~replicax.launcher.watchdog.hang_watch` decides which workers hang, given the status of all, and asks them for
their stacks. :mod:`~replicax.launcher.watchdog.stragglers` names those that are slow.
"""
