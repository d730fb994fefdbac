"""Messages that have been on their way for so long that they are of the past: they change nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.parameter_server.server.messages import Ended, Push
from replicax.parameter_server.server.shard_server import ShardServer
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


def server_with_one(groups: int) -> ShardServer:
    """A server that has one variable."""
    server = ShardServer(groups, {})
    server.put({0: (np.zeros(2, np.float32), "sum")}, Ended())
    return server


def push(function: int, ended: Ended) -> Push:
    return Push(function, 0, None, {("added", 0): np.ones(2, np.float32)}, ended)


def value(server: ShardServer) -> float:
    return float(server.pull({0: -1}, Ended(-1)).values[0][1][0])


def test_a_push_of_a_dead_worker_that_comes_when_its_function_has_ended_elsewhere_is_dropped() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v = replicax.Variable(np.zeros(2, np.float32), name="v")

    def add() -> None:
        strategy.run(lambda: v.assign_add(np.ones(2, np.float32)))

    with coordinator_of(strategy) as (coordinator, actors):
        [server] = actors.of("ShardServer")
        held: list[Any] = []

        def hold(method: str, args: Any) -> None:
            if method == "push":
                held.append(args[0])

        server.before = hold
        for _ in range(3):
            coordinator.schedule(add)
        coordinator.join(WAIT)
        server.before = lambda *_: None
        for late in held:  # as if they were those of other processes, which had died
            server.call("push", late).result(WAIT)
        assert v.numpy().tolist() == [3.0, 3.0]
        server.kill()
        assert v.numpy().tolist() == [3.0, 3.0]
        [server] = actors.of("ShardServer")
        for late in held:
            server.call("push", late).result(WAIT)
        coordinator.schedule(add).fetch(WAIT)
        assert v.numpy().tolist() == [4.0, 4.0]


@pytest.mark.parametrize("groups", [1, 2])
def test_what_was_sent_before_servers_have_gone_back_is_ignored(groups: int) -> None:
    server = server_with_one(groups)
    state = copy.deepcopy(server.snapshot(Ended(0, 0)))  # as when it is sent
    for function in (0, 1):
        server.push(push(function, Ended(0, 0)))
    server.pull({}, Ended(0, 2))
    assert value(server) == 2.0
    server.restore(state, 1)
    server.push(push(0, Ended(0, 0)))  # a late push, and
    server.pull({}, Ended(0, 2))  # a late word on functions that are to be run again
    assert value(server) == 0.0
    for function in (0, 1):
        server.push(push(function, Ended(1, 0)))
    server.pull({}, Ended(1, 2))
    assert value(server) == 2.0
