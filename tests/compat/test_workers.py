"""Towers on several workers, each a process: what a worker sees of all of them, and what it does for itself."""

from __future__ import annotations

from typing import Any

from tests import processes
from tests.compat import workers_towers


def _each(everyone: list[list[dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """What each worker has found, compiled and on the per-replica executor."""
    return [(worker, found) for worker, both in enumerate(everyone) for found in both]


def test_what_each_worker_sees() -> None:
    """Of four towers a worker has two; what is computed across them is the same everywhere."""
    for worker, found in _each(processes.run(workers_towers.facts, workers=2, devices=2)):
        assert found["towers"] == (4, 4, 4, False)
        chief = worker == 0
        assert found["worker"] == (False, True, chief, chief)
        assert found["unwrapped"] == [[1, 2], [3, 4]][worker]
        assert (found["total"], found["first"]) == (10, 1)
        assert found["v"] == 1 + 2.5
        assert found["fetched"] == [3.5, 10, 10, 10]
        assert found["broadcast"] == 3
        assert found["group"] is None
        assert "has several workers, and map is for the towers of one: use call_for_each_tower" in found["map"]
        assert found["fetch"].startswith("LocalityError: distribution.fetch: a PerDevice value has no single value")
        assert "a cluster is made by jax.distributed.initialize" in found["configure"]
        assert found["fetched to"] == [True, True]  # devices of its own
        assert found["everywhere"] == 3.5


def test_each_worker_has_a_dataset_of_its_own() -> None:
    """The pass ends for all when one has no round left."""
    for worker, found in _each(processes.run(workers_towers.train, 1, workers=2, devices=2)):
        assert found["first"] == [[[0] * 3, [1] * 3], [[10] * 3, [11] * 3]][worker]
        assert found["steps"] == 2  # and one round was taken by hand
        # The means over all towers of the rounds (2, 3 | 12, 13) and (4, 5 | 14, 15).
        assert found["w"] == -(7.5 + 9.5)
        assert found["sum"] == 3 * (4 + 5 + 14 + 15) + 2 * (4 + 5)
        assert found["after"].startswith("StopIteration")
