from __future__ import annotations

import pytest

from replicax.workers.exchange import Alone, Series, Workers
from tests import simulated_workers
from tests.simulated_workers import SimulatedWorkers


def test_a_worker_alone_gets_what_it_brings() -> None:
    workers: Workers = Alone()
    assert (workers.index, workers.count) == (0, 1)
    assert workers.exchange("topic", b"data") == [b"data"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_everybody_gets_everything_in_order(count: int) -> None:
    workers = SimulatedWorkers.of(count)

    def talk(worker: SimulatedWorkers) -> list[list[bytes]]:
        series = Series(worker, "numbers")
        return [series.exchange(bytes([worker.index]) * (step + 1)) for step in range(3)]

    for heard in simulated_workers.run(workers, talk):
        assert heard == [[bytes([w]) * (step + 1) for w in range(count)] for step in range(3)]
    assert not workers[0].board.topics


def test_whoever_does_not_come_is_named() -> None:
    workers = SimulatedWorkers.of(3)
    with pytest.raises(TimeoutError, match=r"input/7: waited 0\.01 s for worker 1, worker 2 of 3, who did not come"):
        workers[0].exchange("input/7", b"", timeout=0.01)


def test_whoever_comes_too_late_is_told() -> None:
    workers = SimulatedWorkers.of(2)
    with pytest.raises(TimeoutError):
        workers[0].exchange("input/7", b"", timeout=0.01)
    with pytest.raises(TimeoutError, match="input/7: worker 1 came too late, when worker 0 gave up"):
        workers[1].exchange("input/7", b"")
