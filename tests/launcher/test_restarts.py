"""Attempts: what is started again, how often, with how many workers."""

from __future__ import annotations

import signal
import socket
import threading

import pytest

from replicax.launcher.attempt import AttemptResult
from replicax.launcher.device_allocation import DeviceAllocation
from replicax.launcher.restarts import RestartPolicy
from replicax.launcher.settings import LaunchSettings
from replicax.launcher.supervisor import Supervisor
from replicax.launcher.worker_process import Ending
from replicax.launcher.worker_program import WorkerProgram
from replicax.system.exit_codes import EXIT_PREEMPTED
from tests.launcher.launches import Launch, launched, said

PROGRAM = WorkerProgram(("train.py",))


def fault(status: int, worker: int = 0) -> AttemptResult:
    cause = Ending(worker, status, 1.0)
    return AttemptResult((cause,), cause)


# --- the policy -----------------------------------------------------------------------------------------


def test_by_default_workers_that_were_killed_are_started_again_three_times() -> None:
    policy = RestartPolicy(LaunchSettings(PROGRAM, 2, 2))
    assert [policy.after(fault(-9)).pause is not None for _ in range(5)] == [True, True, True, False, False]
    assert RestartPolicy(LaunchSettings(PROGRAM, 2, 2)).after(fault(1)).pause is None
    # perhaps without that worker's place
    assert RestartPolicy(LaunchSettings(PROGRAM, 2, 1)).after(fault(1)).pause is not None


