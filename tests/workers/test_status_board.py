"""What workers find out about each other from the board, in one process: a dictionary is the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replicax.errors import DeadlockError, WorkerError
from replicax.workers.launch_log import Label, LaunchLog, RunningProgram
from replicax.workers.liveness import Liveness
from replicax.workers.status_board import Problem

LOST = RuntimeError("Gloo all-reduce failed: Connection closed by peer")


class Service:
    """A key-value store like that of JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.after_set: Callable[[str], Any] = lambda key: None

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(folder + "/")]

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value
        self.after_set(key)

    def key_value_delete(self, key: str) -> None:
        for known in [k for k in self.values if k == key or k.startswith(key + "/")]:
            del self.values[known]


@pytest.fixture
def service() -> Service:
    return Service()


def workers(service: Service, *programs: str) -> list[Liveness]:
    """Those that have launched 'train' twice and each its own program then."""
    made = []
    for index, last in enumerate(programs):
        liveness = Liveness(service, index, len(programs))
        liveness.launches["mirrored"] = log = LaunchLog()
        labels = {name: Label() for name in sorted({"train", *programs})}
        for name, label in labels.items():
            label.name = name
            log.begin(label)
        for name in ("train", last):
            log.begin(labels[name]).returned()
        made.append(liveness)
    return made


def test_a_worker_that_is_asked_for_a_sign_of_life_says_what_it_runs(service: Service) -> None:
    """The connection is lost before anybody has run for so long that it tells the others by itself."""
    zero, one = workers(service, "train", "evaluate")
    service.after_set = lambda key: key.endswith("/0") and one._look_around()
    explained = zero.explained(LOST, "the step 'train'")
    assert isinstance(explained, WorkerError)
    assert str(explained) == (
        "the step 'train' was broken off, as the workers do not run the same programs: number 4 is 'train' on worker "
        "0, and 'evaluate' on worker 1. All workers must run the same steps in the same order."
    )


def test_workers_that_run_the_same_may_have_a_bad_network(service: Service) -> None:
    zero, one = workers(service, "train", "train")
    service.after_set = lambda key: key.endswith("/0") and one._look_around()
    explained = str(zero.explained(LOST, "the step 'train'"))
    assert "though all 2 of them are alive: the network may be at fault" in explained


def test_a_worker_that_failed_is_told_by_its_error_and_not_as_one_that_has_ended(service: Service) -> None:
    zero, one = workers(service, "train", "train")
    one.tell(OSError("the disk is full"))
    explained = str(zero.explained(LOST, "the step 'train'"))
    assert "as worker 1 of 2 (numbered from 0) has failed: OSError: the disk is full" in explained


def test_a_worker_that_is_stuck_is_compared_too(service: Service) -> None:
    zero, one = workers(service, "train", "evaluate")
    recent = one._recent()["mirrored"]
    one._service.post_stuck({"mirrored": RunningProgram("evaluate", 4, True, recent)})
    zero._look()
    assert zero._board.ahead("mirrored", 0, 4, "creates a variable") == {}  # which this worker has launched, too
    [told] = zero._board.ahead("mirrored", 0, 3, "creates a variable").values()
    assert "worker 1 runs 'evaluate', as its program number 4, which needs this worker, and worker 0, after 3 " in told
    with pytest.raises(DeadlockError, match="number 4 is 'train' on worker 0, and 'evaluate' on worker 1"):
        zero.check()


def test_of_workers_that_failed_the_one_that_was_first_is_told(service: Service) -> None:
    zero, one, two = workers(service, "train", "train", "train")
    one._problem = Problem.of_failure(2, 3, "OSError: the disk is full")
    one.tell(WorkerError("worker 2 has failed"))
    two.tell(OSError("the disk is full"))
    zero._look()
    with pytest.raises(WorkerError, match="worker 2 of 3 .* has failed: OSError: the disk is full"):
        zero.check()


def test_of_what_a_worker_has_told_the_latest_counts(service: Service) -> None:
    zero, one = workers(service, "train", "train")
    one._service.answer("an old call", {"mirrored": ((1, 5, "train"),)})
    one._service.answer("another", {"mirrored": ((2, 6, "train"), (3, 7, "evaluate"))})
    assert zero._look().recent("mirrored") == {1: ((2, 6, "train"), (3, 7, "evaluate"))}
