"""Exit codes by which a worker tells the launcher how it has ended."""

EXIT_PREEMPTED = 75
"""A worker ends with this code, ``sys.exit(replicax.EXIT_PREEMPTED)``, if it was asked to leave (SIGTERM), has saved
what it needs to go on, and is to be started again. It is ``EX_TEMPFAIL`` of ``sysexits.h``: try again later."""
