"""Memory that processes of one machine share, so that a large array is copied once on its way to another.

A process *owns* blocks of memory, and lends them: another one, which it tells the address, opens a block in the
system's table of open files. So a block has no name that could be left behind, and its memory is free when nobody has
it open any more, whichever process has ended, and how. Where the system has no such table, or the other process is on
another machine, or in a container of its own, or of another user, there is no block, and arrays go the usual way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

_HEADER = 64
"""A block begins with its token, and the number of the last use that the other process has ended."""
_TOKEN = 16
_ENDED = struct.Struct("Q")
_LEAST_SIZE = 1 << 20
_MOST_BLOCKS = 32
_OUT_OF_USE = 32
"""A block that has not been lent for so many times that one was is given back to the system."""


@dataclasses.dataclass(frozen=True)
class Lending:
    """One use of a block by the process that it is lent to.

    Attributes:
      machine: which processes can open the block: see :func:`this_machine`.
      process: that owns the block.
      file: the number that the owner has it open under.
      size: of the block.
      token: by which it is told from others that have had the same number.
      number: how many times the block has been lent by now.
      is_short: whether its owner has few blocks left, so that what is to stay here should be copied.
    """

    machine: str
    process: int
    file: int
    size: int
    token: bytes
    number: int
    is_short: bool = False

    @property
    def path(self) -> str:
        """Where the block can be opened."""
        return f"/proc/{self.process}/fd/{self.file}"


@functools.cache
def this_machine() -> str | None:
    """Tells this system from others, as far as numbers of processes mean the same; ``None`` where blocks can't be."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _memory(mapped: mmap.mmap, then: Callable[[], None]) -> np.ndarray:
    """The bytes of a block behind its header; ``then`` is called when no array has this memory any more."""
    found = np.frombuffer(mapped, np.uint8, offset=_HEADER)
    weakref.finalize(found, then).atexit = False
    return found


class _Block:
    """A block that this process owns."""

    def __init__(self, size: int, machine: str) -> None:
        self._file = os.memfd_create("replicax")
        weakref.finalize(self, os.close, self._file).atexit = False
        os.ftruncate(self._file, size)
        self._mapped = mmap.mmap(self._file, size)
        self._machine = machine
        self._token = self._mapped[:_TOKEN] = secrets.token_bytes(_TOKEN)
        self._uses = 0
        self._is_used_here = False
        self.room = size - _HEADER
        self.last = 0

    @property
    def is_free(self) -> bool:
        """Whether neither this process nor the other one has its memory in use."""
        return not self._is_used_here and _ENDED.unpack_from(self._mapped, _TOKEN)[0] == self._uses

    def lend(self, is_short: bool) -> tuple[Lending, np.ndarray]:
        """Lend it once: it is in use here and in another process."""
        self._uses += 1
        self._is_used_here = True
        use = Lending(self._machine, os.getpid(), self._file, len(self._mapped), self._token, self._uses, is_short)
        return use, _memory(self._mapped, self._end_here)

    def _end_here(self) -> None:
        self._is_used_here = False


class SharedBlocks:
    """Blocks that this process lends to one other, again and again.

    There are as many as have been in use at the same time lately, and at most a fixed number: fresh memory is slow.
    """

    def __init__(self) -> None:
        self._times = 0
        self._machine = this_machine()
        self._blocks: list[_Block] = []  # the last used are last
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How large they are together; what was never written to takes no memory."""
        with self._lock:
            return sum(block.room + _HEADER for block in self._blocks)

    def lend(self, room: int) -> tuple[Lending, np.ndarray] | None:
        """A block of at least this many bytes, and its memory; ``None`` if there can't be one, or not one more."""
        if self._machine is None:
            return None
        with self._lock:
            self._times += 1
            free = [block for block in self._blocks if block.is_free]
            is_short = len(self._blocks) - len(free) >= _MOST_BLOCKS // 2
            fitting = [block for block in free if room <= block.room < 4 * max(room, _LEAST_SIZE)]
            chosen = fitting[-1] if fitting else None
            spare = [block for block in free if block is not chosen]
            if chosen is None and len(self._blocks) == _MOST_BLOCKS:
                old = spare[:1]
            else:
                old = [block for block in spare if block.last < self._times - _OUT_OF_USE]
            self._blocks = [block for block in self._blocks if block not in old and block is not chosen]
            if chosen is None:
                if len(self._blocks) == _MOST_BLOCKS:
                    return None
                size = 1 << (max(_LEAST_SIZE, room + _HEADER) - 1).bit_length()
                try:
                    chosen = _Block(size, self._machine)
                except OSError:  # no more files, or no such memory
                    return None
            self._blocks.append(chosen)
            chosen.last = self._times
            return chosen.lend(is_short)


class LentBlocks:
    """The blocks of other processes that have been lent to this one."""

    def __init__(self) -> None:
        self._mapped: dict[bytes, tuple[Lending, int, mmap.mmap]] = {}

    def can_open(self, use: Lending) -> bool:
        """Whether this process can have the blocks of another one, of which this is one."""
        try:
            self.memory(use)
        except OSError:
            return False
        return True

    def memory(self, use: Lending) -> np.ndarray:
        """The memory of a block; when no array has it any more here, its owner can see that.

        Raises:
          OSError: it can't be opened from here, or its owner has ended.
        """
        if use.token not in self._mapped:
            self._forget()
            self._mapped[use.token] = use, *_opened(use)
        mapped = self._mapped[use.token][-1]
        return _memory(mapped, functools.partial(_ENDED.pack_into, mapped, _TOKEN, use.number))

    def _forget(self) -> None:
        """Keep no memory of blocks that their owners have no more."""
        for use, number, _ in list(self._mapped.values()):
            present = None
            with contextlib.suppress(OSError):
                present = os.stat(use.path).st_ino
            if present != number:
                del self._mapped[use.token]


def _opened(use: Lending) -> tuple[int, mmap.mmap]:
    """The number of a block's file in the system, and its memory."""
    if use.machine != this_machine():
        raise OSError("this memory belongs to a process of another machine, or of another container")
    file = os.open(use.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(file, use.size)
        if mapped[:_TOKEN] != use.token:
            raise OSError("the process that owned this memory has ended")
        return os.fstat(file).st_ino, mapped
    except ValueError as error:  # smaller than it says: another file
        raise OSError(str(error)) from None
    finally:
        os.close(file)
