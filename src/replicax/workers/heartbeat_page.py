"""The heartbeat's page: shared memory into which a worker writes its progress, for the launcher.

The launcher makes the page, an anonymous file, and names it in the worker's environment. Each field has 8 bytes and is
written with one store: no lock, no system call, and nothing to wait for, on either side. Times are of
``time.monotonic``, which is the same clock in all processes of a machine.

This file imports nothing of JAX, because the launcher reads it, too.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import mmap
import os
from typing import NamedTuple

VARIABLE = "REPLICAX_HEARTBEAT"
"""Environment variable of a worker: the path of its page."""
UNKNOWN = -1.0
"""Value of ``expected`` for a program that has never ended: its duration is unknown."""


class Phase(enum.IntEnum):
    """What a worker does; the page has its number, and messages its words."""

    words: str

    def __new__(cls, words: str) -> Phase:
        phase = int.__new__(cls, len(cls.__members__))
        phase._value_, phase.words = int(phase), words
        return phase

    STEPS = "between two steps"
    START = "starting"
    END = "at its end"
    PAUSED = "in replicax.paused()"
    RENDEZVOUS = "waiting for the other workers"
    EXACT = "in a step on the per-replica executor"
    COMPILE = "compiling"
    INPUT = "waiting for its input"
    EVALUATION = "evaluating"
    EVALUATION_STEPS = "evaluating step by step"
    SAVING = "saving"
    RESTORING = "restoring"
    LOGGING = "logging"
    CALLBACKS = "in a callback"


class Usage(NamedTuple):
    """What a worker has spent its time on while it ran steps: totals, in seconds."""

    steps: float  # how many programs it has launched
    sampled: float  # the time for which the rest is known
    idle: float  # its devices had nothing to do
    host: float  # its host was busy, rather than waiting for its devices
    input: float  # its devices were idle as it waited for input
    computed: float  # processors worked, except on Python


class HeartbeatPage(ctypes.Structure):
    """The numbers of one worker."""

    pid: int  # the process that has the page; 0 before
    signal: int  # makes it print its stacks; 0 if there is none
    thread: int  # the thread that trains, by the kernel's number
    phase: int  # what it does
    step: int  # how many steps of its run it has launched; -1 outside a run
    runs: int  # how often it has launched the program that it launched last
    calls: int  # how often it has launched the program that it launched most often
    launched: int  # how many programs it has launched
    finished: int  # how many of them have ended, as far as it knows
    in_callback: int  # whether a program has called Python on the host
    cpu: int  # whether its devices are the processors
    progress: float  # when it last launched a program or entered a phase
    finished_at: float  # when a program was last seen to have ended
    tick: float  # when the step timer last ran
    expected: float  # how long the programs that are running usually take; if none is, the last ones
    sampled: float  # see Usage
    idle: float
    host: float
    input: float
    computed: float
    _fields_ = [
        *((name, ctypes.c_int64 if kind == "int" else ctypes.c_double) for name, kind in __annotations__.items()),
        ("name_bytes", ctypes.c_char * 256),
    ]

    @property
    def name(self) -> str:
        """The program that it launched last."""
        return bytes(self.name_bytes).decode(errors="replace")

    @name.setter
    def name(self, name: str) -> None:
        self.name_bytes = name.encode(errors="replace")[:255]

    @property
    def usage(self) -> Usage:
        """What it has spent its time on."""
        return Usage(self.launched, self.sampled, self.idle, self.host, self.input, self.computed)


def _page_in(file: int) -> HeartbeatPage:
    """The page in a file, whose descriptor may be closed afterwards."""
    return HeartbeatPage.from_buffer(mmap.mmap(file, ctypes.sizeof(HeartbeatPage)))


def new_page() -> tuple[int, HeartbeatPage]:
    """A page for a worker that is about to be started, and the descriptor by which it finds it."""
    file = os.memfd_create("replicax-heartbeat")
    os.ftruncate(file, ctypes.sizeof(HeartbeatPage))
    return file, _page_in(file)


def path_of(file: int) -> str:
    """The path by which other processes open the page whose descriptor is ``file`` here."""
    return f"/proc/{os.getpid()}/fd/{file}"


def claimed_page(path: str) -> HeartbeatPage | None:
    """The page at ``path``, for this process alone; ``None`` if another one has it, or it can't be reached.

    A worker may start processes, which inherit its environment.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, as the file stays open
        return _page_in(file)
    except (OSError, ValueError):
        os.close(file)
        return None
