"""The preflight check: all workers connect to the coordinator's address before JAX starts its service there.

If something is wrong with the cluster, JAX's own start ends the process without a Python error: a missing worker or an
unreachable address means SIGABRT after the timeout, a port in use a segmentation fault, and a second worker with the
same number ends both. So workers first connect to a plain socket at the same address. Each sends its number, and
worker 0 answers that they are complete, or what is wrong. Then the port is free for JAX.

Each message is one line of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import time
from typing import Any

from replicax.cluster.worker_group import WorkerGroup
from replicax.system.addresses import host_and_port, join_address
from replicax.system.json_lines import has_closed, listening_socket, received_line, send_line

_GREETING = "replicax preflight"
_RETRY = 0.05
"""Seconds between two attempts to reach the coordinator, at first; later up to a second."""
_PATIENCE = 1.0
"""For how many seconds the coordinator waits for the first line of a stranger."""
_LOOK = 2.0
"""Seconds between two looks for another worker 0, at an address where there may be one: see :func:`_listen`."""
_ALL_INTERFACES = ("::", "0.0.0.0")


def bind_address(group: WorkerGroup) -> str:
    """Return where worker 0 listens: at the coordinator's address if it is this machine's; otherwise on all interfaces.

    ``JAX_COORDINATOR_BIND_ADDRESS`` takes precedence.
    """
    if told := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return told
    host, port = host_and_port(group.coordinator, "the coordinator")
    return join_address(host_to_listen_on(host), port)


def host_to_listen_on(host: str) -> str:
    """The address of a host if that is this machine; otherwise the address that means all interfaces.

    ``JAX_COORDINATOR_BIND_ADDRESS`` takes precedence.
    """
    if told := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return host_and_port(told, "JAX_COORDINATOR_BIND_ADDRESS")[0]
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as s, contextlib.suppress(OSError):
                s.bind(address)  # any port: this only tests whether the address is this machine's
                return str(address[0])
    return _ALL_INTERFACES[not socket.has_dualstack_ipv6()]


def is_elsewhere(group: WorkerGroup) -> bool:
    """Return whether the coordinator's address is none of this machine's, though it may be forwarded to it."""
    host, _ = host_and_port(group.coordinator, "the coordinator")
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or host in _ALL_INTERFACES:
        return False
    return host_to_listen_on(host) in _ALL_INTERFACES


def run_preflight(group: WorkerGroup, bind: str, deadline: float) -> None:
    """Wait until every worker has connected to the coordinator once; then its port is free.

    Worker 0 is the coordinator, and listens at ``bind``. ``deadline`` is in ``time.monotonic()``.

    Raises:
      RuntimeError: two workers have one number, or expect different numbers of workers; the port is in use.
      TimeoutError: the coordinator can't be reached, or workers are missing; the message names them.
    """
    if group.index == 0:
        _listen(group, bind, deadline)
    else:
        _come(group, deadline)


# --- worker 0 -------------------------------------------------------------------------------------------


def _listen(group: WorkerGroup, bind: str, deadline: float) -> None:
    """Wait for the others, and look where another worker 0 may listen.

    That is at the coordinator's address if it is not this machine's, and at those of missing workers: of two lists of
    workers in different order, each has another one as its first.
    """
    started, elsewhere = time.monotonic(), is_elsewhere(group)
    me = {**_about(group), "token": secrets.token_hex(8)}
    with contextlib.ExitStack() as open_:
        server = open_.enter_context(_server(group, bind, me, deadline))
        arrived = {0: me}
        connections: dict[int, socket.socket] = {}
        problem: str | None = None
        looks = 0
        while problem is None and len(arrived) < group.count:
            left = deadline - time.monotonic()
            places = [address for i, address in enumerate(group.addresses) if i not in arrived]
            places += [group.coordinator] if elsewhere else []
            server.settimeout(max(0.001, min(left, _LOOK) if places else left))
            try:
                connection = open_.enter_context(server.accept()[0])
            except TimeoutError:
                if places and time.monotonic() < deadline:
                    problem = _answer_of_another(places[looks % len(places)], me, deadline)
                    looks += 1
                    continue
                _forget_who_has_gone(arrived, connections)
                missing = [group.name_of(i) for i in range(group.count) if i not in arrived]
                problem = (
                    f"after {time.monotonic() - started:.0f} s {len(arrived)} of {group.count} workers have come to "
                    f"the coordinator at {group.coordinator}; missing: {', '.join(missing)}. Look at what they "
                    f"printed: each must run this program, and reach that address. They are those of {group.source}"
                )
                if elsewhere:
                    host, _ = host_and_port(group.coordinator, "the coordinator")
                    problem += f". {host} is no address of {me['host']}: is this process really worker 0?"
                break
            greeting = _message(connection, min(deadline, time.monotonic() + _PATIENCE))
            if greeting is None or greeting.get("token") == me["token"]:
                continue  # another program's connection, or this worker's own
            _forget_who_has_gone(arrived, connections)
            problem = _problem(group, arrived, greeting)
            arrived.setdefault(greeting["index"], greeting)
            if problem is not None:
                _send(connection, {"problem": problem})
            else:
                connections[greeting["index"]] = connection
        server.close()  # before the others look for JAX's service
        for connection in connections.values():
            _send(connection, {"problem": problem})
    if problem is not None:
        raise _error(problem)


def _forget_who_has_gone(arrived: dict[int, dict[str, Any]], connections: dict[int, socket.socket]) -> None:
    """Forget workers that have closed their connections: they have ended, and may have been restarted."""
    for index in [index for index, connection in connections.items() if has_closed(connection)]:
        del arrived[index], connections[index]


def _server(group: WorkerGroup, bind: str, me: dict[str, Any], deadline: float) -> socket.socket:
    try:
        return listening_socket(*host_and_port(bind, "JAX_COORDINATOR_BIND_ADDRESS"))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise RuntimeError(
                f"worker 0 can't listen at {bind}, where workers should connect ({group.source}): {error.strerror}. "
                "Set JAX_COORDINATOR_BIND_ADDRESS to an address of this machine"
            ) from error
        problem = _answer_of_another(group.coordinator, me, deadline)
        if problem is not None:
            raise RuntimeError(problem) from error
        raise RuntimeError(
            f"worker 0 can't listen at {bind}, where workers should connect ({group.source}): the port is in use, by "
            "another program or an earlier run of this one. End that, or choose another port"
        ) from error


def _answer_of_another(address: str, me: dict[str, Any], deadline: float) -> str | None:
    """What another worker 0 answers to this one, at an address; ``None`` if none listens there."""
    with contextlib.suppress(OSError, ValueError):  # an address that only its own worker uses may be none
        with socket.create_connection(host_and_port(address, "a worker"), timeout=_PATIENCE) as connection:
            _send(connection, me)
            answer = _message(connection, min(deadline, time.monotonic() + 2 * _PATIENCE))
        return None if answer is None else answer.get("problem")
    return None


def _problem(group: WorkerGroup, arrived: dict[int, dict[str, Any]], greeting: dict[str, Any]) -> str | None:
    index = greeting["index"]
    if greeting["count"] != group.count:
        return (
            f"the workers do not agree how many they are: worker 0 ({_where(arrived[0])}) knows of {group.count}, "
            f"and worker {index} ({_where(greeting)}) of {greeting['count']}. Give all the same cluster"
        )
    if index in arrived and greeting.get("list") != arrived[index].get("list"):
        return (
            f"{_where(arrived[index])} and {_where(greeting)} are both worker {index}, by different lists of workers. "
            "Give all the same list, in the same order (--hosts of replicax launch, 'cluster' in TF_CONFIG)"
        )
    if index in arrived:
        return (
            f"two processes are worker {index}: {_where(arrived[index])} and {_where(greeting)}. Give each a number "
            f"of its own, from 0 to {group.count - 1} ('index' of 'task' in TF_CONFIG, or JAX_PROCESS_ID)"
        )
    return None


# --- the others -----------------------------------------------------------------------------------------


def _come(group: WorkerGroup, deadline: float) -> None:
    started = time.monotonic()
    answer = None
    while answer is None:
        with _reach(group, deadline) as connection:
            _send(connection, _about(group))
            answer = _message(connection, deadline + 2 * _PATIENCE)  # at its deadline worker 0 names the missing ones
        if answer is None and time.monotonic() >= deadline:
            raise TimeoutError(
                f"{group.name_of(group.index)} has reached {group.coordinator}, and worker 0 has not answered there "
                f"within {time.monotonic() - started:.0f} s: look at what it printed, whether the workers run already "
                "without this process, and whether another program or an earlier run of this one has the port"
            )
        if answer is None:  # worker 0 has ended; or, after a restart, its predecessor has not ended yet
            time.sleep(max(0.0, min(10 * _RETRY, deadline - time.monotonic())))
    if answer.get("problem"):
        raise _error(answer["problem"])
    # JAX's client would wait for a second after a refused attempt.
    with contextlib.suppress(TimeoutError):
        _reach(group, min(deadline, time.monotonic() + 5 * _PATIENCE)).close()


def _reach(group: WorkerGroup, deadline: float) -> socket.socket:
    """A connection to the coordinator, tried until the deadline."""
    started, pause = time.monotonic(), _RETRY
    host, port = host_and_port(group.coordinator, "the coordinator")
    while True:
        try:
            left = max(0.01, deadline - time.monotonic())
            return socket.create_connection((host, port), timeout=min(left, 5 * _PATIENCE))
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            if time.monotonic() >= deadline:
                hint = (
                    "the name of the host is not known here"
                    if isinstance(error, socket.gaierror)
                    else "worker 0 must run and listen there, and all workers must have the same list of workers"
                )
                raise TimeoutError(
                    f"{group.name_of(group.index)} could not reach the coordinator at {group.coordinator} within "
                    f"{time.monotonic() - started:.0f} s ({why}): {hint}. The address is from {group.source}"
                ) from error
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(1.0, 1.5 * pause)


def _error(problem: str) -> Exception:
    return TimeoutError(problem) if "; missing: " in problem else RuntimeError(problem)


# --- lines ----------------------------------------------------------------------------------------------


def _about(group: WorkerGroup) -> dict[str, Any]:
    listed = hashlib.sha256(" ".join(group.addresses).encode()).hexdigest()
    return {
        "index": group.index,
        "count": group.count,
        "list": listed,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _where(about: dict[str, Any]) -> str:
    return f"process {about['pid']} on {about['host']}"


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other side has gone; its absence is noticed elsewhere
        send_line(connection, {"greeting": _GREETING, **message}, _PATIENCE)


def _message(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """The message that comes before the deadline, if any."""
    message = received_line(connection, deadline)
    ours = isinstance(message, dict) and message.get("greeting") == _GREETING
    is_worker = ours and isinstance(message.get("index"), int) and isinstance(message.get("count"), int)
    return message if is_worker or (ours and "problem" in message) else None
