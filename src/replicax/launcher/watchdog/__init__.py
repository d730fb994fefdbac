"""The watchdog: finds workers that hang, from outside, by what they write into a page, and by what the kernel says.

:mod:`~replicax.launcher.watchdog.vital_signs` is what can be seen of one worker, and for how long it has been so.
:mod:`~replicax.launcher.watchdog.verdict` says who hangs, given the signs of all workers: a worker that waits inside of
a program may wait for another one that has a good reason. :mod:`~replicax.launcher.watchdog.hang_watch` puts both
together for an attempt, and asks workers for their stacks.
"""
