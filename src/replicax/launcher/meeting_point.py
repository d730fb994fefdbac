"""Where the workers of a launch find each other: the address of each, and at which the chief listens.

The port is chosen by the launcher and used by the chief a few seconds later, when it has imported JAX. So it is taken
from below the range out of which the kernel numbers outgoing connections, which would otherwise take it now and then.
Whether somebody has taken it all the same is found out after a failure (:func:`is_taken`).
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from replicax.cluster.addresses import join_address
from replicax.launcher import LaunchError

LOOPBACK = "127.0.0.1"
_LOWEST = 20000  # below are those of well-known services
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclasses.dataclass(frozen=True)
class MeetingPoint:
    """The addresses of the workers.

    Attributes:
      addresses: ``host:port`` of each worker; the first, the chief's, is where the others find it.
      bind: ``address:port`` at which the chief listens.
    """

    addresses: tuple[str, ...]
    bind: str

    @property
    def coordinator(self) -> str:
        """The chief's address."""
        return self.addresses[0]


def on_this_machine(workers: int, port: int | None, bind: str | None) -> MeetingPoint:
    """A meeting point for workers on this machine alone.

    Args:
      workers: how many.
      port: the chief's, or ``None`` for a free one.
      bind: at which address it listens; ``None`` for the loopback address, which no other machine can reach.

    Raises:
      LaunchError: the port is taken, or ``bind`` is not an address of this machine.
    """
    host = bind or LOOPBACK
    reached_at = LOOPBACK if _is_any(host) else host
    check_free(host, port or 0)
    ports = [port] if port is not None else []
    while len(ports) < workers:
        found = free_port(host)
        if found not in ports:
            ports.append(found)
    return MeetingPoint(tuple(join_address(reached_at, p) for p in ports), join_address(host, ports[0]))


def of_hosts(hosts: Sequence[str], node: int, workers: int, port: int, bind: str | None) -> MeetingPoint:
    """A meeting point for workers on several machines.

    Args:
      hosts: the names or addresses of the machines, the chief's first.
      node: which of them this machine is.
      workers: how many are on each.
      port: the chief's; each host's workers are given the numbers from it on.
      bind: at which address the chief listens; ``None`` for that of the first host.

    Raises:
      LaunchError: the port is taken, or others could not reach the chief.
    """
    if node == 0:
        if bind is None and _is_loopback(hosts[0]):
            raise LaunchError(
                f"{hosts[0]} is a loopback address here, and the other {len(hosts) - 1} host(s) can't reach it: put "
                "this machine's address in the network first in --hosts, or say with --bind at which to listen"
            )
        check_free(bind or hosts[0], port)
    addresses = tuple(join_address(host, port + i) for host in hosts for i in range(workers))
    return MeetingPoint(addresses, join_address(bind or hosts[0], port))


def own_number(hosts: Sequence[str]) -> int:
    """Which of the hosts this machine is, by its name.

    Raises:
      LaunchError: none of them, or several.
    """
    name = socket.gethostname()
    names = {name, name.partition(".")[0]}
    found = [i for i, host in enumerate(hosts) if host in names or host.partition(".")[0] in names]
    if len(found) != 1:
        how = "none" if not found else " and ".join(f"number {i}" for i in found)
        raise LaunchError(
            f"this machine is named {name}, which is {how} of --hosts {','.join(hosts)}: say with --node-rank which of "
            f"them it is, from 0 to {len(hosts) - 1}"
        )
    return found[0]


def free_port(host: str) -> int:
    """A port at which nobody listens, and which outgoing connections are not given."""
    try:
        lowest_of_kernel = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_of_kernel = 32768
    for _ in range(1000 if lowest_of_kernel > _LOWEST + 1000 else 0):
        port = random.SystemRandom().randrange(_LOWEST, lowest_of_kernel)
        if not is_taken(host, port):
            return port
    with _socket(host) as s:  # the kernel has the whole range for itself: any of it, then
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raise if one can't listen there.

    Raises:
      LaunchError: the port is taken, or the address is not of this machine.
    """
    try:
        taken = is_taken(host, port)
    except OSError as error:
        raise LaunchError(
            f"the chief can't listen at {join_address(host, port)} ({error.strerror or error}): --bind must be "
            "an address of this machine"
        ) from error
    if taken:
        raise LaunchError(f"port {port} of {host} is in use by another program: choose another --port")


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there.

    Raises:
      OSError: ``host`` is not an address of this machine, or the port is not for everybody.
    """
    with _socket(host) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended don't count
        try:
            s.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
