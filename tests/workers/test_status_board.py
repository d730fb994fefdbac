"""What workers find out about each other from the board, in one process: a dictionary is the service."""

from __future__ import annotations

import concurrent.futures

import pytest

from replicax.errors import WorkerError
from replicax.workers import liveness
from replicax.workers.launch_log import Label, LaunchLog
from replicax.workers.liveness import Liveness

LOST = RuntimeError("Gloo all-reduce failed: Connection closed by peer")


class Service:
    """A key-value store like that of JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(folder + "/")]

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        for known in [k for k in list(self.values) if k == key or k.startswith(key + "/")]:
            del self.values[known]


@pytest.fixture
def service() -> Service:
    return Service()


def workers(service: Service, *programs: str) -> list[Liveness]:
    """Those that have launched 'train' twice and each its own program then."""
    made = []
    for index, last in enumerate(programs):
        worker = Liveness(service, index, len(programs))
        worker.launches["mirrored"] = log = LaunchLog()
        labels = {name: Label() for name in sorted({"train", *programs})}
        for name, label in labels.items():
            label.name = name
            log.begin(label)
        for name in ("train", last):
            log.begin(labels[name]).returned()
        made.append(worker)
    return made


def explained_at_once(*lost: Liveness) -> list[str]:
    """What workers say that lose a connection at the same time."""

    def explained(worker: Liveness) -> str:
        error = worker.explained(LOST, "the step 'train'")
        assert isinstance(error, WorkerError)
        return str(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        said = [pool.submit(explained, worker) for worker in lost]
        while not all(future.done() for future in said):
            for worker in lost:
                worker._look_around()
    return [future.result() for future in said]


def test_workers_that_lose_a_connection_say_what_they_have_run(service: Service) -> None:
    """Even if it is lost before anybody has run for so long that it tells the others by itself."""
    different = (
        "the step 'train' was broken off, as the workers do not run the same programs: number 4 is 'train' on worker "
        "0, and 'evaluate' on worker 1. All workers must run the same steps in the same order."
    )
    assert explained_at_once(*workers(service, "train", "evaluate")) == [different] * 2


def test_workers_that_run_the_same_may_have_a_bad_network(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PATIENCE", 0.3)
    for said in explained_at_once(*workers(service, "train", "train")):
        assert "though none of the 2 is known to have died: the network may be at fault" in said


def test_a_worker_that_failed_is_told_by_its_error_and_not_as_one_that_has_ended(service: Service) -> None:
    zero, one = workers(service, "train", "train")
    one.tell(OSError("the disk is full"))
    explained = str(zero.explained(LOST, "the step 'train'"))
    assert "as worker 1 of 2 (numbered from 0) has failed: OSError: the disk is full" in explained
