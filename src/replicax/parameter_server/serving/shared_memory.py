"""Memory that processes of one machine share, so that a large array is copied once on its way to another, or never.

A process *owns* blocks of memory, and lends them: another one, which it tells the address, opens a block in the
system's table of open files. So a block has no name that could be left behind, and its memory is free when nobody has
it open any more, whichever process has ended, and how. Where the system has no such table, or the other process is on
another machine, or in a container of its own, or of another user, there is no block, and arrays go the usual way.

Several processes can have a block at a time. Each has a place in the block's first page where it counts the uses that
it has ended, beside the number of those that were given to it. Nobody but the owner writes to the rest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_HEADER = mmap.PAGESIZE
"""A block begins with its token, whether it is given up, and for each place the uses that were begun, and are ended."""
_TOKEN = 16
_GIVEN_UP = 2  # the numbers of words, which have 8 bytes
_BEGUN = 8
PLACES = (_HEADER // 8 - _BEGUN) // 2
"""How many processes can have a block at a time."""
_LEAST_SIZE = 1 << 20
_MOST_BLOCKS = 32
_OUT_OF_USE = 32
"""A block that has not been lent for so many times that one was is given back to the system."""


@dataclasses.dataclass(frozen=True)
class Lending:
    """One use of a block by another process than its owner.

    Attributes:
      machine: which processes can open the block: see :func:`this_machine`.
      process: that owns the block.
      file: the number that the owner has it open under.
      size: of the block.
      token: by which it is told from others that have had the same number.
      place: where the process counts the uses that it has ended.
      is_short: whether its owner has few blocks left, so that what is to stay here should be copied.
    """

    machine: str
    process: int
    file: int
    size: int
    token: bytes
    place: int = 0
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


def address_of(array: np.ndarray) -> int:
    """Where an array begins in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


class Block:
    """A block, as its owner or another process has it.

    Args:
      lending: its address.
      file: an open file: the block.
      is_own: whether its memory can be written to.
    """

    def __init__(self, lending: Lending, file: int, is_own: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_own else 0)
        self._lending = lending
        self._mapped = mmap.mmap(file, lending.size, prot=access)
        self._words = np.frombuffer(mmap.mmap(file, _HEADER), np.uint64)
        self._address = address_of(np.frombuffer(self._mapped, np.uint8))
        self.token = lending.token
        self.room = lending.size - _HEADER

    @property
    def has_token(self) -> bool:
        """Whether this is the block that is meant."""
        return self._mapped[:_TOKEN] == self.token

    def memory(self, then: Callable[[], object]) -> np.ndarray:
        """The bytes behind the first page; ``then`` is called when no array has this memory any more."""
        found = np.frombuffer(self._mapped, np.uint8, offset=_HEADER)
        weakref.finalize(found, then).atexit = False
        return found

    def start_of(self, address: int) -> int | None:
        """Where an address in this process is in the memory; ``None`` if it is not there."""
        start = address - self._address - _HEADER
        return start if 0 <= start < self.room else None

    def lend(self, place: int, is_short: bool = False) -> Lending:
        """A process begins one more use of the block. One process says so for a place."""
        self._words[_BEGUN + place] += 1
        return dataclasses.replace(self._lending, place=place, is_short=is_short)

    def end(self, place: int) -> None:
        """The process that has this place has ended a use."""
        self._words[_BEGUN + PLACES + place] += 1

    @property
    def is_lent(self) -> bool:
        """Whether another process has it in use, or may have."""
        # First what is ended: who has it in use may lend it on and then end its own use, between the two.
        ended = self._words[_BEGUN + PLACES :][:PLACES].copy()
        return self.is_given_up or not np.array_equal(self._words[_BEGUN : _BEGUN + PLACES], ended)

    @property
    def is_given_up(self) -> bool:
        """Whether it is not to be used again: it will never be known when a process ends its use."""
        return bool(self._words[_GIVEN_UP])

    def give_up(self, place: int) -> None:
        """The process that has this place will say nothing any more; what it reads is to stay, should it live."""
        if self._words[_BEGUN + place] != self._words[_BEGUN + PLACES + place]:
            self._words[_GIVEN_UP] = 1


class OwnBlock(Block):
    """A block that this process owns."""

    def __init__(self, size: int, machine: str) -> None:
        file = os.memfd_create("replicax")
        weakref.finalize(self, os.close, file).atexit = False
        os.ftruncate(file, size)
        super().__init__(Lending(machine, os.getpid(), file, size, secrets.token_bytes(_TOKEN)), file, is_own=True)
        self._mapped[:_TOKEN] = self.token
        self._is_used_here = False
        self.last = 0

    @property
    def is_free(self) -> bool:
        """Whether neither this process nor another one has its memory in use."""
        return not self._is_used_here and not self.is_lent

    def taken(self) -> np.ndarray:
        """Its memory, which is in use here as long as an array has it."""
        self._is_used_here = True
        return self.memory(self._end_here)

    def _end_here(self) -> None:
        self._is_used_here = False


