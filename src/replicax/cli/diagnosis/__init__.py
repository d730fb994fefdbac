"""The checks of ``replicax doctor``: packages, machine, devices, environment and cluster.

Each file has one check, or several of one subject: functions that return findings. All run at the same time, each
with a deadline (:mod:`~replicax.cli.diagnosis.check_runner`). A separate process examines the devices, because a driver
that hangs can't be interrupted.
"""
