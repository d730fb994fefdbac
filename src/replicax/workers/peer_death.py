"""Detects the death of other workers: the kernel closes a process' connections when it dies, whatever the cause.

A killed process can't report its end, and the coordination service notices only after 100 s. But its kernel closes its
connections at once. So each worker keeps one to the chief, and sends nothing through it after a greeting.
Where it can't be made, for instance where a firewall lets only the coordinator's port through, everything else works
without it. A host that vanishes from the network closes nothing; the service's heartbeat detects that.

The coordination service holds the chief's port and a secret, so only processes that can reach the service can connect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

from replicax.system.json_files import parsed
from replicax.workers.codec import declared

PATIENCE = 1.0
"""For how many seconds a connection may take to be made, and for how long the chief waits for a stranger's greeting."""
TRIES = 3
"""How often a worker tries to reach the chief before it goes on without a connection."""
_LIMIT = 4096


@declared
@dataclasses.dataclass(frozen=True)
class Home:
    """The chief's end of the connections."""

    port: int  # at which it listens
    secret: str  # proves that a connecting process is a worker
    process: str  # of the chief, in words


def this_process() -> str:
    """Return a description of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class PeerDeathWatch:
    """This worker's ends of the connections: the chief has one to each other worker, and these one to the chief.

    Args:
      index: which worker this is.
      host: the chief's host, as this worker knows it; on the chief, the address at which it listens.
      find_home: returns where the chief listens, if it has posted that; for the other workers.

    Attributes:
      home: where the chief listens; ``None`` on the others until they know it, and on the chief if it can't listen.
      ended: the workers whose connections are closed, as their processes have ended.
    """

    def __init__(self, index: int, host: str, find_home: Callable[[], Home | None]) -> None:
        self.home: Home | None = None
        self.ended: set[int] = set()
        self._index, self._host, self._find_home = index, host, find_home
        self._server: socket.socket | None = None
        self._lines: dict[int, tuple[socket.socket, str]] = {}
        self._tries = TRIES
        self._woken, self._waker = socket.socketpair()
        self._lock = threading.Lock()
        if index == 0:
            with contextlib.suppress(OSError):
                self._server = _server(host)
                self._server.setblocking(False)
                port = self._server.getsockname()[1]
                self.home = Home(port, secrets.token_hex(16), this_process())
        _all.add(self)

    def wake(self) -> None:
        """End a wait of another thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def wait(self, seconds: float) -> dict[int, str]:
        """Wait until a worker's process dies, for at most ``seconds`` or until :meth:`wake`.

        Returns:
          The processes that died, by worker. Each is reported once.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                self._connect()
                sockets = [self._woken, *(line for line, _ in self._lines.values())]
            if self._server is not None:
                sockets.append(self._server)
            # A worker that waits for the chief's port looks for it often.
            is_on_its_way = self._index != 0 and not self._lines and self._tries > 0
            left = max(0.0, deadline - time.monotonic())
            ready = _ready(sockets, min(left, 0.1) if is_on_its_way else left)
            with self._lock:
                if self._server in ready:
                    self._accept()
                dead = self._closed()
            if self._woken in ready:
                self._woken.recv(_LIMIT)
                return dead
            if dead or time.monotonic() >= deadline:
                return dead

    def close_all(self) -> None:
        """Close the sockets in a forked child: only the end of the worker itself may close them for the others."""
        for connection in (self._server, self._woken, self._waker, *(line for line, _ in self._lines.values())):
            if connection is not None:
                connection.close()

    def _connect(self) -> None:
        if self._index == 0 or self._lines or self._tries <= 0:
            return
        self.home = self._find_home()
        if self.home is None:
            return
        self._tries -= 1
        with contextlib.suppress(OSError):
            line = socket.create_connection((self._host, self.home.port), timeout=PATIENCE)
            greeting = {"worker": self._index, "secret": self.home.secret, "process": this_process()}
            line.sendall(json.dumps(greeting).encode() + b"\n")
            line.setblocking(False)
            self._lines[0] = line, self.home.process

    def _accept(self) -> None:
        assert self._server is not None
        assert self.home is not None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            line, _ = self._server.accept()
            try:
                greeting = parsed(_line_of(line))
                if not hmac.compare_digest(str(greeting["secret"]), self.home.secret):
                    raise ValueError("a stranger")
                self._lines[int(greeting["worker"])] = line, str(greeting["process"])
            except BaseException:
                line.close()
                raise

    def _closed(self) -> dict[int, str]:
        dead = {}
        for worker, (line, process) in list(self._lines.items()):
            if _is_closed(line):
                line.close()
                del self._lines[worker]
                self._tries = 0
                dead[worker] = process
        self.ended |= dead.keys()
        return dead


def _server(host: str) -> socket.socket:
    """A socket that listens on any port of an address of this machine.

    Raises:
      OSError: the address is not one of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)


def _ready(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """The sockets that can be read or are closed; waits for one, for at most ``seconds``."""
    poll = select.poll()  # select.select takes no descriptor above 1023, and a chief may have as many workers
    for one in sockets:
        poll.register(one, select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [one for one in sockets if one.fileno() in found]


def _line_of(connection: socket.socket) -> bytes:
    deadline = time.monotonic() + PATIENCE
    data = b""
    while not data.endswith(b"\n") and len(data) < _LIMIT:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(_LIMIT)
        if not part:
            break
        data += part
    connection.setblocking(False)
    return data


def _is_closed(line: socket.socket) -> bool:
    """Return whether the other end has closed it; it sends nothing else."""
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


_all: weakref.WeakSet[PeerDeathWatch] = weakref.WeakSet()


def _let_go_in_a_child() -> None:
    for watch in list(_all):
        watch.close_all()


os.register_at_fork(after_in_child=_let_go_in_a_child)
