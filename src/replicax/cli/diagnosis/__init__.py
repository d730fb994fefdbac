"""What ``replicax doctor`` looks at: the packages, the machine, its devices, the environment and the cluster.

Each file has a check, or several of one subject: a function that returns findings. All run at the same time, each
with a deadline (:mod:`~replicax.cli.diagnosis.examination`). Devices are asked in a process of their own, as a driver
that hangs can't be interrupted.
"""