def test_budgets_are_apart_and_pauses_grow() -> None:
    policy = RestartPolicy(LaunchSettings(PROGRAM, 2, 2, max_restarts=8, max_preemptions=2))
    assert [policy.after(fault(1)).pause for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [policy.after(fault(EXIT_PREEMPTED)).pause for _ in range(3)] == [0.0, 0.0, None]
    assert policy.after(fault(EXIT_PREEMPTED)).why == "--max-preemptions 2: all are used up"
    refused = policy.after(fault(-9))
    assert (refused.pause, refused.why) == (None, "not starting again: --max-restarts 8, all are used up")


def test_a_place_that_fails_twice_in_a_row_is_given_up_if_enough_are_left() -> None:
    policy = RestartPolicy(LaunchSettings(PROGRAM, 4, 2, max_restarts=9))
    policy.after(fault(-9, worker=1))
    policy.after(fault(-9, worker=2))
    assert policy.places == [0, 1, 2, 3]  # another one each time
    assert "worker 2 was the first to fail 2 times in a row" in policy.after(fault(1, worker=2)).why
    assert policy.places == [0, 1, 3]
    policy.after(fault(1, worker=2))  # the worker of place 3 now
    policy.after(fault(EXIT_PREEMPTED))  # which went well for a while
    policy.after(fault(1, worker=2))
    assert policy.places == [0, 1, 3]
    policy.after(fault(1, worker=2))
    assert policy.places == [0, 1]
    for _ in range(3):
        policy.after(fault(1, worker=0))
    assert policy.places == [0, 1]  # fewer are not allowed
    assert (policy.resizes, policy.faults) == (2, 7)
    policy = RestartPolicy(LaunchSettings(PROGRAM, 4, 2))
    for is_certain in (True, False, True):  # whose fault the second was is unknown
        cause = Ending(1, -9, 1.0, is_certain=is_certain)
        policy.after(AttemptResult((cause,), cause))
    assert policy.places == [0, 1, 2, 3]


def test_the_number_of_workers_changes_so_often() -> None:
    policy = RestartPolicy(LaunchSettings(PROGRAM, 3, 1, max_resizes=2))
    found = [(policy.after(AttemptResult((), resize=change)).pause, [*policy.places]) for change in (-1, 1, -1)]
    assert found == [(0.0, [0, 1]), (0.0, [0, 1, 2]), (None, [0, 1, 2])]


def test_with_several_hosts_the_scheduler_starts_again() -> None:
    settings = LaunchSettings(PROGRAM, 2, 2, hosts=("a", "b"), port=7000)
    for status in (-9, EXIT_PREEMPTED):
        decision = RestartPolicy(settings).after(fault(status, worker=3))
        assert (decision.pause, "for the scheduler" in decision.why) == (None, True)


# --- real launches --------------------------------------------------------------------------------------

FAIL = """
    import os, sys, time
    me, attempt = os.environ["JAX_PROCESS_ID"], int(os.environ["REPLICAX_ATTEMPT"])
    print(f"attempt {attempt} of {os.environ['JAX_NUM_PROCESSES']}", flush=True)
    status = [int(s) for s in sys.argv[1].split(",")][attempt]
    if status and me == "1":
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)
    time.sleep(600 if status else 0)
"""


def test_faults_and_preemptions_are_followed_by_other_attempts(tmp_path) -> None:
    words = ("--workers", "2", "--backoff", "0.01", "--log-dir", "logs", "--grace", "0.2", "train.py", "-9,75,-11,0")
    launch = launched(tmp_path, *words, script=FAIL)
    assert launch.code == 0, launch.stderr
    for attempt in range(4):
        assert (tmp_path / f"logs/attempt-{attempt}/worker-1.log").read_text() == f"attempt {attempt} of 2\n"
        assert (tmp_path / f"logs/attempt-{attempt}/worker-0.log").exists()
    decisions = [m for m in said(launch) if "start" in m and "again" in m and "worker 1" not in m]
    assert decisions == [
        "starting all workers again in 0.01 s (restart 1 of 3)",
        "starting again, after preemption 1",
        "starting all workers again in 0.02 s (restart 2 of 3)",
    ]
    assert any("has left, to be started again (exit code 75)" in m for m in said(launch))


def test_a_worker_that_is_asked_to_leave_before_it_can_save_is_no_fault(tmp_path) -> None:
    words = ("--workers", "2", "--max-restarts", "0", "--max-preemptions", "1", "train.py", "-15,-15,0")
    launch = launched(tmp_path, *words, script=FAIL)
    assert launch.code == 128 + signal.SIGTERM
    assert [m for m in said(launch) if "start" in m and "again" in m and "worker 1" not in m] == [
        "starting again, after preemption 1"
    ]
    assert any(
        "(SIGTERM): it was asked to leave, and is to be started again; ending all others" in m for m in said(launch)
    )


@pytest.mark.parametrize(
    ("statuses", "cause", "code", "watch"),
    [((4, 1), 0, 4, "10"), ((75, 1), 0, 75, "0"), ((0, 1), 1, 1, "10"), ((4, -9), 1, 137, "10")],
)
def test_the_worker_whose_program_ended_first_is_the_cause_though_its_process_ends_last(
    tmp_path, statuses, cause, code, watch
) -> None:
    script = f"""
        import os, sys, time
        from replicax.workers.heartbeat_page import VARIABLE, HeartbeatPage
        page, me = HeartbeatPage.at(os.environ[VARIABLE]), os.environ["JAX_PROCESS_ID"]
        status = {statuses}[int(me)]
        while me == "1" and not os.path.exists("told"):
            time.sleep(0.01)
        page.ended = time.monotonic() if status >= 0 else 0  # as replicax tells the other workers
        open("told", "w")
        time.sleep(1.0 if me == "0" else 0)  # the chief's process ends last
        os._exit(status) if status >= 0 else os.kill(os.getpid(), -status)
    """
    words = ("--workers", "2", "--max-restarts", "0", "--max-preemptions", "0", "--hang-timeout", watch, "train.py")
    launch = launched(tmp_path, *words, script=script)
    assert launch.code == code
    assert said(launch)[1].startswith(f"worker {cause} of 2 on ")


def test_a_program_that_fails_is_started_again_if_asked(tmp_path) -> None:
    words = ("--workers", "2", "--max-restarts", "1", "--backoff", "0", "--show", "chief", "train.py", "3,4,0")
    launch = launched(tmp_path, *words, script=FAIL)
    assert launch.code == 4
    assert "[1]" not in launch.stdout  # but the last lines of the one that failed are shown
    assert [line for line in launch.stderr.splitlines() if "[1]" in line] == [f"[1] | attempt {i} of 2" for i in (0, 1)]
    assert said(launch)[-1] == "not starting again: --max-restarts 1, all are used up"


def test_an_elastic_launch_goes_on_with_what_is_left(tmp_path) -> None:
    words = ("--workers", "1:2", "--backoff", "0", "train.py", "3,-9,0")
    launch = launched(tmp_path, *words, script=FAIL)
    assert launch.code == 0, launch.stderr
    assert launch.stdout.splitlines()[-1] == "[0] attempt 2 of 1"
    assert any(m.endswith("its place is given up, going on with 1 worker") for m in said(launch))


def test_signals_change_the_number_of_workers(tmp_path) -> None:
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print(f"attempt {os.environ['REPLICAX_ATTEMPT']} of {os.environ['JAX_NUM_PROCESSES']}", flush=True)
        time.sleep(600)
    """
    with Launch(tmp_path, "--workers", "1:3", "train.py", script=script) as launch:
        launch.wait_for("attempt 0 of 3", 3)
        launch.send(signal.SIGUSR2)
        launch.wait_for("--workers 1:3 does not allow 4; nothing is changed")
        launch.send(signal.SIGUSR1)
        launch.wait_for("attempt 1 of 2", 2)
        launch.send(signal.SIGUSR1)
        launch.wait_for("attempt 2 of 1", 1)
        launch.send(signal.SIGUSR2)
        launch.wait_for("attempt 3 of 2", 2)
        launch.send(signal.SIGTERM)
        assert launch.wait() == EXIT_PREEMPTED
        assert launch.nothing_is_left()


def test_workers_that_finish_when_their_number_is_to_change_are_not_started_again(tmp_path) -> None:
    script = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("trains", flush=True)
        time.sleep(600)
    """
    with Launch(tmp_path, "--workers", "1:2", "train.py", script=script) as launch:
        launch.wait_for("trains", 2)
        launch.send(signal.SIGUSR1)
        assert launch.wait() == 0
    assert said(launch)[-1].endswith(
        "is not started again; one that is to go on ends with 75 (replicax.EXIT_PREEMPTED)"
    )


def test_a_port_that_another_program_has_taken_meanwhile_costs_nothing(tmp_path) -> None:
    script = """
        import os, sys, time
        host, _, port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
        if os.environ["JAX_PROCESS_ID"] == "0" and os.environ["REPLICAX_ATTEMPT"] == "0":
            print("port", port, flush=True)
            while not os.path.exists("taken"):
                time.sleep(0.01)
            sys.exit("Address already in use")
    """
    with Launch(tmp_path, "--workers", "2", "--max-restarts", "0", "train.py", script=script) as launch:
        launch.wait_for("[0] port")
        port = int(launch.stdout.split()[2])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            (tmp_path / "taken").touch()
            assert launch.wait() == 0, launch.stderr
    assert any(f"127.0.0.1:{port}, was taken by another program: trying another one" in m for m in said(launch))


def test_an_interrupt_in_the_pause_before_an_attempt_ends_the_launch(tmp_path) -> None:
    with Launch(tmp_path, "--workers", "2", "--backoff", "600", "train.py", "-9,0", script=FAIL) as launch:
        launch.wait_for("starting all workers again in 60 s")
        launch.send(signal.SIGINT)
        assert launch.wait() == 130
    assert said(launch)[-1] == "SIGINT: not starting again"


@pytest.mark.parametrize(
    ("statuses", "cause"), [((1, -9), 1), ((-6, 1), 1), ((-15, -11), 1), ((1, EXIT_PREEMPTED), 1), ((1, 2), 0)]
)
def test_of_endings_at_the_same_time_the_cause_is_told_from_what_follows_from_it(statuses, cause) -> None:
    endings = [Ending(i, status, 1.0) for i, status in enumerate(statuses)]
    assert min(endings, key=lambda e: e.rank).worker == cause


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert str(Ending(0, -40, 1.0)) == "was ended by signal 40 (a real-time signal)"


def test_a_port_that_the_user_chose_may_take_a_moment_to_be_free_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = Supervisor(LaunchSettings(PROGRAM, 2, 2, port=port), DeviceAllocation(None, None, 1), {})
        threading.Timer(0.2, taken.close).start()
        assert supervisor._next_rendezvous().bind == f"127.0.0.1:{port}"
