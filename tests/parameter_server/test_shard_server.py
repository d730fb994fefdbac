"""What a server makes of complete steps, and what goes with its state."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import types
import weakref
from typing import Any

import numpy as np
import pytest

from replicax.parameter_server.actors import ActorDiedError, all_results
from replicax.parameter_server.recovery import Recovery
from replicax.parameter_server.server.messages import Ended, Push
from replicax.parameter_server.server.shard_server import ServerState, ShardServer
from tests.parameter_server.test_late_messages import push, server_with_one, value
from tests.parameter_server.thread_actors import ThreadReply


def test_a_step_that_was_complete_when_another_failed_counts() -> None:
    server = server_with_one(groups=2)
    for function in range(3):
        server.push(push(function, Ended()))
    server.break_off(Ended(0, 2))
    assert value(server) == 2.0
    server.pull({}, Ended(0, 4))
    assert value(server) == 2.0


@pytest.mark.parametrize("below", [0, 1])  # whether it has ended, too
def test_a_push_that_is_in_a_snapshot_does_not_count_again_when_its_function_runs_again(below: int) -> None:
    server = server_with_one(groups=1)
    server.push(push(0, Ended()))
    server.restore(copy.deepcopy(server.snapshot(Ended(0, below))), 1)
    for function in (0, 1):
        server.push(push(function, Ended(1, below)))
    assert value(server) == 2.0
    [(version, _)] = server.pull({0: None}, Ended()).values.values()
    assert server.pull({0: version}, Ended()).values == {}  # what the caller has is not sent again


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", [2.0, 1.0]), ("mean", [1.0, 0.5])])
def test_rows_of_several_functions_are_combined_by_the_aggregation(aggregation: str, expected: list[float]) -> None:
    server = ShardServer(2, {})
    server.put({0: (np.zeros((2, 1), np.float32), aggregation)}, Ended())
    for function, rows in enumerate(([0], [0, 1])):
        added = np.array(rows), np.ones((len(rows), 1), np.float32)
        server.push(Push(function, 0, None, {("added", 0): added}, Ended()))
    assert server.rows(0, np.arange(2), Ended(0, 2))[1].ravel().tolist() == expected


def test_snapshots_take_a_fortieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    snapshots: Any = Recovery(types.SimpleNamespace(assigned={}), None, None)  # type: ignore[arg-type]
    snapshots._cost = 1.0
    for taken, functions, is_due in ((-39.0, 50, False), (-41.0, 49, False), (-41.0, 50, True)):
        snapshots._taken = taken
        assert snapshots.is_due(functions) is is_due


def test_an_error_of_one_server_is_not_told_if_another_has_died() -> None:
    replies = [ThreadReply(concurrent.futures.Future()) for _ in range(3)]
    for reply, error in zip(replies, (MemoryError("no room"), ActorDiedError("gone"), None), strict=True):
        reply.future.set_exception(error) if error else reply.future.set_result(None)
    with pytest.raises(ActorDiedError, match="the second has died: gone"):
        all_results(replies, ["the first", "the second", "the third"])  # type: ignore[arg-type]


def test_the_state_that_a_neighbour_keeps_is_the_last_one() -> None:
    server = server_with_one(groups=1)
    states = [ServerState() for _ in range(2)]
    kept = [weakref.ref(state) for state in states]
    while states:
        server.keep(states.pop(0))
    server.keep_last()
    gc.collect()
    assert [state() is None for state in kept] == [True, False]
