"""Workers that hang: found from outside, named, made to show where they are, and started again."""

from __future__ import annotations

import re
import socket

import pytest

from tests.compiler import HURRIED
from tests.launcher.launches import launched, said
from tests.soaking import soaked

TRAIN = """
    import os, signal, subprocess, sys, threading, time
    import numpy as np
    import replicax

    strategy = replicax.MultiWorkerMirroredStrategy()
    me, attempt = strategy.extended.workers.index, int(os.environ["REPLICAX_ATTEMPT"])
    todo = sys.argv[1].split(",")[attempt]
    with strategy.scope():
        total = replicax.Variable(np.float32(0), name="total")

    def train_step():
        context = replicax.get_replica_context()
        total.assign_add(context.all_reduce("sum", context.replica_id_in_sync_group + 1.0))

    def two_locks():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    for number in range(20):
        strategy.run(train_step)
    if todo == "stop" and me == 1:
        with replicax.paused():
            time.sleep(1.5)  # longer than the timeout
        # And stopped for a while: somebody goes on with it before the timeout is over.
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        for number in range(3):
            strategy.run(train_step)
        os.kill(os.getpid(), signal.SIGSTOP)
    if todo == "lock" and me == 0:
        two_locks()
    for number in range(20):
        strategy.run(train_step)
    print(f"attempt {attempt}: {float(total.numpy()):g}", flush=True)
    if todo == "end" and me == 1:
        two_locks()
"""


@pytest.mark.parametrize("faults", [soaked(["stop", "lock", "end"]), ["stop", "lock"]], ids=",".join)
def test_workers_that_hang_are_found_named_and_started_again(faults: list[str], tmp_path) -> None:
    """Of one launch: pauses that are no fault, then a worker that is stopped; one or two that wait for a lock.

    While the last of three waits, the other worker has ended its program.
    """
    words = ("--workers", "2", "--hang-timeout", "1", "--backoff", "0", "--max-restarts", str(len(faults) - 1))
    launch = launched(tmp_path, *words, "train.py", ",".join(faults), script=TRAIN, **HURRIED)
    assert launch.code == 137, launch.stderr
    host = socket.gethostname()
    found = [message for message in said(launch) if "hangs" in message]
    patterns = [
        rf"worker 1 of 2 on {host} hangs: its process is stopped \(SIGSTOP\), for [\d.]+ s, .*run 23 of",
        rf"worker 0 of 2 on {host} hangs: it neither runs a step nor uses its processor, for [\d.]+ s, after run 20 of "
        "'train_step'",
        rf"worker 1 of 2 on {host} hangs: it neither runs a step nor uses its processor, for [\d.]+ s, after run 40 of",
    ][: len(faults)]
    assert len(found) == len(patterns), found
    for message, pattern in zip(found, patterns, strict=True):
        assert re.match(pattern, message), (message, pattern)
    assert all(float(seconds) <= 3.5 for seconds in re.findall(r"for ([\d.]+) s, after", " ".join(found)))
    messages = said(launch)
    assert messages.count("it can't show its stacks; ending all others") == 1
    assert messages.count("the stacks of its threads follow; ending all others") == len(faults) - 1
    stacks = next(tmp_path.glob("replicax-logs/*/attempt-1"))
    assert re.search(r"line \d+ in two_locks", (stacks / "worker-0.log").read_text())
    assert sum("attempt 2: 120" in line for line in launch.stdout.splitlines()) == 2 * faults.count("end")


RUN = """
    import itertools, os, signal, sys, threading
    import jax
    import numpy as np
    import replicax

    attempt = int(os.environ["REPLICAX_ATTEMPT"])
    todo = sys.argv[1].split(",")[attempt]

    def reach(place):
        if todo == place and os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    reach("start")
    from replicax.checkpoint import checkpoint
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = replicax.Variable(np.zeros(4, np.float32), name="w", aggregation="sum")

    carry_out = checkpoint.carry_out

    def carries_out(*args):
        reach("saving")
        return carry_out(*args)

    checkpoint.carry_out = carries_out
    numbers = itertools.count(1)

    def called(x):
        if next(numbers) == 7 and todo == "callback" and os.environ["JAX_PROCESS_ID"] == "1":
            threading.Event().wait()
        return x

    def train_step(x):
        reach("compile")
        y = jax.pure_callback(called, jax.ShapeDtypeStruct((), np.float32), x.sum())
        w.assign_add(x.sum(axis=0))
        return replicax.compute_average_loss(x.sum(axis=1) + y)

    def evaluate():
        reach("evaluation")
        return {"loss": 0.0}

    manager = replicax.CheckpointManager(replicax.Checkpoint(w=w), f"saved{attempt}", every_steps=10)
    data = strategy.distribute_dataset([np.ones((2, 4), np.float32)] * 4)
    run = replicax.train(train_step, data, 20, checkpoints=manager, evaluate=evaluate, evaluate_every=10,
                         progress=False, steps_per_call=1)
    print("finished after step", run.step, flush=True)
"""


@pytest.mark.soak
def test_a_worker_that_hangs_is_found_in_every_phase(tmp_path) -> None:
    """Of one launch each attempt has a hang in another phase, and the last has none."""
    phases = ("start", "compile", "evaluation", "saving", "callback", "nothing")
    words = ("--workers", "2", "--hang-timeout", "4", "--backoff", "0", "--max-restarts", str(len(phases) - 1))
    launch = launched(tmp_path, *words, "train.py", ",".join(phases), script=RUN, **HURRIED)
    assert launch.code == 0, launch.stderr
    found = [message for message in said(launch) if " hangs: " in message]
    assert all(message.startswith("worker 1 of 2 ") for message in found), found
    stopped = r"its process is stopped \(SIGSTOP\), for [\d.]+ s, "
    called = "its program has called Python on the host, which does not return, for "
    patterns = [f"{stopped}starting", f"{stopped}compiling", f"{stopped}evaluating", stopped, called]
    assert len(found) == len(patterns), found
    for message, pattern in zip(found, patterns, strict=True):
        assert re.search(pattern, message), (message, pattern)
    assert re.search(r"line \d+ in called", next(tmp_path.glob("replicax-logs/*/attempt-4/worker-1.log")).read_text())
    assert launch.stdout.count("finished after step 20") == 2


def test_who_never_imports_replicax_is_not_judged_and_the_watchdog_can_be_switched_off(tmp_path) -> None:
    script = """
        import os, sys, time
        print(os.environ.get("REPLICAX_HEARTBEAT", "none"), flush=True)
        time.sleep(1)
    """
    launch = launched(tmp_path, "--workers", "1", "--hang-timeout", "0.5", "train.py", script=script)
    assert launch.code == 0, launch.stderr
    assert re.match(r"\[0\] /proc/\d+/fd/\d+", launch.stdout)
    stops = """
        import os, signal, subprocess
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    launch = launched(tmp_path, "--workers", "1", "--hang-timeout", "0", "train.py", script=stops)
    assert (launch.code, [message for message in said(launch) if "hangs" in message]) == (0, [])


def test_a_worker_that_is_stopped_before_it_imports_replicax_is_found(tmp_path) -> None:
    script = """
        import os, signal, time
        if os.environ["JAX_PROCESS_ID"] == "1" and os.environ["REPLICAX_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    words = ("--workers", "2", "--hang-timeout", "1", "--max-restarts", "1", "--backoff", "0", "train.py")
    launch = launched(tmp_path, *words, script=script)
    assert launch.code == 0, launch.stderr
    assert any(re.match(r"worker 1 of 2 on .* hangs: its process is stopped \(SIGSTOP\)", m) for m in said(launch))
