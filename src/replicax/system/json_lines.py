"""Messages between processes that do not know each other yet: one line of JSON each, over sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from replicax.system.json_files import parsed

_LIMIT = 65536
"""The longest line, in bytes."""


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address, by default at any free port; unlike JAX's service, it shares no port.

    Raises an OSError if the port is in use, or the address is not one of this machine.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where[:2], family=family, backlog=128, dualstack_ipv6=both)


def send_line(connection: socket.socket, message: Any, seconds: float) -> None:
    """Send a message; raises ``OSError`` if the other side has gone, or does not take it within so many seconds."""
    connection.settimeout(seconds)
    connection.sendall(json.dumps(message).encode() + b"\n")


def received_line(connection: socket.socket, deadline: float) -> Any:
    """The message that comes before ``deadline``, in ``time.monotonic()``; ``None`` if no line of JSON comes."""
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < _LIMIT:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(_LIMIT)
            if not part:
                return None
            data += part
        return parsed(data)
    return None


def has_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection; leaves unread what it has sent."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
