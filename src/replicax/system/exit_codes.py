"""Exit codes that tell the launcher how a worker ended."""

EXIT_PREEMPTED = 75
"""A worker that was asked to leave (SIGTERM) and has saved its state exits with this code,
``sys.exit(replicax.EXIT_PREEMPTED)``, to be started again. It is ``EX_TEMPFAIL`` of ``sysexits.h``: try again later."""
