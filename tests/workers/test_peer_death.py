"""What a worker sees when the process at the other end dies; and strangers at the chief's port."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from replicax.workers.peer_death import Home, PeerDeathWatch
from tests import forked


@contextlib.contextmanager
def process(folder: pathlib.Path, *arguments: str) -> Iterator[tuple[forked.Process, str]]:
    """A process of ``peer_death_ends.py``, and the first line that it has printed."""
    log = folder / "log"
    process = forked.start("tests.workers.peer_death_ends", arguments, log, dict(os.environ), folder)
    try:
        deadline = time.monotonic() + 60
        while "\n" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        yield process, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def chief() -> Iterator[PeerDeathWatch]:
    chief = PeerDeathWatch(0, "127.0.0.1", lambda: None)
    yield chief
    chief.close_all()


def test_the_chief_sees_a_worker_die_though_its_child_lives(chief: PeerDeathWatch, tmp_path: pathlib.Path) -> None:
    home = json.dumps(dataclasses.astuple(chief.home))
    with process(tmp_path, home) as (worker, line):
        child = int(line.removeprefix("child "))
        try:
            while not chief._lines:
                assert chief.wait(0.01) == {}
            assert chief.wait(0.2) == {}
            worker.kill()
            [(index, name)] = chief.wait(60).items()
            assert index == 2
            assert name.startswith(f"process {worker._pid} on ")
            assert chief.wait(0.0) == {}
            os.kill(child, 0)  # it is there
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_worker_sees_the_chief_die(tmp_path: pathlib.Path) -> None:
    with process(tmp_path) as (chief, line):
        home = Home(*json.loads(line))
        worker = PeerDeathWatch(1, "127.0.0.1", lambda: home)
        assert worker.wait(0.2) == {}
        chief.kill()
        assert worker.wait(60) == {0: home.process}
        assert worker.wait(0.0) == {}  # and it does not try again
    worker.close_all()


@pytest.mark.parametrize("greeting", [b"", b"hello\n", b'{"worker": 1, "secret": "guessed", "process": "mine"}\n'])
def test_strangers_are_not_workers(chief: PeerDeathWatch, greeting: bytes) -> None:
    assert chief.home is not None
    with socket.create_connection(("127.0.0.1", chief.home.port)) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        assert chief.wait(0.1) == {}
    assert chief.wait(0.1) == {}
    assert not chief._lines


def test_a_worker_that_can_not_reach_the_chief_does_without() -> None:

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    asked = []

    def home() -> Home:
        asked.append(1)
        return Home(port, "", "")

    worker = PeerDeathWatch(1, "127.0.0.1", home)
    assert worker.wait(0.5) == {}
    begun = time.thread_time()
    assert worker.wait(0.3) == {}
    assert time.thread_time() - begun < 0.05  # it sleeps
    assert len(asked) == 3
    worker.close_all()


def test_a_worker_that_leaves_is_connected_until_its_process_ends(chief: PeerDeathWatch) -> None:
    """The chief leaves last: it must not take a worker that Python has torn down for one that has ended."""
    worker = PeerDeathWatch(1, "127.0.0.1", lambda: chief.home)
    worker.wait(0.0)
    while not chief._lines:
        assert chief.wait(0.01) == {}
    [(line, _)] = worker._lines.values()
    connection = line.fileno()
    worker.leave_open()
    assert worker.wait(0.1) == {}  # and it does not connect again
    assert not worker._lines
    worker.close_all()
    del worker, line
    assert chief.wait(0.2) == {}
    os.close(connection)
    [index] = chief.wait(60)
    assert index == 1


def test_a_wait_is_ended_by_another_thread(chief: PeerDeathWatch) -> None:
    threading.Timer(0.05, chief.wake).start()
    assert chief.wait(60) == {}


def test_lines_have_descriptors_of_any_number(chief: PeerDeathWatch) -> None:
    """A chief of a thousand workers has some above 1024, which ``select`` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        with contextlib.ExitStack() as others:
            while (other := os.open(os.devnull, os.O_RDONLY)) < 1024:
                others.callback(os.close, other)
            others.callback(os.close, other)
            worker = PeerDeathWatch(1, "127.0.0.1", lambda: chief.home)
            worker.wait(0.0)
            while not chief._lines:
                assert chief.wait(0.01) == {}
            [(line, _)] = chief._lines.values()
            assert line.fileno() > 1024
            worker.close_all()
            [index] = chief.wait(60)
            assert index == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
