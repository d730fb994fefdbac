"""What workers agree on before a run ends: workers that are threads, with a stand-in for the coordination service."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import replicax
from replicax import _jax
from replicax.errors import DeadlockError, WorkerError
from replicax.loop import stop_requests
from replicax.loop.endless_input import EndlessInput
from replicax.loop.periodic_evaluation import Evaluation
from replicax.loop.step_metrics import Combination
from replicax.loop.stop_requests import INTERRUPTED, PREEMPTED, RunStops, StopRequests
from replicax.loop.wall_time import WallTime
from replicax.workers.exchange import Alone
from replicax.workers.lockstep import Lockstep
from tests.simulated_workers import SimulatedWorkers, run


class Service:
    """A key-value store, like JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool) -> None:
        self.values[key] = value

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(f"{folder}/")]


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service that all workers see, which they ask often."""
    service = Service()
    monkeypatch.setattr(_jax, "coordination_client", lambda: service)
    monkeypatch.setattr(_jax, "preemption_notice", lambda client: False)
    monkeypatch.setattr(stop_requests, "INTERVAL", 0.01)
    monkeypatch.setattr(stop_requests, "PATIENCE", 5.0)
    return service


def as_workers(fn: Any, count: int = 2) -> list[Any]:
    """``fn`` of each worker's index and requests."""

    def of(worker: SimulatedWorkers) -> Any:
        requests = StopRequests(Lockstep(worker, timeout=10.0))
        requests._keys = "stop"  # as each worker would be a process
        with requests:
            return fn(worker.index, requests)

    return run(SimulatedWorkers.of(count), of)


def calls_of(requests: StopRequests, most: int = 10_000) -> tuple[int, str | None]:
    """Make calls until none may be made; how many there were, and why no more."""
    for number in range(most):
        try:
            requests.begin_call()
        except RunStops as stops:
            return number, str(stops)
        time.sleep(0.001)
    return most, None


def test_all_make_the_same_calls_after_each_request_of_one() -> None:
    reasons = ("enough", "and the end, too")

    def steps(index: int, requests: StopRequests) -> list[tuple[Any, ...]]:
        found = []
        for why in reasons:
            if index == 2:
                requests.request(why)
            _, said = calls_of(requests)
            found.append((requests._calls, said, requests._limit))
            with pytest.raises(RunStops, match=why):
                requests.check_wait()
            requests.forget()
        return found

    for why, found in zip(reasons, zip(*as_workers(steps, 3), strict=True), strict=True):
        last = max(limit for *_, limit in found)  # none has begun another call
        assert [(calls, said) for calls, said, _ in found] == [(last, why)] * 3


def test_a_notice_of_the_service_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax, "preemption_notice", lambda client: True)
    assert as_workers(lambda _, requests: calls_of(requests)) == [(0, PREEMPTED)] * 2


def test_no_worker_waits_for_one_that_has_left_without_a_request() -> None:
    def steps(index: int, requests: StopRequests) -> tuple[int, str | None]:
        calls = calls_of(requests, 3)
        if index == 0:
            return calls
        time.sleep(0.1)
        requests.request("enough")
        return calls_of(requests)

    first, (_, why) = as_workers(steps)
    assert (first, why) == ((3, None), "enough")


def test_a_limit_that_the_service_did_not_take_is_posted_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, failures = service.key_value_set_bytes, ["limit/0", "request/1", "limit/1"]

    def fails_once(key: str, value: bytes, allow_overwrite: bool) -> None:
        if (name := key.removeprefix("stop/")) in failures:
            failures.remove(name)
            raise RuntimeError("unavailable")
        post(key, value, allow_overwrite)

    monkeypatch.setattr(service, "key_value_set_bytes", fails_once)

    all_have_entered = threading.Barrier(2)

    def steps(index: int, requests: StopRequests) -> tuple[int, str | None]:
        all_have_entered.wait(10.0)
        requests.request("enough")
        return calls_of(requests)

    first, second = as_workers(steps)
    assert first == second
    assert failures == []


