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
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from replicax.system.json_lines import has_closed, listening_socket, received_line, send_line
from replicax.workers.codec import declared

PATIENCE = 1.0
"""For how many seconds a connection may take to be made, and for how long the chief waits for a stranger's greeting."""
TRIES = 3
"""How often a worker tries to reach the chief before it goes on without a connection."""


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

    The chief listens at ``host``; the others connect to it when ``find_home`` returns what it has posted.
    """

    def __init__(self, index: int, host: str, find_home: Callable[[], Home | None]) -> None:
        self.home: Home | None = None  # where the chief listens; ``None`` on the chief means that it can't
        self.ended: set[int] = set()  # the workers whose connections are closed, as their processes have ended
        self._index, self._host, self._find_home = index, host, find_home
        self._server: socket.socket | None = None
        self._lines: dict[int, tuple[socket.socket, str]] = {}
        self._tries = TRIES
        self._woken, self._waker = socket.socketpair()
        self._lock = threading.Lock()
        if index == 0:
            with contextlib.suppress(OSError):
                self._server = listening_socket(host)
                self._server.setblocking(False)
                port = self._server.getsockname()[1]
                self.home = Home(port, secrets.token_hex(16), this_process())
        os.register_at_fork(after_in_child=self.close_all)

    def wake(self) -> None:
        """End a wait of another thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def wait(self, seconds: float) -> dict[int, str]:
        """Wait for dead workers, for at most ``seconds`` or until :meth:`wake`; returns their processes, each once."""
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
                self._woken.recv(4096)
                return dead
            if dead or time.monotonic() >= deadline:
                return dead

    def leave_open(self) -> None:
        """Keep the connections open until the process ends, although Python closes its sockets before that."""
        with self._lock:
            for line, _ in self._lines.values():
                line.detach()
            self._lines.clear()
            self._tries = 0

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
            send_line(line, greeting, PATIENCE)
            self._lines[0] = line, self.home.process

    def _accept(self) -> None:
        assert self._server is not None
        assert self.home is not None
        with contextlib.suppress(OSError):
            line, _ = self._server.accept()
            greeting = received_line(line, time.monotonic() + PATIENCE)
            try:
                if not hmac.compare_digest(str(greeting["secret"]), self.home.secret):
                    raise ValueError
                self._lines[int(greeting["worker"])] = line, str(greeting["process"])
            except (ValueError, KeyError, TypeError):  # a stranger
                line.close()

    def _closed(self) -> dict[int, str]:
        dead = {}
        for worker, (line, process) in list(self._lines.items()):
            if has_closed(line):
                line.close()
                del self._lines[worker]
                self._tries = 0
                dead[worker] = process
        self.ended |= dead.keys()
        return dead


def _ready(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """The sockets that can be read or are closed; waits for one, for at most ``seconds``."""
    poll = select.poll()  # select.select takes no descriptor above 1023, and a chief may have as many workers
    for one in sockets:
        poll.register(one, select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [one for one in sockets if one.fileno() in found]
