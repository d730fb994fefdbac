"""How launches end: a worker that fails ends all, signals are passed on, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

import replicax
from replicax.launcher import worker_process
from tests.launcher.launches import Launch, launched, said

WAIT = """
    import os, signal, subprocess, sys, time
    me = os.environ["JAX_PROCESS_ID"]
    # What a worker starts has no reason to end with it; one even has a session of its own.
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    how = sys.argv[1]
    if how == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
        signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
    if how == "saves":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", flush=True)
    if how == "fails" and me == "1":
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("about to fail", flush=True)
        raise ValueError("no such thing")
    if how == "killed" and me == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "finishes":
        sys.exit()
    for _ in range(6000):  # one long sleep would begin without the handler of a signal that comes just before it
        time.sleep(0.1)
"""


def test_a_worker_that_fails_ends_all_without_waiting_for_the_grace(tmp_path) -> None:
    words = ("--workers", "3", "--log-dir", "logs", "--grace", "600", "train.py", "fails")
    with Launch(tmp_path, *words, script=WAIT) as launch:
        launch.wait_for("ready", 3)
        (tmp_path / "go").touch()
        assert launch.wait() == 1
        assert launch.nothing_is_left()
    messages = said(launch)
    assert re.search(
        r"worker 1 of 3 on \S+ has ended with exit code 1, [\d.]+ s after its start; ending all others", messages[1]
    )
    took = re.search(
        r"all workers have ended, after ([\d.]+) s\. The last lines of worker 1 .all of them: (\S+)\)", messages[2]
    )
    assert took is not None
    assert float(took[1]) < 60  # benchmarks/launcher.py measures it
    assert took[2] == "logs/attempt-0/worker-1.log"
    again = [line for line in launch.stderr.splitlines() if line.startswith("[1] | ")]
    assert again[0] == "[1] | ready"
    assert again[-1] == "[1] | ValueError: no such thing"
    assert "not starting again, as the program itself has failed" in messages[3]


def test_a_worker_that_is_killed_is_named_with_the_signal(tmp_path) -> None:
    launch = launched(tmp_path, "--workers", "2", "--max-restarts", "0", "train.py", "killed", script=WAIT)
    assert launch.code == 137
    assert "was ended by signal 9 (SIGKILL, " in said(launch)[1]
    assert said(launch)[-1] == "not starting again: --max-restarts 0, none is allowed"


@pytest.mark.parametrize(
    ("before", "after", "meaning"),
    [
        ("oom_kill 3", "oom_kill 3", "by another program: the kernel has not run out of memory)"),
        ("oom_kill 3", "oom_kill 4", "perhaps because memory ran out: the kernel has killed a process for that)"),
        ("nr_free_pages 7", "nr_free_pages 7", "perhaps because memory ran out)"),
    ],
)
def test_whether_memory_may_have_run_out_is_asked_of_the_kernel(tmp_path, monkeypatch, before, after, meaning) -> None:
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(worker_process, "_COUNTERS", counters)
    counters.write_text(f"nr_zone_active 5\n{before}\n")
    worker = worker_process.WorkerProcess(1, ["sleep", "600"], {"PATH": os.environ["PATH"]}, None)
    counters.write_text(f"nr_zone_active 6\n{after}\n")
    worker.kill()
    while (ending := worker.look()) is None:
        time.sleep(0.01)
    for pipe in worker.output.values():
        pipe.close()
    assert str(ending) == f"was ended by signal 9 (SIGKILL, {meaning}"
    assert (ending.exit_code, ending.is_killed) == (137, True)


def test_what_workers_have_started_ends_with_the_last_of_them(tmp_path) -> None:
    launch = launched(tmp_path, "--workers", "2", "train.py", "finishes", script=WAIT)
    assert launch.code == 0  # and launched() has looked for what is left


@pytest.mark.parametrize(
    ("signum", "how", "code"),
    [
        (signal.SIGINT, "waits", 130),
        (signal.SIGTERM, "waits", 143),
        (signal.SIGHUP, "waits", 129),
        (signal.SIGTERM, "saves", replicax.EXIT_PREEMPTED),
    ],
)
def test_signals_to_the_launcher_reach_the_workers(tmp_path, signum, how, code) -> None:
    with Launch(tmp_path, "--workers", "2", "train.py", how, script=WAIT) as launch:
        launch.wait_for("ready", 2)
        launch.send(signum)
        assert launch.wait() == code
        assert launch.nothing_is_left()
    assert f"{signum.name}: the workers have 30 s to end" in said(launch)[1]
    interrupted = launch.stderr.count("KeyboardInterrupt")
    assert interrupted == (2 if signum == signal.SIGINT else 0)
    assert ("the workers have saved and left" in said(launch)[-1]) == (how == "saves")


def test_signals_that_the_launcher_is_started_with_blocked_arrive(tmp_path) -> None:
    blocked = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        launch = Launch(tmp_path, "--workers", "2", "train.py", "saves", script=WAIT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with launch:
        launch.wait_for("ready", 2)
        launch.send(signal.SIGHUP)
        assert launch.wait() == replicax.EXIT_PREEMPTED  # so SIGTERM has reached the workers
        assert launch.nothing_is_left()
    assert "SIGHUP: the workers have 30 s to end" in said(launch)[1]


def test_workers_that_do_not_end_are_killed_after_the_grace(tmp_path) -> None:
    with Launch(tmp_path, "--workers", "2", "--grace", "0.3", "train.py", "stubborn", script=WAIT) as launch:
        launch.wait_for("ready", 2)
        launch.send(signal.SIGTERM)
        launch.send(signal.SIGTERM)  # a second one changes nothing
        assert launch.wait() == 143
        assert launch.nothing_is_left()
    assert launch.stdout.count("no\n") == 2
    assert "worker(s) 0, 1 have not ended in time, and are killed" in said(launch)


def test_a_second_interrupt_ends_them_at_once(tmp_path) -> None:
    with Launch(tmp_path, "--workers", "2", "--grace", "600", "train.py", "stubborn", script=WAIT) as launch:
        launch.wait_for("ready", 2)
        launch.send(signal.SIGINT)
        launch.wait_for("no", 2)
        launch.send(signal.SIGINT)
        assert launch.wait() == 130
        assert launch.nothing_is_left()
    assert "interrupted again: ending all workers at once" in said(launch)


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path) -> None:
    with Launch(tmp_path, "--workers", "2", "train.py", "stubborn", script=WAIT) as launch:
        launch.wait_for("ready", 2)
        launch.wait_until(lambda: len(launch.left()) == 8)  # launcher, guard, two workers with two processes each
        launch.process.kill()
        launch.process.wait()
        assert launch.nothing_is_left(), launch.left()


def test_a_worker_that_has_finished_waits_for_the_others_for_so_long(tmp_path) -> None:
    script = """
        import os, time
        time.sleep(600 if os.environ["JAX_PROCESS_ID"] == "1" else 0)
    """
    started = time.monotonic()
    soon = script.replace("600", "0.3")
    assert launched(tmp_path, "--workers", "2", "--finish-timeout", "60", "train.py", script=soon).code == 0
    launch = launched(tmp_path, "--workers", "2", "--finish-timeout", "0.3", "train.py", script=script)
    assert time.monotonic() - started < 60
    assert launch.code == 1
    assert re.search(
        r"worker\(s\) 0 have finished, the first 0 s ago, and worker\(s\) 1 have not: --finish-timeout 0.3 is over",
        said(launch)[1],
    )


@pytest.mark.soak
@pytest.mark.parametrize("moment", range(40))
def test_nothing_is_left_of_a_launcher_that_is_killed_at_any_moment(tmp_path, moment) -> None:
    with Launch(tmp_path, "--workers", "3", "train.py", "stubborn", script=WAIT) as launch:
        time.sleep(moment / 80)
        launch.process.kill()
        launch.process.wait()
        assert launch.nothing_is_left(), launch.left()


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", range(20))
def test_a_signal_at_any_moment_ends_all(tmp_path, moment, signum) -> None:
    with Launch(tmp_path, "--workers", "3", "train.py", "waits", script=WAIT) as launch:
        time.sleep(0.1 + moment / 40)
        launch.send(signum)
        assert launch.wait() in (-signum, 1, 128 + signum)
        assert launch.nothing_is_left(), launch.left()