def batches_until_a_request(index: int, requests: StopRequests) -> Iterator[Any]:
    """A batch, and the end of the pass at a request, which worker 0 learns late, when all know the last call."""
    yield np.ones((2, 3), np.float32)
    while requests._calls < 1:
        time.sleep(0.001)
    requests.request("enough")
    while requests._limit is None or (index == 0 and requests._last is None):
        time.sleep(0.001)
    time.sleep(index == 0)  # it looks meanwhile whether the run ends


def test_workers_that_learn_early_and_late_of_the_end_of_an_evaluation_stop_before_its_result() -> None:
    def evaluates(index: int, requests: StopRequests) -> Any:
        strategy = replicax.MirroredStrategy(["cpu:0"])
        dataset = strategy.distribute_dataset(lambda: batches_until_a_request(index, requests))
        try:
            return Evaluation((lambda x: x.sum(), dataset), strategy, Combination("sum"), requests)()
        except RunStops as stops:
            return str(stops)

    assert as_workers(evaluates) == ["enough"] * 2


def test_workers_that_learn_early_and_late_of_the_end_of_a_pass_stop_in_one_place() -> None:
    def place(index: int, requests: StopRequests) -> int:
        strategy = replicax.MirroredStrategy(["cpu:0"])
        dataset = strategy.distribute_dataset(lambda: batches_until_a_request(index, requests))
        source = EndlessInput(dataset, strategy.extended.replicas, WallTime(), requests, is_saved=True)
        with contextlib.closing(source):
            source.take(1, False)
            with pytest.raises(RunStops, match="enough"):
                source.take(1, False)
            position: int = source.iterator.get_state()["position"]
        return position

    assert as_workers(place) == [1, 1]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    _, second = SimulatedWorkers.of(2)
    lockstep = Lockstep(second)
    monkeypatch.setattr(stop_requests, "PATIENCE", 2.0 if is_known else 0.1)
    with StopRequests(lockstep) as requests:
        requests.request("enough")
        while requests._limit is None:
            time.sleep(0.001)
        if is_known:
            monkeypatch.setattr(lockstep, "check", fails)
            with pytest.raises(WorkerError, match="worker 0 has died"):
                calls_of(requests)
        else:
            with pytest.raises(
                DeadlockError, match=r"to end \(enough\), .*for worker 0 of 2, to agree on the last step"
            ):
                calls_of(requests)


def fails() -> None:
    raise WorkerError("worker 0 has died")


def test_a_worker_that_waits_for_its_input_hears_that_another_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = SimulatedWorkers.of(2)
    lockstep = Lockstep(second)
    with StopRequests(lockstep) as requests:
        requests.check_wait()
        monkeypatch.setattr(lockstep, "check", fails)
        with pytest.raises(WorkerError, match="worker 0 has died"):
            requests.check_wait()


def test_of_several_requests_a_signal_counts_most() -> None:
    said = ["enough", INTERRUPTED, PREEMPTED, None]

    def ends(index: int, requests: StopRequests) -> str | None:
        if (why := said[index]) is not None:
            requests._signal = why
        return requests.agree()

    assert as_workers(ends, 4) == [PREEMPTED] * 4


def test_a_stop_file_that_has_ended_the_run_does_not_end_what_follows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stop"
    path.touch()
    with StopRequests(Lockstep(Alone()), path) as requests:
        assert calls_of(requests, 1) == (0, f"the file {path} is there")
        requests.forget()
        time.sleep(0.1)
        assert calls_of(requests, 1) == (1, None)
        requests.request(PREEMPTED)
        assert calls_of(requests, 1) == (0, PREEMPTED)
        looks: list[bool] = []
        monkeypatch.setattr(requests, "_look", lambda: looks.append(True))
        began = time.monotonic()
        while len(looks) < 10:
            time.sleep(0.001)
        assert time.monotonic() - began > 8 * stop_requests.INTERVAL  # the thread rests in between
