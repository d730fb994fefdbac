"""Processes of this machine, and those that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

Process = tuple[int, str]
"""The number of a process, and when it was started: numbers are used again."""


def of(roots: set[int]) -> set[Process]:
    """These, and all that come from them; none where the system has no ``/proc``."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # one that has just ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)], started[int(path.name)] = int(fields[1]), fields[19]
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {(pid, started[pid]) for pid in found if pid in started}


def left_of(processes: set[Process]) -> set[Process]:
    """Those that are still there, whoever is their parent by now."""
    found = set()
    for pid, started in processes:
        with contextlib.suppress(OSError, IndexError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            if fields[19] == started and fields[0] != "Z":
                found.add((pid, started))
    return found


def named(processes: set[Process], part: str) -> set[Process]:
    """Those whose command line has ``part`` in it."""
    found = set()
    for pid, started in left_of(processes):
        with contextlib.suppress(OSError):
            if part in (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace"):
                found.add((pid, started))
    return found


def end(processes: set[Process]) -> None:
    """Kill those that are still there."""
    for pid, _ in left_of(processes):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
