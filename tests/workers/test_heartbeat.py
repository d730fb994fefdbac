"""The heartbeat: what a worker writes into its page while it trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.workers import heartbeat, heartbeat_page as page, step_timer
from replicax.workers.heartbeat import Heartbeat
from replicax.workers.heartbeat_page import HeartbeatPage, StepRecord, claimed_page, new_page, path_of


class Beating:
    """A heartbeat of this process, whose step timer is called by hand."""

    def __init__(self) -> None:
        self._file, self.page = new_page()
        self.beat = Heartbeat(self.page)
        os.close(self._file)

    @property
    def numbers(self) -> memoryview:
        return self.page.numbers

    def expect(self, seen: Callable[[], bool]) -> None:
        """Look until something is so."""
        deadline = time.monotonic() + 60
        while not seen():
            assert time.monotonic() < deadline
            self.beat.timer.look()
            time.sleep(0.001)


@pytest.fixture
def beating(monkeypatch) -> Beating:
    found = Beating()
    monkeypatch.setattr(heartbeat, "current", found.beat)
    return found


def test_launched_and_finished_programs_are_counted_by_name(beating) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")

    def only_writes() -> None:
        w.assign_add(1.0)

    def gives_a_number() -> jax.Array:
        return w.value + 1

    before = beating.numbers[page.LAUNCHED]
    for _ in range(7):
        strategy.run(only_writes)
    assert beating.numbers[page.LAUNCHED] == before + 7
    assert (beating.page.name, beating.numbers[page.RUNS], beating.numbers[page.CALLS]) == ("only_writes", 7, 7)
    for _ in range(3):
        strategy.run(gives_a_number)
    assert (beating.page.name, beating.numbers[page.RUNS], beating.numbers[page.CALLS]) == ("gives_a_number", 3, 7)
    beating.expect(lambda: beating.numbers[page.FINISHED] == before + 10)
    assert beating.page.seconds[page.EXPECTED] == 0.0  # nothing is under way
    assert 0 < beating.page.seconds[page.PROGRESS] <= time.monotonic()


def test_a_program_that_does_not_end_is_under_way_and_its_callback_is_seen(beating, monkeypatch) -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")
    go, here = threading.Event(), threading.Event()
    go.set()

    def blocks(x: np.ndarray) -> np.ndarray:
        here.set()
        assert go.wait(60)
        return x

    def step() -> jax.Array:
        return jax.pure_callback(blocks, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1))

    strategy.run(step)
    beating.expect(lambda: beating.numbers[page.FINISHED] == beating.numbers[page.LAUNCHED])
    go.clear()
    here.clear()
    monkeypatch.setattr(step_timer, "STALLED", 0.0)
    thread = threading.Thread(target=strategy.run, args=(step,))
    thread.start()
    assert here.wait(60)
    try:
        beating.expect(lambda: beating.numbers[page.CALLBACK] == 1)
        assert beating.numbers[page.LAUNCHED] == beating.numbers[page.FINISHED] + 1
        assert 0 <= beating.page.seconds[page.EXPECTED] < 60
    finally:
        go.set()
        thread.join()
    beating.expect(lambda: beating.numbers[page.LAUNCHED] == beating.numbers[page.FINISHED])


def test_a_launch_that_fails_is_over(beating) -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")

    def fails(x: np.ndarray) -> np.ndarray:
        raise ValueError("no")

    def step() -> jax.Array:
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1))

    with pytest.raises(Exception, match="no"):
        strategy.run(step)
    beating.expect(lambda: beating.numbers[page.FINISHED] == beating.numbers[page.LAUNCHED] > 0)


def test_phases_nest_and_belong_to_the_thread_that_trains(beating) -> None:
    seen = []
    with heartbeat.phase(page.SAVING):
        with replicax.paused():
            seen.append(beating.numbers[page.PHASE])

            def elsewhere() -> None:
                with heartbeat.phase(page.INPUT):
                    seen.append(beating.numbers[page.PHASE])

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        seen.append(beating.numbers[page.PHASE])
    assert seen == [page.PAUSED, page.PAUSED, page.SAVING]
    with pytest.raises(KeyError), heartbeat.phase(page.EVALUATION):
        raise KeyError
    assert beating.numbers[page.PHASE] == 0


def test_compilation_is_a_phase_whoever_compiles(beating, monkeypatch) -> None:
    from replicax import _jax

    seen = []
    ours: list[Callable[[], None]] = []
    monkeypatch.setattr(jax.monitoring, "register_scalar_listener", lambda f: ours.append(f))
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", lambda f: ours.append(f))
    _jax.on_compilations(beating.beat._compiling, beating.beat._compiled)
    monkeypatch.undo()
    began, ended = ours
    jax.monitoring.register_scalar_listener(began)
    jax.monitoring.register_event_duration_secs_listener(ended)
    try:

        def fn(x: jax.Array) -> jax.Array:
            seen.append(beating.numbers[page.PHASE])
            return x * 7 - 2

        jax.jit(fn)(jnp.ones(3))
    finally:
        jax.monitoring.unregister_scalar_listener(began)
        jax.monitoring.unregister_event_duration_listener(ended)
    assert seen == [page.COMPILE]
    assert beating.numbers[page.PHASE] == 0


def test_the_loop_tells_its_phases_and_steps(beating) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = {}

    class Look(replicax.Callback):
        def on_log(self, run: replicax.TrainingRun, step: int, values: object) -> None:
            seen["callback"] = beating.numbers[page.PHASE], beating.numbers[page.STEP]

    def evaluate() -> dict[str, float]:
        seen["evaluation"] = beating.numbers[page.PHASE], beating.numbers[page.STEP]
        return {"loss": 1.0}

    replicax.train(
        lambda x: replicax.compute_average_loss(x),
        strategy.distribute_dataset([np.ones(4, np.float32)] * 4),
        8,
        evaluate=evaluate,
        log_every=2,
        callbacks=[Look()],
        progress=False,
        steps_per_call=2,
    )
    assert seen == {"callback": (page.CALLBACKS, 8), "evaluation": (page.EVALUATION, 8)}

    assert (beating.numbers[page.PHASE], beating.numbers[page.STEP]) == (page.START, -1)


def test_an_evaluation_by_steps_is_a_phase_of_its_own(beating, monkeypatch) -> None:
    phases, switch = [], beating.beat.switch

    def switched(phase: int) -> int:
        phases.append(phase)
        return switch(phase)

    monkeypatch.setattr(beating.beat, "switch", switched)
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    data = strategy.distribute_dataset([np.ones(4, np.float32)])
    step = replicax.compute_average_loss
    replicax.train(lambda x: step(x), data, 1, evaluate=(lambda x: step(x), data), progress=False)
    begun = phases.index(page.EVALUATION)
    assert phases[begun + 1] == page.EVALUATION_STEPS
    assert page.INPUT in phases[begun:]


def test_a_page_belongs_to_one_process() -> None:
    file, its_page = new_page()
    ours = claimed_page(path_of(file))
    assert isinstance(ours, HeartbeatPage)
    ours.numbers[page.STEP] = 77
    assert its_page.numbers[page.STEP] == 77
    assert claimed_page(path_of(file)) is None
    os.close(file)
    assert claimed_page(f"/proc/{os.getpid()}/fd/{file}") is None


class Program:
    """What a program returns, when a test says so."""

    def __init__(self) -> None:
        self.ended = False

    def is_ready(self) -> bool:
        return self.ended


class Clocked:
    """Calls of programs, and what is recorded of them, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file, self.page = new_page()
        os.close(file)
        self.now = 100.0
        self.calls = step_timer.Calls()
        self.steps = step_timer.StepWatch(self.page, self.calls)
        self.waited = 0.0
        self.pace = self.calls.new_pace("step", None)
        self.breaks = 0
        monkeypatch.setattr(step_timer.time, "monotonic", lambda: self.now)

    def launch(self) -> Program:
        program = Program()
        self.calls.begin(self.pace, self.now, self.waited, 0.0, self.breaks)
        self.calls.returned(program)
        return program

    def run(self, seconds: float) -> None:
        """Time passes, in which it is looked as often as it is wanted."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + min(self.steps.look(self.now), 1e-3))

    @property
    def records(self) -> list[StepRecord]:
        return self.page.recorded(0)[0]


def test_a_host_that_its_devices_wait_for_is_recorded_step_by_step(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    for _ in range(12):
        program = clocked.launch()
        clocked.run(0.02)
        program.ended = True
        clocked.run(0.008)
        clocked.waited += 0.008
        clocked.run(0.002)
    assert len(clocked.records) == 10  # the first has nothing before it, and after the last comes nothing
    for step in clocked.records:
        assert step.period == pytest.approx(0.03, abs=0.002)
        assert step.gap == pytest.approx(0.01, abs=0.002)
        assert step.host == pytest.approx(0.03, abs=0.002)  # nobody has seen it wait for the program
        assert step.waited == pytest.approx(0.008)


def test_a_host_that_waits_for_programs_of_a_while_ago_is_busy_in_between(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    monkeypatch.setattr(step_timer, "_is_in_jax", lambda thread: True)
    programs = [clocked.launch(), clocked.launch()]
    for _ in range(12):
        clocked.run(0.02)
        programs.pop(0).ended = True
        clocked.run(0.005)
        programs.append(clocked.launch())
    assert len(clocked.records) >= 10
    assert all(step.gap == 0.0 for step in clocked.records)
    assert all(step.host == pytest.approx(0.005, abs=0.002) for step in clocked.records)


def test_a_host_that_is_ahead_has_no_gap_and_what_is_no_step_is_left_out(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    programs = [clocked.launch() for _ in range(12)]
    for program in programs:
        clocked.run(0.02)
        program.ended = True
    clocked.run(0.02)
    assert len(clocked.records) == 10
    assert all(step.gap == 0.0 for step in clocked.records)
    clocked.breaks += 1  # an evaluation
    clocked.run(5.0)
    for _ in range(3):
        program = clocked.launch()
        clocked.run(0.02)
        program.ended = True
        clocked.run(0.01)
    assert len(clocked.records) == 11
    assert clocked.records[-1].period == pytest.approx(0.03, abs=0.002)


def test_a_thread_that_waits_for_a_program_is_in_jax() -> None:
    works = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x).sum())
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            float(works(jnp.eye(100)))

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 60
    while not step_timer._is_in_jax(thread.ident):
        assert time.monotonic() < deadline
    done.set()
    thread.join()
    assert not step_timer._is_in_jax(threading.get_ident())
