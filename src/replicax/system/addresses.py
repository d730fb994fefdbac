"""Addresses: ``host:port``, at which a task of a cluster listens."""

from __future__ import annotations

import ipaddress

EXPECTED = "'HOST:PORT', such as 'node0:2222', '10.0.0.1:2222' or '[::1]:2222'"


def split_address(address: str, what: str) -> tuple[str, int | None]:
    """The host of the address of a task, ``what``, without brackets, and its port; ``None`` if it has none.

    Raises:
      TypeError: it is not a string.
      ValueError: it is not an address, or its port is not a number from 1 to 65535.

    >>> split_address("node0:2222", "the chief"), split_address("[::1]:80", "the chief"), split_address("::1", "")
    (('node0', 2222), ('::1', 80), ('::1', None))
    """
    if not isinstance(address, str):
        raise TypeError(f"{what}: expected an address as a string, {EXPECTED}; got {address!r}")
    host, port, wrong = address, "", f"{what}: expected an address, {EXPECTED}; got {address!r}"
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or rest == ":":
            raise ValueError(wrong)
        port = rest[1:]
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
        if not port:
            raise ValueError(f"{wrong}, whose port is empty")
    elif address.count(":") > 1 and ip_of(address) is None:
        raise ValueError(wrong)
    if not host or any(c.isspace() or c == "/" for c in host):
        raise ValueError(wrong)
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError as error:
        raise ValueError(
            f"{wrong}, whose host is not a valid name: each part between dots has 1 to 63 characters"
        ) from error
    if not port:
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{what}: {address!r} has the port {port!r}; expected a number from 1 to 65535")
    return host, int(port)


def host_and_port(address: str, what: str) -> tuple[str, int]:
    """The host and the port of an address that must have a port.

    Raises:
      TypeError: it is not a string.
      ValueError: it is not an address, or has no port.
    """
    host, port = split_address(address, what)
    if port is None:
        raise ValueError(f"{what}: {address!r} has no port; expected {EXPECTED}. Add the port that it listens on")
    return host, port


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host name stands for this machine, under an address that no other machine can reach."""
    ip = ip_of(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that ``host`` is; ``None`` if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
