"""The watchdog finds workers that hang, from outside the process.

:mod:`~replicax.launcher.watchdog.worker_monitor` reads the status of one worker from its heartbeat page and the kernel.
:mod:`~replicax.launcher.watchdog.hang_detection` decides which workers hang, given the status of all: a worker that
waits inside a program may wait for another one that has a good reason.
:mod:`~replicax.launcher.watchdog.hang_watch` runs both for an attempt, and asks workers for their stacks.
"""
