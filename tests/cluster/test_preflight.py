"""The preflight check: all come, or all hear what is wrong, by a deadline."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from replicax.cluster import preflight
from replicax.cluster.preflight import bind_address, host_to_listen_on, is_elsewhere, run_preflight
from replicax.cluster.worker_group import WorkerGroup
from replicax.system.json_lines import listening_socket
from tests.processes import free_port

SOON = 0.4
"""Seconds until the deadline, where one is to be missed."""


@pytest.fixture
def group() -> WorkerGroup:
    port = free_port()
    addresses = tuple(f"127.0.0.1:{port + i}" for i in range(3))
    return WorkerGroup(addresses[0], 3, 0, "TF_CONFIG", addresses)


def called(group: WorkerGroup, index: int, seconds: float = 20) -> Exception | None:
    """How the preflight check ends for a worker."""
    mine = dataclasses.replace(group, index=index)
    try:
        run_preflight(mine, bind_address(mine), time.monotonic() + seconds)
    except Exception as error:
        return error
    return None


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


def test_missing_workers_are_named(group) -> None:
    with threads() as pool:
        waits = pool.submit(called, group, 2)
        chief = called(group, 0, 3 * SOON)
        for error in (chief, waits.result()):
            assert isinstance(error, TimeoutError)
            assert "2 of 3 workers have come to the coordinator at " + group.coordinator in str(error)
            assert f"missing: worker 1 ({group.addresses[1]})." in str(error)


def test_a_coordinator_that_can_not_be_reached(group) -> None:
    began = time.monotonic()
    error = called(group, 1, SOON)
    assert time.monotonic() - began >= SOON
    assert isinstance(error, TimeoutError)
    expected = f"worker 1 ({group.addresses[1]}) could not reach the coordinator at {group.coordinator} within "
    assert str(error).startswith(expected)
    assert " s (Connection refused): worker 0 must run" in str(error)
    assert "from TF_CONFIG" in str(error)
    nowhere = dataclasses.replace(group, coordinator="nowhere.invalid:2222")
    assert "the name of the host is not known here" in str(called(nowhere, 1, SOON))


def test_a_coordinator_that_does_not_answer(group) -> None:
    with socket.create_server(("127.0.0.1", int(group.coordinator[10:]))) as server, threads() as pool:
        waits = pool.submit(called, group, 1, SOON)
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            error = waits.result()
    assert isinstance(error, TimeoutError)
    assert f"worker 1 ({group.addresses[1]}) has reached {group.coordinator}, and worker 0 has not answered" in str(
        error
    )
    assert "whether the workers run already without this process" in str(error)


def test_an_earlier_coordinator_that_is_about_to_end(group) -> None:
    pair = dataclasses.replace(group, count=2)
    with threads() as pool:
        with socket.create_server(("127.0.0.1", int(group.coordinator[10:]))) as earlier:
            waits = pool.submit(called, pair, 1)
            earlier.settimeout(20)
            earlier.accept()[0].close()
        assert called(pair, 0) is None
        with socket.create_server(("127.0.0.1", int(group.coordinator[10:]))):
            assert waits.result() is None


def test_a_port_in_use(group) -> None:
    with socket.create_server(("127.0.0.1", int(group.coordinator[10:]))):
        error = called(group, 0, SOON)
    assert isinstance(error, RuntimeError)
    assert f"worker 0 can't listen at {group.coordinator}" in str(error)
    assert "the port is in use, by another program or an earlier run of this one" in str(error)


def test_a_second_chief_is_told_apart_from_another_program(group) -> None:
    with threads() as pool:
        errors = [f.result() for f in [pool.submit(called, group, 0) for _ in range(2)]]
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("two processes are worker 0: process ")


def test_a_second_chief_on_another_machine(group, monkeypatch) -> None:
    """As if all hosts had the same TF_CONFIG: it can listen, and nothing tells it from a chief behind a gateway."""
    monkeypatch.setattr(preflight, "_LOOK", 0.05)
    monkeypatch.setattr(preflight, "_PATIENCE", 0.2)
    monkeypatch.setattr(preflight, "is_elsewhere", lambda group: group.source == "elsewhere")
    other = dataclasses.replace(group, source="elsewhere")
    with threads() as pool:
        waits = pool.submit(run_preflight, other, f"127.0.0.1:{free_port()}", time.monotonic() + 20)
        for error in (called(group, 0), waits.exception()):
            assert isinstance(error, RuntimeError)
            assert str(error).startswith("two processes are worker 0: process ")
    error = called(other, 0, 4 * SOON)  # its address leads to itself
    assert isinstance(error, TimeoutError)
    assert "127.0.0.1 is no address of " in str(error)


def test_two_lists_of_workers_in_different_order(group, monkeypatch) -> None:
    """The first worker of each list listens at another address, and they see each other there."""
    monkeypatch.setattr(preflight, "_LOOK", 0.05)
    turned = dataclasses.replace(
        group, coordinator=group.addresses[1], addresses=group.addresses[1::-1] + group.addresses[2:]
    )
    with threads() as pool:
        for error in [f.result() for f in [pool.submit(called, group, 0), pool.submit(called, turned, 0)]]:
            assert isinstance(error, RuntimeError)
            assert "are both worker 0, by different lists of workers. Give all the same list" in str(error)


def test_two_processes_are_one_worker(group) -> None:
    with threads() as pool:
        for error in [f.result() for f in [pool.submit(called, group, index) for index in (0, 1, 1)]]:
            assert isinstance(error, RuntimeError)
            assert str(error).startswith("two processes are worker 1: process ")
            assert "a number of its own, from 0 to 2 ('index' of 'task' in TF_CONFIG, or JAX_PROCESS_ID)" in str(error)


def test_workers_know_of_different_numbers(group) -> None:
    pair = dataclasses.replace(group, count=2)
    with threads() as pool:
        for error in [f.result() for f in [pool.submit(called, group, 0), pool.submit(called, pair, 1)]]:
            assert isinstance(error, RuntimeError)
            assert str(error).startswith("the workers do not agree how many they are: worker 0 (process ")
            assert "knows of 3, and worker 1 (process" in str(error)


@pytest.mark.parametrize("is_reset", [False, True])  # as of a process that has not read all
def test_a_worker_that_ends_may_come_again(group, is_reset: bool) -> None:
    port = int(group.coordinator[10:])
    with threads() as pool:
        chief = pool.submit(called, group, 0)
        about = {"greeting": "replicax preflight", "index": 1, "count": 3, "host": "here", "pid": 1}
        _wait_until_somebody_listens(port)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_reset, 0))
            first.sendall(json.dumps(about).encode() + b"\n")
            time.sleep(0.1)
        others = [pool.submit(called, group, index) for index in (1, 2)]
        assert chief.result() is None
        with socket.create_server(("127.0.0.1", port)):
            assert [other.result() for other in others] == [None, None]


def _wait_until_somebody_listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return


def test_strangers_do_no_harm(group) -> None:
    port = int(group.coordinator[10:])
    pair = dataclasses.replace(group, count=2)
    with threads() as pool:
        chief = pool.submit(called, pair, 0)
        _wait_until_somebody_listens(port)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"greeting": "replicax preflight"}\n', b""):
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(said)
        other = pool.submit(called, pair, 1)
        assert chief.result() is None
        with socket.create_server(("127.0.0.1", port)):
            assert other.result() is None


def test_where_the_chief_listens(group, monkeypatch) -> None:
    assert bind_address(group) == group.coordinator
    if has_ipv6():
        assert bind_address(dataclasses.replace(group, coordinator="[::1]:80")) == "[::1]:80"
    assert bind_address(dataclasses.replace(group, coordinator="localhost:80")) in ("127.0.0.1:80", "[::1]:80")
    elsewhere = dataclasses.replace(group, coordinator="192.0.2.1:80")  # no machine has this one
    assert bind_address(elsewhere) in ("[::]:80", "0.0.0.0:80")
    assert (is_elsewhere(elsewhere), is_elsewhere(group)) == (True, False)
    assert not is_elsewhere(dataclasses.replace(group, coordinator="0.0.0.0:80"))
    for host in ("localhost", "0.0.0.0", *(["::"] if has_ipv6() else [])):
        with listening_socket(host) as listens:
            socket.create_connection(("localhost", listens.getsockname()[1])).close()
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "192.0.2.1:81")
    assert bind_address(group) == "192.0.2.1:81"
    assert host_to_listen_on("127.0.0.1") == "192.0.2.1"
    error = called(group, 0, SOON)
    assert "worker 0 can't listen at 192.0.2.1:81" in str(error)
    assert "Set JAX_COORDINATOR_BIND_ADDRESS to an address of this machine" in str(error)
