"""Processes of this machine, and their descendants."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

Process = tuple[int, str]
"""The id of a process, and its start time, as ids are reused."""


def of(roots: set[int]) -> set[Process]:
    """These processes and all their descendants; empty on systems without ``/proc``."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # a process that has just ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)], started[int(path.name)] = int(fields[1]), fields[19]
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {(pid, started[pid]) for pid in found if pid in started}


def still_running(processes: set[Process]) -> set[Process]:
    """The processes that still exist, even with another parent."""
    found = set()
    for pid, started in processes:
        with contextlib.suppress(OSError, IndexError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            if fields[19] == started and fields[0] != "Z":
                found.add((pid, started))
    return found


def named(processes: set[Process], part: str) -> set[Process]:
    """The processes with ``part`` in their command line."""
    found = set()
    for pid, started in still_running(processes):
        with contextlib.suppress(OSError):
            if part in (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace"):
                found.add((pid, started))
    return found


def end(processes: set[Process]) -> None:
    """Kill the processes that still exist."""
    for pid, _ in still_running(processes):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
