"""Connections: how many processes are connected to a port of this one, and which errors mean a lost connection."""

from __future__ import annotations

import os

_ESTABLISHED = "01"
_SAID = ("Gloo", "gloo", "NCCL", "UNAVAILABLE", "onnection closed", "onnection reset", "Socket closed")


def is_of_connections(text: str) -> bool:
    """Return whether the text of an error reports a lost connection between workers.

    >>> from replicax.workers.connections import is_of_connections
    >>> is_of_connections("INTERNAL: Gloo all-reduce failed: Connection reset by peer"), is_of_connections("a NaN")
    (True, False)
    """
    return any(word in text for word in _SAID)


def connections_to(port: int) -> int | None:
    """Count the other processes connected to ``port`` of this process, according to Linux; or ``None``.

    >>> from replicax.workers.connections import connections_to
    >>> connections_to(1) in (0, None)
    True
    """
    try:
        own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_there(fd)}
        rows = [row for name in ("tcp", "tcp6") for row in _rows(f"/proc/net/{name}")]
    except OSError:
        return None
    ours = {local for local, remote, inode in rows if remote == port and f"socket:[{inode}]" in own}
    return sum(local == port and remote not in ours for local, remote, _ in rows)


def _is_there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")  # the listing includes its own descriptor, closed by now


def _rows(path: str) -> list[tuple[int, int, str]]:
    """The local port, the remote one and the inode of each connection."""
    with open(path) as table:
        fields = [line.split() for line in table.readlines()[1:]]
    return [(_port(f[1]), _port(f[2]), f[9]) for f in fields if f[3] == _ESTABLISHED]


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1], 16)
