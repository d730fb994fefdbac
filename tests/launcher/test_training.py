"""Real workers that train with JAX under the launcher: they find each other, lose one, and start again."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from replicax.launcher.rendezvous import free_port
from tests.compiler import HURRIED
from tests.launcher.launches import Launch, said
from tests.soaking import soaked

TRAIN = """
    import os, sys
    import numpy as np
    import replicax

    strategy = replicax.MultiWorkerMirroredStrategy()
    saved = "saved.npy"
    first, start = np.load(saved) if os.path.exists(saved) else (0, 0)
    with strategy.scope():
        total = replicax.Variable(np.float32(start), name="total")

    def step():
        context = replicax.get_replica_context()
        total.assign_add(context.all_reduce("sum", context.replica_id_in_sync_group + 1.0))

    for number in range(int(first), 20):
        strategy.run(step)
        if number == 9 and len(sys.argv) > 1 and os.environ["REPLICAX_ATTEMPT"] == "0":
            if strategy.extended.workers.index == 0:
                np.save(saved, (number + 1, total.numpy()))
            print("pid", os.getpid(), flush=True)
            while True:  # all are inside steps, or on their way to the next one, when one is killed
                strategy.run(step)
    print(f"{strategy.num_replicas_in_sync} replicas from step {int(first)}: {float(total.numpy()):g}", flush=True)
    if len(sys.argv) > 1:
        code = int(sys.argv[int(os.environ["REPLICAX_ATTEMPT"])])
        worker = int(code == 75)
        if strategy.extended.workers.index == worker:
            sys.exit(code)
        while True:
            strategy.run(step)
            total.numpy()
"""


@pytest.mark.parametrize("codes", [soaked([75, 4]), [4]], ids=str)
def test_workers_that_train_survive_a_kill_and_one_that_leaves_decides_by_its_exit_code(codes, tmp_path) -> None:
    """Of one launch: a worker is killed; one leaves, to be started again; one ends, and decides, though others fail."""
    words = (
        "--workers",
        "2",
        "--devices-per-worker",
        "2",
        "--backoff",
        "0",
        "--grace",
        "600",
        "train.py",
        *map(str, codes),
    )
    with Launch(tmp_path, *words, script=TRAIN, **HURRIED) as launch:
        launch.wait_for("pid", 2)
        match = re.search(r"^\[1\] pid (\d+)$", launch.stdout, re.MULTILINE)
        assert match is not None
        os.kill(int(match[1]), signal.SIGKILL)
        assert launch.wait() == 4, launch.stderr
        assert launch.nothing_is_left()
    named = [line for line in said(launch) if re.match(r"worker \d of 2 on|all workers have|starting ", line)]
    host = f"of 2 on {socket.gethostname()}"
    begins = [
        f"worker 1 {host} was ended by signal 9 (SIGKILL",
        "all workers have ended, after ",
        "starting all workers again",
        *([f"worker 1 {host} has left, to be started again (exit code 75"] * codes.count(75)),
        *(["starting again, after preemption 1"] * codes.count(75)),
        f"worker 0 {host} has ended with exit code 4",
        "all workers have ended, after ",
    ]
    assert [line[: len(begin)] for line, begin in zip(named, begins, strict=True)] == begins
    results = [line for line in launch.stdout.splitlines() if "replicas from" in line]
    assert sorted(results) == sorted(
        [f"[{i}] 4 replicas from step 10: {20 * (1 + 2 + 3 + 4)}" for i in range(2)] * len(codes)
    )


def test_launchers_of_several_hosts_make_one_launch(tmp_path) -> None:
    port = free_port("127.0.0.1")
    words = ("--workers", "1", "--hosts", "127.0.0.1,127.0.0.2", "--port", str(port), "--bind", "127.0.0.1")
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    with (
        Launch(folders[0], *words, "--node-rank", "0", "train.py", script=TRAIN, **HURRIED) as first,
        Launch(folders[1], *words, "--node-rank", "1", "train.py", script=TRAIN, **HURRIED) as second,
    ):
        assert [first.wait(), second.wait()] == [0, 0], first.stderr + second.stderr
    assert "[0] 2 replicas from step 0: 60" in first.stdout
    assert "[1] 2 replicas from step 0: 60" in second.stdout
    assert (folders[1] / "replicax-logs").exists()
