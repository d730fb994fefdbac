"""What the watchdog makes of what it sees: of one worker, and of all of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from replicax.launcher.watchdog import hang_watch
from replicax.launcher.watchdog.hang_watch import Condition, Hang, HangWatch, WorkerMonitor, WorkerStatus, find_hang
from replicax.launcher.watchdog.stragglers import StragglerWatch
from replicax.workers.heartbeat_page import LONG, UNKNOWN, HeartbeatPage, Phase, Usage

TIMEOUT = 10.0
LONGER = (LONG + 10) * TIMEOUT
"""Than anybody has who is judged."""


# --- one worker -----------------------------------------------------------------------------------------


class Worker:
    """A process that does nothing, its page, and a clock of its own for whoever looks at it."""

    def __init__(self, *program: str) -> None:
        self.process = subprocess.Popen(program or ("sleep", "600"))
        while not program and hang_watch._process(self.process.pid)[0] != "S":
            time.sleep(0.001)  # until it sleeps
        self.page = HeartbeatPage.new()
        self.now = float(math.ceil(time.monotonic()))  # so that adding half seconds is exact
        self.page.phase = Phase.STEPS
        self.page.launched = self.page.runs = 31
        self.page.name = b"train_step"
        self.page.thread = self.page.pid = self.process.pid
        self.monitor = WorkerMonitor(1, self.page, TIMEOUT, is_alone=True)
        self.monitor.look(self.now, 0)

    def look(self, seconds: float) -> WorkerStatus:
        """Look for so long, as often as the launcher does."""
        until = self.now + seconds
        while True:
            self.now = min(self.now + 0.5, until)
            found = self.monitor.look(self.now, self.process.pid)
            if self.now >= until:
                return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.end()


def test_a_worker_that_does_nothing_is_overdue_after_the_timeout(worker) -> None:
    assert not worker.look(9.5).is_overdue
    late = worker.look(0.5)
    assert (late.condition, late.is_overdue, late.where) == (Condition.HOST, True, "after run 31 of 'train_step'")
    worker.page.phase, worker.page.running = Phase.INPUT, 1
    assert worker.look(0.5).where == "waiting for its input, in run 31 of 'train_step'"


def test_progress_begins_anew(worker) -> None:
    worker.look(9.5)
    worker.page.progress = worker.now
    assert not worker.look(9.5).is_overdue
    assert worker.look(1.0).is_overdue


def test_steps_that_are_long_have_five_times_as_long(worker) -> None:
    worker.page.expected = 4.0
    assert not worker.look(19.0).is_overdue
    assert worker.look(1.0).is_overdue


def test_a_program_has_five_times_as_long_as_its_like_and_longer_if_nobody_knows(worker) -> None:
    worker.page.running = 1
    worker.page.expected = 6.0
    waiting = worker.look(29.0)
    assert (waiting.condition, waiting.is_overdue) == (Condition.PROGRAM, False)
    assert worker.look(1.0).is_overdue
    worker.page.expected = UNKNOWN
    assert not worker.look(200.0).is_overdue
    assert worker.look(70.0).is_overdue


def test_a_program_of_several_hosts_has_longer_as_nobody_sees_the_others(worker) -> None:
    worker.monitor = WorkerMonitor(1, worker.page, TIMEOUT, is_alone=False)
    worker.page.running = 1
    assert not worker.look(299.0).is_overdue
    assert worker.look(2.0).is_overdue
    worker.page.running, worker.page.progress = 0, worker.now
    assert worker.look(11.0).is_overdue


def test_a_step_that_is_compiled_anew_has_as_long_as_any_compilation(worker) -> None:
    worker.page.running = 1  # its launch compiles it: traced again, for batches of another shape
    worker.page.expected = 0.01
    worker.page.phase = Phase.COMPILE
    assert not worker.look(299.0).is_overdue
    assert worker.look(2.0).is_overdue


LONG_PHASES = (Phase.COMPILE, Phase.INPUT, Phase.EVALUATION, Phase.SAVING, Phase.RESTORING, Phase.PER_REPLICA)


@pytest.mark.parametrize("phase", LONG_PHASES)
def test_what_may_take_long_has_thirty_times_as_long(worker, phase) -> None:
    worker.page.phase = phase
    assert not worker.look(299.0).is_overdue
    overdue = worker.look(2.0)
    assert (overdue.condition, overdue.is_overdue) == (Condition.HOST, True)


@pytest.mark.parametrize("phase", [Phase.START, Phase.PAUSED, Phase.END, Phase.RENDEZVOUS])
def test_who_starts_pauses_ends_or_waits_with_a_deadline_of_its_own_is_not_judged(worker, phase) -> None:
    worker.page.phase = phase
    assert find_hang([worker.look(LONGER)], TIMEOUT) is None


def test_who_has_no_page_or_has_ended_is_not_judged(worker) -> None:
    worker.page.pid = 0
    assert worker.look(100.0).condition is Condition.ABSENT
    worker.page.pid = worker.process.pid
    worker.end()
    assert worker.look(100.0).condition is Condition.ABSENT


def test_time_for_which_the_launcher_itself_was_held_up_does_not_count(worker) -> None:
    for _ in range(4):
        worker.now += 1000.0
        assert not worker.monitor.look(worker.now, 0).is_overdue


def test_a_process_that_is_stopped_is_seen_and_one_that_goes_on_is_well(worker) -> None:
    worker.page.phase = Phase.COMPILE
    worker.process.send_signal(signal.SIGSTOP)
    os.waitpid(worker.process.pid, os.WUNTRACED)
    assert not worker.look(9.5).is_overdue
    stopped = worker.look(1.0)
    assert (stopped.condition, stopped.is_overdue) == (Condition.STOPPED, True)
    worker.process.send_signal(signal.SIGCONT)
    os.waitpid(worker.process.pid, os.WCONTINUED)
    assert not worker.look(0.5).is_overdue


def test_a_thread_that_computes_does_not_hang() -> None:
    busy = Worker(sys.executable, "-c", "while True: pass")
    try:
        busy.monitor = WorkerMonitor(1, busy.page, 1.0, is_alone=True)
        begin, found = time.monotonic(), None
        while (for_seconds := time.monotonic() - begin) < 2.5 or (found.seconds <= 1.0 and for_seconds < 60.0):
            time.sleep(0.25)
            found = busy.monitor.look(time.monotonic(), busy.process.pid)
            assert (found.condition, found.is_overdue) == (Condition.COMPUTING, False)
        assert found.seconds > 1.0  # and that is told
    finally:
        busy.end()


def test_time_in_the_kernel_counts_as_that_of_a_program() -> None:
    copies = Worker("dd", "if=/dev/zero", "of=/dev/null", "bs=1M")  # which the kernel does
    deadline = time.monotonic() + 20
    try:
        while hang_watch._process(copies.process.pid)[1] < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        copies.end()


def test_between_two_steps_the_thread_that_trains_counts_and_otherwise_the_process(worker, monkeypatch) -> None:
    of_others = itertools.count(0.0, 0.25)  # half a processor, at two looks a second
    monkeypatch.setattr(
        hang_watch, "_process", lambda path: ("S", next(of_others) if path == worker.process.pid else 0.0)
    )
    hangs = worker.look(10.5)
    assert (hangs.condition, hangs.is_overdue) == (Condition.HOST, True)
    worker.page.phase = Phase.INPUT  # which other threads read
    assert not worker.look(310.0).is_overdue


def test_who_gets_no_processor_has_thirty_times_as_long(monkeypatch) -> None:
    """On a machine that is busy with something else: a thread that is ready to run all the time, and hardly does."""
    starved = Worker(sys.executable, "-c", "while True: pass")
    had = itertools.count(0.0, 0.0025)  # 1% of a processor, at two looks a second that read it twice
    pid = starved.process.pid
    monkeypatch.setattr(hang_watch, "_process", lambda path: ("R", next(had) if path == pid else 0.0))
    try:
        starved.page.running = 1
        starved.page.expected = 0.01
        assert not starved.look(200.0).is_overdue
        assert starved.look(150.0).is_overdue
    finally:
        starved.end()


def test_who_waits_for_a_disk_for_ever_is_overdue_in_the_end(monkeypatch) -> None:
    """What may take long, 300 seconds, takes another 300 if all the while a thread could go on, and no more."""
    stuck = Worker()
    monkeypatch.setattr(WorkerMonitor, "_waits_for_machine", lambda monitor: True)
    try:
        stuck.page.phase = Phase.SAVING
        assert not stuck.look(590.0).is_overdue
        assert stuck.look(30.0).is_overdue
        stuck.page.progress = stuck.now  # it has gone on: all begins anew
        assert not stuck.look(590.0).is_overdue
    finally:
        stuck.end()


# --- all of them ----------------------------------------------------------------------------------------


def signs(worker: int, condition: Condition, seconds: float = 11.0, **more: object) -> WorkerStatus:
    return WorkerStatus(worker, condition, seconds, **{"limit": 10.0, "launched": 7} | more)


def named(hang: Hang | None) -> list[int]:
    return [] if hang is None else [one.worker for one in hang.workers]


BUSY = signs(0, Condition.HOST, 0.1)
INSIDE = signs(0, Condition.PROGRAM)


def test_stopped_workers_are_certain() -> None:
    assert named(find_hang([BUSY, signs(1, Condition.STOPPED)], TIMEOUT)) == [1]
    assert named(find_hang([INSIDE, signs(1, Condition.STOPPED)], TIMEOUT)) == [1]
    assert find_hang([INSIDE, signs(1, Condition.STOPPED, 5.0)], TIMEOUT) is None


def test_of_those_that_wait_nobody_is_judged_while_another_has_a_reason_not_to_come() -> None:
    for condition in (Condition.HOST, Condition.PROGRAM):
        assert find_hang([BUSY, signs(1, condition)], TIMEOUT) is None
        assert named(find_hang([signs(0, Condition.ABSENT), signs(1, condition)], TIMEOUT)) == [1]
    # But not for ever.
    assert named(find_hang([BUSY, signs(1, Condition.HOST, 300.0)], TIMEOUT)) == [1]
    assert find_hang([signs(0, Condition.EXCUSED), signs(1, Condition.HOST)], TIMEOUT) is None


def test_who_does_nothing_is_named_before_those_that_wait_in_programs() -> None:
    hang = find_hang([INSIDE, signs(1, Condition.HOST), signs(2, Condition.PROGRAM)], TIMEOUT)
    assert (named(hang), hang.is_certain) == ([1], True)
    unknown = dataclasses.replace(INSIDE, limit=300.0)  # how long its program takes is unknown
    assert named(find_hang([unknown, signs(1, Condition.HOST)], TIMEOUT)) == [1]
    assert find_hang([dataclasses.replace(unknown, seconds=1.0), signs(1, Condition.HOST)], TIMEOUT) is None


def test_of_workers_in_a_program_the_one_in_a_callback_or_behind_is_named_or_all() -> None:
    called = signs(1, Condition.PROGRAM, in_callback=True)
    assert named(find_hang([INSIDE, called], TIMEOUT)) == [1]
    alone = find_hang([signs(0, Condition.ABSENT), called], TIMEOUT)
    assert (named(alone), alone.why) == ([1], "its program has called Python on the host, which does not return")
    behind = signs(1, Condition.PROGRAM, launched=5)
    assert named(find_hang([INSIDE, behind], TIMEOUT)) == [1]
    everyone = find_hang([INSIDE, signs(1, Condition.PROGRAM)], TIMEOUT)
    assert (named(everyone), everyone.is_certain) == ([0, 1], False)
    assert find_hang([INSIDE, signs(1, Condition.PROGRAM, 5.0)], TIMEOUT) is None


def test_python_that_computes_is_judged_after_long_and_only_if_all_others_wait_for_it() -> None:
    computes = signs(1, Condition.COMPUTING, 299.0, limit=300.0)
    assert find_hang([INSIDE, computes], TIMEOUT) is None
    computes = dataclasses.replace(computes, seconds=300.0)
    hang = find_hang([INSIDE, computes, dataclasses.replace(INSIDE, worker=2)], TIMEOUT)
    assert (named(hang), hang.is_certain) == ([1], True)
    assert find_hang([INSIDE, computes, dataclasses.replace(BUSY, worker=2)], TIMEOUT) is None
    assert find_hang([computes], TIMEOUT) is None


def test_the_user_is_told_once_of_a_worker_that_computes_for_long_and_of_one_that_is_slow(monkeypatch) -> None:
    said: list[str] = []
    watch = HangWatch(TIMEOUT, True, said.append)
    for worker in (0, 1):
        watch.variables(worker)
    told = []
    for seconds in (59.0, 60.0, 61.0, 1.0, 60.0):
        found = signs(1, Condition.COMPUTING, seconds, where="after run 7", limit=300.0)
        monkeypatch.setattr(WorkerMonitor, "look", lambda monitor, *_, f=found: f if monitor._worker else BUSY)
        assert watch.look({0: 1, 1: 2}) is None
        told.append(len(said))
    assert told == [0, 1, 1, 1, 2]
    assert said[1].startswith("worker 1 has been computing for 60 s after run 7, and has not made another step; if all")
    monkeypatch.setattr(StragglerWatch, "look", lambda *_: "worker 1 is slow")
    watch.look({0: 1})
    assert said[2:] == ["worker 1 is slow"]


# --- stragglers -----------------------------------------------------------------------------------------

EQUAL = Usage(1, sampled=0.02, idle=0.001, host=0.001, input=0.0, computed=0.015)
SLOW = EQUAL._replace(sampled=0.03, idle=0.011, host=0.011)


class Run:
    """Steps of three workers, and what is said of them; the launcher looks four times a second."""

    def __init__(self) -> None:
        self.watch = StragglerWatch()
        self.now = self.looked_at = 0.0
        self._totals = dict.fromkeys(range(3), Usage(0, 0.0, 0.0, 0.0, 0.0, 0.0))
        self.watch.look(dict(self._totals), 0.0)

    def go(self, steps: int, own: Usage, others: Usage | None = None) -> list[str]:
        """So many steps, in which worker 1 is like ``own``."""
        others = own._replace(idle=0.001, host=0.001, input=0.0) if others is None else others
        said = []
        for _ in range(steps):
            self.now += own.sampled
            for worker, total in self._totals.items():
                step = own if worker == 1 else others
                self._totals[worker] = Usage(*(a + b for a, b in zip(total, step, strict=True)))
            if self.now - self.looked_at >= 0.25:
                self.looked_at = self.now
                found = self.watch.look(dict(self._totals), self.now)
                said += [] if found is None else [found]
        return said


@pytest.mark.parametrize("seconds", [0.005, 0.02, 0.1, 0.3, 2.0])
def test_a_straggler_is_named_once_within_twenty_steps_or_two_seconds_and_when_it_keeps_up_again(seconds) -> None:
    run = Run()
    equal = EQUAL._replace(sampled=seconds)
    slow = equal._replace(sampled=1.5 * seconds, idle=0.001 + 0.5 * seconds, host=0.001 + 0.5 * seconds)
    assert run.go(300, equal) == []
    (message,) = run.go(max(20, math.ceil(2.0 / slow.sampled)), slow)
    assert re.match(
        r"worker 1 takes 1\.[45] times as long as the others for a step: [\d.]+ s more on its host, between two steps; "
        "all others wait for it",
        message,
    )
    assert run.go(300, slow) == []
    assert run.go(max(20, math.ceil(6.0 / seconds)), equal) == ["worker 1 keeps up with the others again"]


def test_it_is_said_what_makes_a_worker_slow() -> None:
    (message,) = Run().go(60, SLOW._replace(input=0.01))
    assert "0.01 s more waiting for its input" in message
    slow, others = (EQUAL._replace(sampled=0.09, computed=seconds) for seconds in (0.08, 0.045))
    (message,) = Run().go(60, slow, others)
    assert "0.0389 s more computing" in message


def test_input_that_comes_late_in_bursts_is_seen_after_a_while() -> None:
    run = Run()
    late = EQUAL._replace(sampled=0.8, idle=0.7, host=0.7, input=0.7)
    said = []
    for _ in range(12):  # one late step, and then seven that have their input at once
        said += run.go(1, late)
        said += run.go(7, EQUAL._replace(sampled=0.1))
    assert len(said) == 1
    assert "waiting for its input" in said[0]


def test_what_is_no_lag_names_nobody() -> None:
    # Its host takes long, and is ahead of its devices all the same.
    assert Run().go(300, EQUAL._replace(idle=0.0, host=0.015)) == []
    # All hosts take long: the one that comes last is no slower than the others.
    last = EQUAL._replace(idle=0.019, host=0.02)
    assert Run().go(300, last, EQUAL._replace(host=0.02)) == []
    # It computes more, of which the devices do next to nothing; or of so quick a step that others do so by the way.
    assert Run().go(300, EQUAL._replace(computed=0.004), EQUAL._replace(computed=0.001)) == []
    quick = EQUAL._replace(idle=0.0, host=0.001, computed=0.004)
    assert Run().go(500, quick._replace(computed=0.015), quick) == []
    # A fraction of a step that is nothing to speak of.
    tiny = EQUAL._replace(sampled=0.003, idle=0.0015, host=0.0015, computed=0.0)
    assert Run().go(2000, tiny, tiny._replace(idle=0.0, host=0.0)) == []


def test_who_is_late_for_a_moment_is_no_straggler() -> None:
    run = Run()
    for _ in range(40):  # much later than half a step, but in single steps
        assert run.go(2, SLOW._replace(sampled=0.05, idle=0.03, host=0.03)) == []
        assert run.go(38, EQUAL) == []
    quick = EQUAL._replace(sampled=0.005, idle=0.0, host=0.001)
    for _ in range(10):  # and in many quick ones
        assert run.go(60, quick._replace(idle=0.004, host=0.004), quick) == []
        assert run.go(600, quick) == []


def test_one_worker_alone_and_workers_without_steps_are_not_compared() -> None:
    watch = StragglerWatch()
    for i in range(100):
        assert watch.look({1: Usage(*(i * x for x in SLOW))}, 0.03 * i) is None
        assert watch.look({0: Usage(0, 0, 0, 0, 0, 0), 1: Usage(*(i * x for x in SLOW))}, 0.03 * i) is None