class SharedBlocks:
    """Blocks that this process uses again and again, for what others read.

    There are as many as have been in use at the same time lately, and at most a fixed number: fresh memory is slow.
    """

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._most = most
        self._times = 0
        self._machine = this_machine()
        self._blocks: list[OwnBlock] = []  # the last used are last
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[OwnBlock]:
        return iter(list(self._blocks))

    @property
    def nbytes(self) -> int:
        """How large they are together; what was never written to takes no memory."""
        return sum(block.room + _HEADER for block in self)

    def lend(self, room: int) -> tuple[Lending, np.ndarray] | None:
        """Memory of at least this many bytes, and its address for the one process that these blocks are lent to."""
        with self._lock:
            taken = self._taken(room)
            if taken is None:
                return None
            block, memory, is_short = taken
            return block.lend(0, is_short), memory

    def take(self, room: int) -> np.ndarray | None:
        """Memory of at least this many bytes; ``None`` if there can't be any, or no more."""
        with self._lock:
            taken = self._taken(room)
            return None if taken is None else taken[1]

    def _taken(self, room: int) -> tuple[OwnBlock, np.ndarray, bool] | None:
        """A block that is in use here from now on, its memory, and whether few are left."""
        if self._machine is None:
            return None
        self._times += 1
        self._blocks = [block for block in self._blocks if not block.is_given_up]
        free = [block for block in self._blocks if block.is_free]
        is_short = len(self._blocks) - len(free) >= self._most // 2
        fitting = [block for block in free if room <= block.room < 4 * max(room, _LEAST_SIZE)]
        chosen = fitting[-1] if fitting else None
        spare = [block for block in free if block is not chosen]
        if chosen is None and len(self._blocks) == self._most:
            old = spare[:1]
        else:
            old = [block for block in spare if block.last < self._times - _OUT_OF_USE]
        self._blocks = [block for block in self._blocks if block not in old and block is not chosen]
        if chosen is None:
            if len(self._blocks) == self._most:
                return None
            size = 1 << (max(_LEAST_SIZE, room + _HEADER) - 1).bit_length()
            try:
                chosen = OwnBlock(size, self._machine)
            except OSError:  # no more files, or no such memory
                return None
        self._blocks.append(chosen)
        chosen.last = self._times
        return chosen, chosen.taken(), is_short


class LentBlocks:
    """The blocks of other processes that have been lent to this one."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[Lending, int, Block]] = {}
        self._opening = threading.Lock()
        self._ends: collections.deque[tuple[Block, int]] = collections.deque()
        self._ending = threading.Lock()

    def __iter__(self) -> Iterator[Block]:
        return (block for _, _, block in list(self._opened.values()))

    def can_open(self, use: Lending) -> bool:
        """Whether this process can have the blocks of another one, of which this is one."""
        try:
            self.memory(use)
        except OSError:
            return False
        return True

    def memory(self, use: Lending) -> np.ndarray:
        """The memory of a block, to be read; when no array has it any more here, its owner can see that.

        Each use that a process is given is to be asked for once.

        Raises:
          OSError: it can't be opened from here, or its owner has ended.
        """
        with self._opening:
            if use.token not in self._opened:
                self._forget()
                self._opened[use.token] = use, *_opened(use)
            block = self._opened[use.token][-1]
        return block.memory(functools.partial(self._end, block, use.place))

    def is_there(self, block: Block) -> bool:
        """Whether its owner has it still."""
        return block.token in self._opened and self._is_there(block.token)

    def _end(self, block: Block, place: int) -> None:
        """Count a use that has ended. Arrays end at any moment, also while this thread or another one counts."""
        self._ends.append((block, place))
        while self._ends and self._ending.acquire(blocking=False):
            try:
                while self._ends:
                    ended, of = self._ends.popleft()
                    ended.end(of)
            finally:
                self._ending.release()

    def _forget(self) -> None:
        """Keep no memory of blocks that their owners have no more."""
        for token in [token for token in self._opened if not self._is_there(token)]:
            del self._opened[token]

    def _is_there(self, token: bytes) -> bool:
        use, number, _ = self._opened[token]
        with contextlib.suppress(OSError):
            return os.stat(use.path).st_ino == number
        return False


def _opened(use: Lending) -> tuple[int, Block]:
    """The number of a block's file in the system, and the block."""
    if use.machine != this_machine():
        raise OSError("this memory belongs to a process of another machine, or of another container")
    file = os.open(use.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        block = Block(use, file, is_own=False)
        if not block.has_token:
            raise OSError("the process that owned this memory has ended")
        return os.fstat(file).st_ino, block
    except ValueError as error:  # smaller than it says: another file
        raise OSError(str(error)) from None
    finally:
        os.close(file)
