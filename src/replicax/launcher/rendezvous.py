"""The addresses of a launch: each worker's, and the one at which the chief listens.

The launcher chooses the port, and the chief uses it a few seconds later, when it has imported JAX. So it is taken
from below the range out of which the kernel numbers outgoing connections, which would otherwise take it now and then.
If another program takes it all the same, the launcher finds out after the failure (:func:`is_taken`).
"""

from __future__ import annotations

import dataclasses
import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from replicax.launcher import LaunchError
from replicax.system.addresses import ip_of, is_loopback, join_address

LOOPBACK = "127.0.0.1"
_LOWEST = 20000  # below are those of well-known services
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OF_BIND = "--bind must be an address of this machine"


@dataclasses.dataclass(frozen=True)
class LaunchRendezvous:
    """The addresses of the workers."""

    addresses: tuple[str, ...]  # ``host:port`` of each worker; the others connect to the first, the chief's
    bind: str  # ``address:port`` at which the chief listens

    @property
    def coordinator(self) -> str:
        """The chief's address."""
        return self.addresses[0]


def on_this_machine(workers: int, port: int | None, bind: str | None) -> LaunchRendezvous:
    """The rendezvous of workers that are all on this machine.

    By default the chief has any free port, and listens at the loopback address, which no other machine can reach.
    Raises a LaunchError if the port is taken, or ``bind`` is not an address of this machine.
    """
    host = bind or LOOPBACK
    ip = ip_of(host)
    reached_at = LOOPBACK if ip is not None and ip.is_unspecified else host
    check_free(host, port or 0)
    ports = [port] if port is not None else []
    while len(ports) < workers:
        found = free_port(host)
        if found not in ports:
            ports.append(found)
    return LaunchRendezvous(tuple(join_address(reached_at, p) for p in ports), join_address(host, ports[0]))


def of_hosts(hosts: Sequence[str], node: int, workers: int, port: int, bind: str | None) -> LaunchRendezvous:
    """The rendezvous of ``workers`` workers on each of several machines, the chief's first.

    This machine has the number ``node`` among them. Each host's workers get the ports from ``port`` on. The chief
    listens at ``bind``; by default at the address of its host. Raises a LaunchError if the port is taken, or the others
    could not reach the chief.
    """
    if bind is None and _resolves_to_loopback(hosts[0]):
        cant = "this host can't reach the chief there" if node else f"the other {len(hosts) - 1} host(s) can't reach it"
        raise LaunchError(
            f"{hosts[0]} is a loopback address here, and {cant}: put the first machine's address in the network first "
            "in --hosts, or say with --bind at which the chief listens"
        )
    if node == 0:
        to_do = f"this machine is number 0 of --hosts, {hosts[0]}: correct it, or say with --bind where it listens"
        check_free(bind or hosts[0], port, _OF_BIND if bind else to_do)
    addresses = tuple(join_address(host, port + i) for host in hosts for i in range(workers))
    return LaunchRendezvous(addresses, join_address(bind or hosts[0], port))


def own_node_rank(hosts: Sequence[str]) -> int:
    """The number of this machine among the hosts, by its name; raises a LaunchError unless it is one of them."""
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
    """A port at which no program listens, and which the kernel does not give to outgoing connections."""
    try:
        lowest_of_kernel = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_of_kernel = 32768
    for _ in range(1000 if lowest_of_kernel > _LOWEST + 1000 else 0):
        port = random.SystemRandom().randrange(_LOWEST, lowest_of_kernel)
        if not is_taken(host, port):
            return port
    with _socket(host) as s:  # the kernel uses the whole range: any free port, then
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_free(host: str, port: int, to_do: str = _OF_BIND) -> None:
    """Raise a LaunchError unless the chief can listen there; ``to_do`` says what to change if the address is wrong."""
    try:
        taken = is_taken(host, port)
    except OSError as error:
        to_do = "choose another --port" if error.errno == errno.EACCES else to_do
        why = error.strerror or error
        raise LaunchError(f"the chief can't listen at {join_address(host, port)} ({why}): {to_do}") from error
    if taken:
        raise LaunchError(f"port {port} of {host} is in use by another program: choose another --port")


def is_taken(host: str, port: int) -> bool:
    """Return whether a program listens there.

    Raises an OSError if ``host`` is not an address of this machine, or listening at the port needs a privilege.
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


def _resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
