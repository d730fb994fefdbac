"""Calls of a server by way of a line: in order, from any thread, with errors, and without hanging."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replicax.parameter_server.engine.actors import ActorDiedError
from replicax.parameter_server.serving import lines
from replicax.parameter_server.serving.lines import LineAddress, ServedLines, ServerLine
from replicax.parameter_server.serving.pushes import Ended, Push
from replicax.parameter_server.serving.shard_server import ShardServer
from replicax.parameter_server.serving.shared_memory import this_machine

WAIT = 30.0
ANOTHER = os.getpid() + 1

pytestmark = pytest.mark.skipif(this_machine() is None, reason="this system has no lines")


def served(serve: Callable[[str, tuple[Any, ...]], Any]) -> LineAddress:
    address = ServedLines(lambda method, args, line: serve(method, args)).address(this_machine(), ANOTHER)
    assert address is not None
    return address


def test_calls_are_run_in_the_order_in_which_they_were_sent() -> None:
    ran: list[int] = []
    line = ServerLine(served(lambda method, args: ran.append(args[0]) or (method, args[0])))
    replies = [line.call("square", number) for number in range(100)]
    assert [reply.result(WAIT) for reply in reversed(replies)] == [("square", n) for n in reversed(range(100))]
    assert ran == list(range(100))


def test_any_thread_may_call_and_wait() -> None:
    line = ServerLine(served(lambda method, args: args[0] * 2))
    found: dict[int, list[int]] = {}

    def call(thread: int) -> None:
        found[thread] = [line.call("double", 1000 * thread + n).result(WAIT) for n in range(50)]

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == {thread: [2 * (1000 * thread + n) for n in range(50)] for thread in range(4)}


def test_a_reply_can_be_told_of() -> None:
    told = threading.Event()
    ServerLine(served(lambda method, args: None)).call("nothing").when_done(told.set)
    assert told.wait(WAIT)


def test_what_a_call_raises_is_raised_where_it_was_made() -> None:
    class LocalError(Exception):
        """Can't be pickled."""

    def serve(method: str, args: Any) -> None:
        raise KeyError("key") if method == "known" else LocalError("text")

    line = ServerLine(served(serve))
    with pytest.raises(KeyError, match="key"):
        line.call("known").result(WAIT)
    with pytest.raises(RuntimeError, match="LocalError: text"):
        line.call("unknown").result(WAIT)


def test_a_reply_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    go_on = threading.Event()
    line = ServerLine(served(lambda method, args: go_on.wait(WAIT)))
    reply = line.call("slow")
    with pytest.raises(TimeoutError):
        reply.result(0.05)
    go_on.set()
    assert reply.result(WAIT) is True


def test_calls_of_a_server_that_has_ended_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(served: ServedLines, call: bytes, line: int) -> bytes:
        raise EOFError  # ends its thread, and with it the connection

    monkeypatch.setattr(ServedLines, "_served", end)
    line = ServerLine(served(lambda method, args: None))
    replies = [line.call("any") for _ in range(3)]
    for reply in (*replies, line.call("any")):
        with pytest.raises(ActorDiedError, match="has ended"):
            reply.result(WAIT)


def test_who_has_not_the_key_can_not_call() -> None:
    called: list[str] = []
    address = served(lambda method, args: called.append(method))
    with pytest.raises((multiprocessing.AuthenticationError, OSError, EOFError)):
        ServerLine(dataclasses.replace(address, key=b"another")).call("any").result(WAIT)
    with socket.socket(socket.AF_UNIX) as stranger:  # says nothing: others are served meanwhile
        stranger.connect(address.name)
        ServerLine(address).call("mine").result(WAIT)
    assert called == ["mine"]


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_HANDSHAKE", 1)
    address = served(lambda method, args: method)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT)
        stranger.connect(address.name)
        while stranger.recv(1000):  # the challenge, and then the end
            pass
    line = ServerLine(address)
    time.sleep(1.5)  # and afterwards it may take its time
    assert line.call("mine").result(WAIT) == "mine"


def test_callers_are_served_again_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = served(lambda method, args: method)
    begin, refused = ServedLines._begin, []

    def refuse(*args: Any) -> None:
        refused.append(args)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ServedLines, "_begin", staticmethod(refuse))
    with pytest.raises((OSError, EOFError)):
        ServerLine(address)
    assert refused
    monkeypatch.setattr(ServedLines, "_begin", staticmethod(begin))
    assert ServerLine(address).call("mine").result(WAIT) == "mine"


def test_lines_that_are_there_at_a_time_have_different_numbers() -> None:
    gone: list[int] = []
    address = ServedLines(lambda method, args, line: line, gone.append).address(this_machine(), ANOTHER)
    assert address is not None
    some = [ServerLine(address) for _ in range(3)]
    assert sorted(line.call("which").result(WAIT) for line in some) == [1, 2, 3]
    [second] = [line for line in some if line.call("which").result(WAIT) == 2]
    second._connection.close()
    deadline = time.monotonic() + WAIT
    while not gone and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone == [2]
    assert ServerLine(address).call("which").result(WAIT) in (2, 4)  # it may be about to be free


def test_only_other_processes_of_the_machine_get_the_address() -> None:
    some = ServedLines(lambda method, args, line: None)
    assert some.address("another", ANOTHER) is None
    assert some.address(None, ANOTHER) is None
    assert some.address(this_machine(), os.getpid()) is None
    assert some.address(this_machine(), ANOTHER) is some.address(this_machine(), ANOTHER)


def test_a_server_runs_one_call_at_a_time_whichever_way_they_come() -> None:
    server = ShardServer(0, 1, {})
    server.put({7: (np.zeros(1000, np.float32), "none")}, Ended())
    address, _ = server.meet(this_machine(), ANOTHER, None)
    assert address is not None
    pulled = server.pull({7: -1}, Ended())
    line = ServerLine(address)

    def push(line: Any, function: int) -> None:
        change = Push(function, 0, None, {}, {7: np.ones(1000, np.float32)}, {})
        line.call("push", change).result(WAIT) if line is not None else server.push(change)

    threads = [
        threading.Thread(target=lambda s=start, way=way: [push(way, s + n) for n in range(50)])
        for start, way in ((0, line), (100, ServerLine(address)), (200, None))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    [version, value] = server.pull({7: -1}, Ended()).values[7]
    assert version == 151
    assert value.tolist() == [150.0] * 1000
    assert pulled.values[7][1].tolist() == [0.0] * 1000  # what was read before is not written to
    with pytest.raises(ValueError, match="restore can't be called by way of a line"):
        line.call("restore", None).result(WAIT)


def test_a_line_that_has_failed_gives_no_call_the_answer_of_another() -> None:
    may_end = threading.Event()
    line = ServerLine(served(lambda method, args: may_end.wait(WAIT) and method))
    first = line.call("first")
    line._fail(BlockingIOError())  # as when the server was stopped for long
    may_end.set()
    for reply in first, line.call("second"):
        with pytest.raises(ActorDiedError, match="does not answer"):
            reply.result(WAIT)
