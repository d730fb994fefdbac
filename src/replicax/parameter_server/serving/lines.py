"""Lines: calls of a server by processes of its machine, past the engine, which takes a millisecond for each.

A line is a connection of two processes of one machine. What is called by way of it is run in the order in which it was
sent, as by the engine. The engine still starts the processes and ends them, and carries all calls of processes that
can't have a line: on other machines, or in other containers.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import multiprocessing.connection
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from replicax.parameter_server.engine.actors import TIMEOUT, ActorDiedError
from replicax.parameter_server.serving.shared_memory import this_machine

_PAUSE = 0.1
_HANDSHAKE = 10
"""Seconds that a caller has for each message of its handshake."""


@dataclasses.dataclass(frozen=True)
class LineAddress:
    """Where a server can be called.

    Attributes:
      machine: which processes can call it there: see :func:`this_machine`.
      name: of its socket, which is in no folder, and goes with the process.
      key: that a caller has to have.
    """

    machine: str
    name: str
    key: bytes = dataclasses.field(repr=False)


class ServedLines:
    """The server's side.

    Args:
      serve: called with the name of a method, its arguments, and the number of the line, on several threads. Lines
        that are there at a time have different numbers, from 1 on.
      gone: called with the number of a line that has ended, before another one gets it.
    """

    def __init__(
        self, serve: Callable[[str, tuple[Any, ...], int], Any], gone: Callable[[int], None] = lambda line: None
    ) -> None:
        self._serve = serve
        self._gone = gone
        self._numbers: set[int] = set()
        self._numbering = threading.Lock()
        self._address: LineAddress | None = None

    def address(self, machine: str | None, process: int) -> LineAddress | None:
        """Where a process can call; ``None`` if it can't, or is this process itself."""
        if machine is None or machine != this_machine() or process == os.getpid():
            return None
        if self._address is None:
            address = LineAddress(machine, f"\0replicax-{secrets.token_hex(16)}", secrets.token_bytes(32))
            listener = multiprocessing.connection.Listener(address.name, "AF_UNIX", 64)
            self._begin(self._accept, listener, address.key)
            self._address = address
        return self._address

    @staticmethod
    def _begin(run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, name="replicax-line", daemon=True).start()

    def _accept(self, listener: multiprocessing.connection.Listener, key: bytes) -> None:
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    connection = stack.enter_context(listener.accept())
                    self._begin(self._answer, connection, key)
                    stack.pop_all()
                except (OSError, RuntimeError):  # the caller is gone, or there are no more files or threads
                    time.sleep(_PAUSE)

    def _answer(self, connection: Any, key: bytes) -> None:
        """Answer the calls of one process, until it ends."""
        with connection, contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            # Before anything of a stranger's is unpickled.
            _limit(connection.fileno(), _HANDSHAKE)
            multiprocessing.connection.deliver_challenge(connection, key)
            multiprocessing.connection.answer_challenge(connection, key)
            _limit(connection.fileno(), 0)
            with self._numbered() as line:
                while True:
                    connection.send_bytes(self._served(connection.recv_bytes(), line))

    @contextlib.contextmanager
    def _numbered(self) -> Iterator[int]:
        with self._numbering:
            line = next(number for number in itertools.count(1) if number not in self._numbers)
            self._numbers.add(line)
        try:
            yield line
        finally:
            self._gone(line)
            with self._numbering:
                self._numbers.remove(line)

    def _served(self, call: bytes, line: int) -> bytes:
        try:
            method, args = pickle.loads(call)
            return pickle.dumps((True, self._serve(method, args, line)), protocol=5)
        except Exception as error:
            try:
                answer = pickle.dumps((False, error))
                pickle.loads(answer)
            except Exception:  # some can't be pickled, or not read again
                answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
            return answer


class ServerLine:
    """The caller's side; any thread may call, and wait.

    Args:
      address: of the server.

    Raises:
      OSError, EOFError, AuthenticationError: it can't be called there.
    """

    def __init__(self, address: LineAddress) -> None:
        with socket.socket(socket.AF_UNIX) as connected:
            _limit(connected.fileno(), int(TIMEOUT))  # a process that is stopped must not hold this one up
            connected.connect(address.name)
            self._connection: Any = multiprocessing.connection.Connection(connected.detach())
        multiprocessing.connection.answer_challenge(self._connection, address.key)
        multiprocessing.connection.deliver_challenge(self._connection, address.key)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._is_read = False
        self._died: ActorDiedError | None = None
        self._waiting: collections.deque[LineReply] = collections.deque()

    def call(self, method: str, *args: Any) -> LineReply:
        """See :meth:`replicax.parameter_server.engine.actors.Actor.call`."""
        data = pickle.dumps((method, args), protocol=5)
        reply = LineReply(self)
        with self._sending:
            with self._changed:
                if self._died is not None:  # what comes now, if anything, answers older calls
                    reply.answer = False, self._died
                    return reply
                self._waiting.append(reply)
            try:
                self._connection.send_bytes(data)
            except OSError as error:
                self._fail(error)
        return reply

    def wait_for(self, reply: LineReply, timeout: float) -> None:
        """Wait for a reply, and note those that come before: one thread reads for all that wait.

        Raises:
          TimeoutError: it has not come.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                in_time = self._changed.wait_for(
                    lambda: reply.answer is not None or not self._is_read, max(0.0, deadline - time.monotonic())
                )
                if reply.answer is not None:
                    return
                if not in_time:
                    raise TimeoutError
                self._is_read = True
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                self._note(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError):
                    raise
                self._fail(error)
            finally:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()

    def _note(self, data: bytes) -> None:
        try:
            answer = pickle.loads(data)
        except Exception as error:
            answer = False, error
        with self._changed:
            if self._waiting:  # else it has failed meanwhile
                self._waiting.popleft().answer = answer

    def _fail(self, error: Exception) -> None:
        """The server has ended: no reply comes any more."""
        died = ActorDiedError(f"its process has ended, or does not answer: {type(error).__name__}")
        with self._changed:
            self._died = died
            while self._waiting:
                self._waiting.popleft().answer = False, died
            self._changed.notify_all()


class LineReply:
    """See :class:`replicax.parameter_server.engine.actors.Reply`."""

    def __init__(self, line: ServerLine) -> None:
        self._line = line
        self.answer: tuple[bool, Any] | None = None

    def result(self, timeout: float) -> Any:
        self._line.wait_for(self, timeout)
        assert self.answer is not None
        succeeded, value = self.answer
        if not succeeded:
            raise value
        return value

    def when_done(self, then: Callable[[], None]) -> None:
        def wait() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    self._line.wait_for(self, 3600)
                    return then()

        threading.Thread(target=wait, name="replicax-line", daemon=True).start()


def _limit(connection: int, seconds: int) -> None:
    """Have reading from a connection, and writing to it, fail after so long; 0: never."""
    with socket.socket(fileno=os.dup(connection)) as same:
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", seconds, 0))
