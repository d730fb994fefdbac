"""What the watchdog makes of what it sees: of one worker, and of all of them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from replicax.launcher.watchdog.stragglers import StepTimes, StragglerWatch, slowest
from replicax.launcher.watchdog.verdict import Hang, verdict
from replicax.launcher.watchdog.vital_signs import ARMED, Condition, VitalSigns, WorkerMonitor
from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage, new_page

TIMEOUT, MARGIN = 10.0, 0.75


# --- one worker -----------------------------------------------------------------------------------------


class Worker:
    """A process that does nothing, its page, and a clock of its own for whoever looks at it."""

    def __init__(self, *program: str) -> None:
        self.process = subprocess.Popen(program or ("sleep", "600"))
        file, self.page = new_page()
        os.close(file)
        self.now = time.monotonic()
        self.page.numbers[page.CALLS] = self.page.numbers[page.LAUNCHED] = self.page.numbers[page.FINISHED] = ARMED
        self.page.numbers[page.STEP] = -1
        self.page.name = "train_step"
        self.page.seconds[page.PROGRESS] = self.page.seconds[page.FINISHED_AT] = self.now
        self.monitor = WorkerMonitor(1, self.page, TIMEOUT, MARGIN)
        self.page.numbers[page.THREAD] = self.page.numbers[page.PID] = self.process.pid

    def look(self, seconds: float, beats: bool = True) -> VitalSigns:
        """Look for so long, as often as the launcher does."""
        until = self.now + seconds
        while True:
            self.now = min(self.now + 0.5, until)
            if beats:
                self.page.seconds[page.TICK] = self.now
            found = self.monitor.look(self.now)
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


def test_a_worker_that_does_nothing_is_overdue_just_before_the_timeout(worker) -> None:
    early = worker.look(9.0)
    assert (early.condition, early.is_overdue) == (Condition.BUSY, False)
    late = worker.look(0.5)
    assert (late.condition, late.is_overdue) == (Condition.IDLE, True)
    assert TIMEOUT - MARGIN <= late.seconds <= TIMEOUT
    assert late.where == "after run 0 of 'train_step'"


@pytest.mark.parametrize("sign", [page.PROGRESS, page.FINISHED_AT])
def test_each_sign_of_progress_begins_anew(worker, sign) -> None:
    worker.look(9.0)
    worker.page.seconds[sign] = worker.now
    assert worker.look(9.0).condition is Condition.BUSY
    assert worker.look(0.5).condition is Condition.IDLE


def test_steps_that_are_long_have_five_times_as_long(worker) -> None:
    worker.page.seconds[page.USUAL] = 4.0
    assert not worker.look(19.0).is_overdue
    assert worker.look(0.5).is_overdue


def test_a_program_has_five_times_as_long_as_its_like_and_longer_if_nobody_knows(worker) -> None:
    worker.page.numbers[page.LAUNCHED] += 1
    worker.page.seconds[page.EXPECTED] = 6.0
    waiting = worker.look(29.0)
    assert (waiting.condition, waiting.is_overdue) == (Condition.WAITING, False)
    assert worker.look(0.5).is_overdue
    worker.page.seconds[page.EXPECTED] = page.UNKNOWN
    assert not worker.look(200.0).is_overdue


LONG = (page.COMPILE, page.INPUT, page.EVALUATION, page.SAVING, page.RESTORING, page.EXACT)


@pytest.mark.parametrize("phase", LONG)
def test_what_may_take_long_has_thirty_times_as_long(worker, phase) -> None:
    worker.page.numbers[page.PHASE] = phase
    assert worker.look(299.0).condition is Condition.BUSY
    overdue = worker.look(2.0)
    assert (overdue.condition, overdue.is_overdue) == (Condition.IDLE, True)


@pytest.mark.parametrize("phase", [page.START, page.PAUSED, page.END, page.MEETING])
def test_who_starts_pauses_ends_or_waits_with_a_deadline_of_its_own_is_not_judged(worker, phase) -> None:
    worker.page.numbers[page.PHASE] = phase
    assert verdict([worker.look(2000.0)], TIMEOUT) is None


def test_who_has_not_run_a_program_some_times_is_not_judged(worker) -> None:
    worker.page.numbers[page.CALLS] = ARMED - 1
    assert verdict([worker.look(2000.0)], TIMEOUT) is None


def test_who_has_no_page_or_has_ended_is_not_judged(worker) -> None:
    worker.page.numbers[page.PID] = 0
    assert worker.look(100.0).condition is Condition.UNKNOWN
    worker.page.numbers[page.PID] = worker.process.pid
    worker.end()
    assert worker.look(100.0).condition is Condition.UNKNOWN


def test_time_for_which_the_launcher_itself_was_held_up_does_not_count(worker) -> None:
    for _ in range(4):
        worker.now += 1000.0
        worker.page.seconds[page.TICK] = worker.now
        assert not worker.monitor.look(worker.now).is_overdue


def test_python_that_does_not_run_any_more_is_seen_whatever_the_phase(worker) -> None:
    worker.page.numbers[page.PHASE] = page.SAVING
    worker.look(5.0)
    mute = worker.look(9.5, beats=False)
    assert (mute.condition, mute.is_overdue) == (Condition.MUTE, True)
    assert worker.look(0.5).condition is Condition.BUSY  # it runs again


def test_a_process_that_is_stopped_is_seen_and_one_that_goes_on_is_well(worker) -> None:
    worker.page.numbers[page.PHASE] = page.COMPILE
    worker.process.send_signal(signal.SIGSTOP)
    os.waitpid(worker.process.pid, os.WUNTRACED)
    assert not worker.look(8.0, beats=False).is_overdue
    stopped = worker.look(1.5, beats=False)
    assert (stopped.condition, stopped.is_overdue) == (Condition.STOPPED, True)
    worker.process.send_signal(signal.SIGCONT)
    os.waitpid(worker.process.pid, os.WCONTINUED)
    assert worker.look(0.5).condition is Condition.BUSY


def test_a_thread_that_computes_does_not_hang() -> None:
    busy = Worker(sys.executable, "-c", "while True: pass")
    try:
        busy.monitor = WorkerMonitor(1, busy.page, timeout=1.0, margin=0.25)
        begin, found = time.monotonic(), None
        while (for_seconds := time.monotonic() - begin) < 2.5 or (found.computes <= 1.0 and for_seconds < 60.0):
            time.sleep(0.25)
            busy.page.seconds[page.TICK] = time.monotonic()
            found = busy.monitor.look(time.monotonic())
            assert found.condition is Condition.BUSY
        assert found.computes > 1.0  # and that is told
    finally:
        busy.end()


# --- all of them ----------------------------------------------------------------------------------------


def signs(worker: int, condition: Condition, seconds: float = 11.0, **more: object) -> VitalSigns:
    return VitalSigns(worker, condition, seconds, limit=10.0, launched=7, finished=6, **more)


def named(hang: Hang | None) -> list[int]:
    return [] if hang is None else [one.worker for one in hang.workers]


BUSY = signs(0, Condition.BUSY, 0.1)
WAITING = signs(0, Condition.WAITING)


def test_stopped_and_mute_workers_are_certain() -> None:
    for condition in (Condition.STOPPED, Condition.MUTE):
        assert named(verdict([BUSY, signs(1, condition)], TIMEOUT)) == [1]
        assert named(verdict([WAITING, signs(1, condition)], TIMEOUT)) == [1]
        assert verdict([WAITING, signs(1, condition, 5.0)], TIMEOUT) is None


def test_of_those_that_wait_nobody_is_judged_while_another_has_a_reason_not_to_come() -> None:
    for condition in (Condition.IDLE, Condition.WAITING):
        assert verdict([BUSY, signs(1, condition)], TIMEOUT) is None
        assert named(verdict([signs(0, Condition.MEETING), signs(1, condition)], TIMEOUT)) == [1]
    # But not for ever.
    assert named(verdict([BUSY, signs(1, Condition.IDLE, 300.0)], TIMEOUT)) == [1]
    assert verdict([signs(0, Condition.ENDED), signs(1, Condition.IDLE)], TIMEOUT) is None


def test_who_does_nothing_is_named_before_those_that_wait_in_programs() -> None:
    hang = verdict([WAITING, signs(1, Condition.IDLE), signs(2, Condition.WAITING)], TIMEOUT)
    assert (named(hang), hang.is_certain) == ([1], True)
    unknown = dataclasses.replace(WAITING, limit=300.0)  # nobody knows how long its program takes
    assert named(verdict([unknown, signs(1, Condition.IDLE)], TIMEOUT)) == [1]
    assert verdict([dataclasses.replace(unknown, seconds=1.0), signs(1, Condition.IDLE)], TIMEOUT) is None


def test_of_workers_in_a_program_the_one_in_a_callback_or_behind_is_named_or_all() -> None:
    called = dataclasses.replace(signs(1, Condition.WAITING), in_callback=True)
    assert named(verdict([WAITING, called], TIMEOUT)) == [1]
    behind = dataclasses.replace(signs(1, Condition.WAITING), launched=5)
    assert named(verdict([WAITING, behind], TIMEOUT)) == [1]
    everyone = verdict([WAITING, signs(1, Condition.WAITING)], TIMEOUT)
    assert (named(everyone), everyone.is_certain) == ([0, 1], False)
    assert verdict([WAITING, signs(1, Condition.WAITING, 5.0)], TIMEOUT) is None


def test_programs_of_several_hosts_have_longer_as_nobody_sees_the_others() -> None:
    assert verdict([WAITING], TIMEOUT, is_alone=False) is None
    assert named(verdict([signs(0, Condition.WAITING, 300.0)], TIMEOUT, is_alone=False)) == [0]
    assert named(verdict([signs(0, Condition.IDLE)], TIMEOUT, is_alone=False)) == [0]


# --- stragglers -----------------------------------------------------------------------------------------

EQUAL = StepTimes(5, 0.3, waited=0.0, wanted=0.25, gap=(0.01, 0.01), computed=(0.2, 0.2), is_on_cpu=True)


def heard(watch: StragglerWatch, others: StepTimes, own: StepTimes, seconds: float) -> list[str]:
    """What is said while worker 1 of 3 is like ``own``, step after step."""
    said, steps = [], getattr(heard, "steps", 0)
    for _ in range(int(seconds / 0.3)):
        steps += 1
        times = {w: dataclasses.replace(own if w == 1 else others, samples=steps) for w in range(3)}
        message = watch.look(times, 0.3 * steps)
        said += [] if message is None else [message]
    heard.steps = steps
    return said


def test_a_straggler_is_named_once_within_twenty_steps_and_when_it_keeps_up_again() -> None:
    watch = StragglerWatch()
    slow = dataclasses.replace(EQUAL, gap=(0.11, 0.12))
    assert heard(watch, EQUAL, EQUAL, 30.0) == []
    assert heard(watch, EQUAL, slow, 6.0) == [
        "worker 1 takes 1.5 times as long as the others for a step: 0.1 s more on its host, between two steps; all "
        "others wait for it"
    ]
    assert heard(watch, EQUAL, slow, 60.0) == []
    assert heard(watch, EQUAL, EQUAL, 6.0) == ["worker 1 keeps up with the others again"]


def test_it_is_said_what_makes_a_worker_slow() -> None:
    def why(**more: object) -> str:
        return str(slowest({0: EQUAL, 1: dataclasses.replace(EQUAL, **more), 2: EQUAL}))

    assert "0.1 s more waiting for its input" in why(gap=(0.11, 0.11), waited=0.1)
    assert "0.145 s more computing" in why(computed=(0.4, 0.4))
    assert slowest({0: EQUAL, 1: EQUAL}).ratio == 1.0
    # On other devices the processors tell nothing, nor where they have next to nothing to do.
    device = dataclasses.replace(EQUAL, is_on_cpu=False)
    assert slowest({0: device, 1: dataclasses.replace(device, computed=(0.4, 0.4))}).ratio == 1.0
    quick = dataclasses.replace(EQUAL, period=0.02, gap=(0.0, 0.0), computed=(0.005, 0.005))
    assert slowest({0: dataclasses.replace(quick, computed=(0.015, 0.015)), 1: quick}).ratio == 1.0
    small = dataclasses.replace(EQUAL, computed=(0.02, 0.02), wanted=0.02)
    assert slowest({0: small, 1: dataclasses.replace(small, computed=(0.05, 0.05), wanted=0.05)}).ratio == 1.0


def test_who_is_late_for_a_moment_is_no_straggler() -> None:
    watch = StragglerWatch()
    slow = dataclasses.replace(EQUAL, gap=(0.2, 0.2))
    assert slowest({0: EQUAL, 1: dataclasses.replace(EQUAL, gap=(0.01, 0.2))}).ratio == 1.0  # now and then
    for _ in range(20):
        assert heard(watch, EQUAL, slow, 1.2) == []
        assert heard(watch, EQUAL, EQUAL, 1.8) == []


def test_times_come_out_of_the_page() -> None:
    file, its_page = new_page()
    os.close(file)
    assert isinstance(its_page, HeartbeatPage)
    its_page.numbers[page.SAMPLES], its_page.numbers[page.ON_CPU] = 5, 1
    for place, value in ((page.PERIOD, 0.3), (page.WANTED, 0.25)):
        its_page.seconds[place] = value
    its_page.seconds[page.GAP_LOW] = its_page.seconds[page.GAP_HIGH] = 0.01
    its_page.seconds[page.COMPUTED_LOW] = its_page.seconds[page.COMPUTED_HIGH] = 0.2
    assert StepTimes.of(its_page) == EQUAL
