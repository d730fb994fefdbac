"""What a server makes of complete steps, and what goes with its state."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

from replicax.parameter_server.server.messages import Ended, Push
from replicax.parameter_server.server.shard_server import ServerState, ShardServer
from tests.parameter_server.test_late_messages import push, server_with_one, value


def test_a_step_that_was_complete_when_another_failed_counts() -> None:
    server = server_with_one(groups=2)
    for function in range(3):
        server.push(push(function, Ended()))
    server.break_off(Ended(0, 2))
    assert value(server) == 2.0
    server.pull({}, Ended(0, 4))
    assert value(server) == 2.0


def test_a_push_that_is_in_a_snapshot_does_not_count_again_when_its_function_runs_again() -> None:
    server = server_with_one(groups=1)
    server.push(push(0, Ended()))
    server.restore(copy.deepcopy(server.snapshot(Ended())), 1)
    server.push(push(0, Ended(1, 0)))
    assert value(server) == 1.0


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", [2.0, 1.0]), ("mean", [1.0, 0.5])])
def test_rows_of_several_functions_are_combined_by_the_aggregation(aggregation: str, expected: list[float]) -> None:
    server = ShardServer(2, {})
    server.put({0: (np.zeros((2, 1), np.float32), aggregation)}, Ended())
    for function, rows in enumerate(([0], [0, 1])):
        added = np.array(rows), np.ones((len(rows), 1), np.float32)
        server.push(Push(function, 0, None, {("added", 0): added}, Ended()))
    assert server.pull({0: -1}, Ended(0, 2)).values[0][1].ravel().tolist() == expected


def test_the_state_that_a_neighbour_keeps_is_the_last_one() -> None:
    server = server_with_one(groups=1)
    states = [ServerState() for _ in range(2)]
    kept = [weakref.ref(state) for state in states]
    while states:
        server.keep(states.pop(0))
    server.keep_last()
    gc.collect()
    assert [state() is None for state in kept] == [True, False]
