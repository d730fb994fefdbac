"""Checks the cluster: whether its description is valid, its names resolve, and its hosts answer."""

from __future__ import annotations

import errno
import socket
import time

from replicax.cli.diagnosis.check_runner import run_concurrently
from replicax.cli.diagnosis.findings import Finding, ok, warning, wrong
from replicax.cluster.preflight import bind_address, is_elsewhere
from replicax.cluster.worker_group import WorkerGroup, detected_group, group_from_environment
from replicax.system.addresses import host_and_port, is_loopback, split_address
from replicax.system.json_lines import listening_socket

_SHOWN = 5
"""How many unreachable hosts get a line of their own."""


def check(seconds: float) -> list[Finding]:
    """The cluster that a strategy would find in this environment, and whether its hosts answer."""
    try:
        group = group_from_environment() or detected_group(seconds)
    except (ValueError, RuntimeError) as error:
        return [wrong("cluster", " ".join(str(error).split()), "correct it, or unset the variable")]
    if group is None:
        return [ok("cluster", "none: this process is alone (no TF_CONFIG, and JAX detects none)", workers=1)]
    what = f"worker {group.index} of {group.count} ({group.source}), coordinator {group.coordinator}"
    data = {"workers": group.count, "worker": group.index, "coordinator": group.coordinator, "source": group.source}
    if group.count == 1:
        return [ok("cluster", what, **data)]
    return [ok("cluster", what, **data), *_coordinator(group), *_hosts(group, seconds)]


def _coordinator(group: WorkerGroup) -> list[Finding]:
    host, _ = host_and_port(group.coordinator, "the coordinator")
    others = {split_address(address, "a worker")[0] for address in group.addresses}
    if is_loopback(host) and not all(map(is_loopback, others)):
        to_do = f"give it an address that {next(h for h in others if not is_loopback(h))} can reach"
        return [wrong("cluster", f"the coordinator {group.coordinator} is for this machine only", to_do)]
    if group.index != 0:
        return []
    bind = bind_address(group)
    try:
        listening_socket(*host_and_port(bind, "JAX_COORDINATOR_BIND_ADDRESS")).close()
    except ValueError as error:  # JAX_COORDINATOR_BIND_ADDRESS is no address
        return [wrong("cluster", str(error), "correct it, or unset the variable")]
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        return [wrong("cluster", f"worker 0 can't listen at {bind}: {why}", "end what uses it, or choose another port")]
    if is_elsewhere(group):
        what = f"this process is worker 0, and {host} is no address of this machine"
        return [warning("cluster", what, "give each process a number of its own, unless the address leads here")]
    return []


def _hosts(group: WorkerGroup, seconds: float) -> list[Finding]:
    """Return one finding for all hosts that answer, and one for each of the first that don't."""
    addresses = dict.fromkeys([*group.addresses, group.coordinator])
    limit = 0.8 * seconds
    deadline = time.monotonic() + limit
    answers = run_concurrently(lambda address: _why_not(address, deadline), [*addresses], deadline)
    late = f"no answer within {limit:.1f} s"
    outcomes = {address: answers.get(number, late) for number, address in enumerate(addresses)}
    problems = {address: why for address, why in outcomes.items() if why is not None}
    if not problems:
        what = f"the hosts of {len(addresses)} addresses are known and answer"
        return [ok("network", what, addresses=len(addresses))]
    findings = []
    for address, why in [*problems.items()][:_SHOWN]:
        who = next((f"worker {i}" for i, a in enumerate(group.addresses) if a == address), "the coordinator")
        to_do = "correct the name or the network; a firewall must let the workers through"
        findings.append(wrong("network", f"{who} at {address}: {why}", to_do, address=address))
    if more := [*problems][_SHOWN:]:
        findings.append(wrong("network", f"{len(more)} more hosts can't be reached", "as above", addresses=more))
    return findings


def _why_not(address: str, deadline: float) -> str | None:
    """The reason why the host of an address can't be reached; ``None`` if it answers, even without a listener."""
    host, port = split_address(address, "a worker")
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"the name {host!r} is not known here ({error.strerror})"
    if port is None:
        return None
    try:
        socket.create_connection((host, port), timeout=max(0.05, deadline - time.monotonic())).close()
    except ConnectionRefusedError:
        return None  # the host answers, but no program listens yet
    except TimeoutError:
        return "the host does not answer"
    except OSError as error:
        return error.strerror or str(error)
    return None
