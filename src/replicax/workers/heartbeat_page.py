"""The heartbeat's page: shared memory into which a worker writes its progress, for the launcher.

The launcher makes the page, an anonymous file, and names it in the worker's environment. Each field has 8 bytes and is
written with one store: no lock, no system call, and nothing to wait for, on either side. Times are of
``time.monotonic``, which is the same clock in all processes of a machine.

This file imports nothing of JAX, because the launcher reads it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import mmap
import os
import weakref
from typing import Any, NamedTuple

VARIABLE = "REPLICAX_HEARTBEAT"
"""Environment variable of a worker: the path of its page."""
UNKNOWN = math.inf
"""How many seconds a program takes that has never ended."""
LONG, FOREVER = 30.0, math.inf
"""Patience with phases that may take long, and with those without a limit; see :class:`Phase`."""
_TYPES: dict[str, Any] = {"int": ctypes.c_int64, "float": ctypes.c_double, "bytes": ctypes.c_char * 256}


class Phase(enum.IntEnum):
    """A worker's activity: the page has its number, and messages its words."""

    words: str
    patience: float  # for how many times the launcher's timeout the worker may show no activity

    def __new__(cls, words: str, patience: float = 1.0) -> Phase:
        phase = int.__new__(cls, len(cls.__members__))
        phase._value_, phase.words, phase.patience = int(phase), words, patience
        return phase

    START = "starting", FOREVER
    STEPS = "between two steps"
    LOGGING = "logging"
    CALLBACKS = "in a callback"
    INPUT = "waiting for its input", LONG
    COMPILE = "compiling", LONG
    PER_REPLICA = "in a step on the per-replica executor", LONG
    EVALUATION = "evaluating", LONG
    SAVING = "saving", LONG
    RESTORING = "restoring", LONG
    RENDEZVOUS = "waiting for the other workers", FOREVER
    PAUSED = "in replicax.paused()", FOREVER
    END = "at its end", FOREVER


class Usage(NamedTuple):
    """The time that a worker has spent while it ran steps, by use: totals, in seconds."""

    launched: float  # how many programs it has launched
    sampled: float  # the time for which the rest is known
    idle: float  # its devices had nothing to do
    host: float  # its host was busy, rather than waiting for its devices
    input: float  # its devices were idle as it waited for input
    computed: float  # processors worked, except on Python


class HeartbeatPage(ctypes.Structure):
    """The numbers of one worker: these, and those of its :class:`Usage`."""

    pid: int  # the process that has the page; 0 before
    signal: int  # makes it print its stacks; 0 if there is none
    thread: int  # the thread that trains, by the kernel's number
    timer: int  # the step timer's
    phase: int  # what it does
    name: bytes  # of the program that it launched last
    runs: int  # how often it has launched this program
    running: int  # how many programs have not ended, as far as it knows
    in_callback: int  # whether a program has called Python on the host
    progress: float  # when it last launched a program or entered a phase, or one of its programs ended
    expected: float  # how long the programs that are running usually take; if none is, the last one
    ended: float  # when its Python told the other workers that it ends; 0 before
    _fields_ = [
        *((field, _TYPES[kind]) for field, kind in __annotations__.items()),
        *((field, ctypes.c_double) for field in Usage._fields),
    ]
    path: str  # of a new page, for other processes

    @property
    def usage(self) -> Usage:
        """Read what the worker has spent its time on."""
        return Usage(*(getattr(self, field) for field in Usage._fields))

    @classmethod
    def new(cls) -> HeartbeatPage:
        """Make the page of a worker that is about to start; other processes reach it as long as this object exists."""
        file = os.memfd_create("replicax-heartbeat")
        os.ftruncate(file, ctypes.sizeof(cls))
        page = cls.at(path := f"/proc/{os.getpid()}/fd/{file}")
        page.path = path
        weakref.finalize(page, os.close, file)
        return page

    @classmethod
    def at(cls, path: str) -> HeartbeatPage:
        """The page at ``path``."""
        with open(path, "r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    @classmethod
    def claimed(cls, path: str) -> HeartbeatPage | None:
        """The page at ``path``, for this process alone; ``None`` if another one has it, or it can't be reached."""
        with contextlib.suppress(OSError, ValueError):
            page = cls.at(path)
            if page.pid in (0, os.getpid()):  # processes that a worker starts inherit its environment
                page.pid = os.getpid()
                return page
        return None
