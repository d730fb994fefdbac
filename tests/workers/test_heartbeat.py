"""The heartbeat: what a worker writes into its page while it trains."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import _jax
from replicax.workers import heartbeat
from replicax.workers.heartbeat import Heartbeat
from replicax.workers.heartbeat_page import UNKNOWN, HeartbeatPage, Phase, Usage
from replicax.workers.launch_log import Label, LaunchedProgram


class Beating:
    """A heartbeat of this process, whose step timer is called by hand."""

    def __init__(self) -> None:
        self.page = HeartbeatPage.new()
        self.beat = Heartbeat(self.page)

    def expect(self, seen: Callable[[], bool]) -> None:
        """Look until something is so."""
        deadline = time.monotonic() + 60
        while not seen():
            assert time.monotonic() < deadline
            self.beat.look()
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

    before = beating.page.launched
    for run in range(7):
        strategy.run(only_writes)
        assert beating.page.phase == (Phase.START if run < 4 else Phase.STEPS)
    assert beating.page.launched == before + 7
    assert (beating.page.name, beating.page.runs) == (b"only_writes", 7)
    assert beating.page.thread == threading.get_native_id()
    for _ in range(3):
        strategy.run(gives_a_number)
    assert (beating.page.name, beating.page.runs) == (b"gives_a_number", 3)
    beating.expect(lambda: beating.page.running == 0)
    assert 0 < beating.page.expected < 60
    assert 0 < beating.page.progress <= time.monotonic()


def test_a_program_that_does_not_end_is_under_way_and_its_callback_is_seen(beating) -> None:
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
    beating.expect(lambda: beating.page.running == 0)
    go.clear()
    here.clear()
    thread = threading.Thread(target=strategy.run, args=(step,))
    thread.start()
    assert here.wait(60)
    try:
        beating.expect(lambda: beating.page.in_callback == 1)
        assert beating.page.running == 1
        assert 0 <= beating.page.expected < 60
    finally:
        go.set()
        thread.join()
    beating.expect(lambda: beating.page.running == beating.page.in_callback == 0)


def test_a_launch_that_fails_is_over(beating) -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")

    def fails(x: np.ndarray) -> np.ndarray:
        raise ValueError("no")

    def step() -> jax.Array:
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1))

    with pytest.raises(Exception, match="no"):
        strategy.run(step)
    beating.expect(lambda: beating.page.running == 0 < beating.page.launched)


def test_phases_nest_and_belong_to_the_thread_that_trains(beating) -> None:
    seen = []
    with heartbeat.phase(Phase.SAVING):
        with replicax.paused():
            seen.append(beating.page.phase)

            def elsewhere() -> None:
                with heartbeat.phase(Phase.INPUT):
                    seen.append(beating.page.phase)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        seen.append(beating.page.phase)
    assert seen == [Phase.PAUSED, Phase.PAUSED, Phase.SAVING]
    with pytest.raises(KeyError), heartbeat.phase(Phase.EVALUATION):
        raise KeyError
    assert beating.page.phase == 0


def test_the_end_of_a_forked_process_is_not_the_end_of_the_worker(beating) -> None:
    heartbeat.switch(Phase.STEPS)
    heartbeat._forget()  # as Python does after a fork
    beating.beat._end()
    assert beating.page.phase == Phase.STEPS


def test_compilation_is_a_phase_whoever_compiles(beating, monkeypatch) -> None:
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
            seen.append(beating.page.phase)
            return x * 7 - 2

        jax.jit(fn)(jnp.ones(3))
    finally:
        jax.monitoring.unregister_scalar_listener(began)
        jax.monitoring.unregister_event_duration_listener(ended)
    assert seen == [Phase.COMPILE]
    assert beating.page.phase == 0


def test_the_loop_tells_its_phases(beating) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = {}

    class Look(replicax.Callback):
        def on_log(self, run: replicax.TrainingRun, step: int, values: object) -> None:
            seen["callback"] = beating.page.phase

    def evaluate() -> dict[str, float]:
        seen["evaluation"] = beating.page.phase
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
    assert seen == {"callback": Phase.CALLBACKS, "evaluation": Phase.EVALUATION}
    assert beating.page.phase == Phase.START


def test_an_evaluation_by_steps_gets_on_as_training_does(beating, monkeypatch) -> None:
    phases, switch = [], beating.beat.switch

    def switched(phase: int) -> int:
        phases.append(phase)
        return switch(phase)

    monkeypatch.setattr(beating.beat, "switch", switched)
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    data = strategy.distribute_dataset([np.ones(4, np.float32)])
    step = replicax.compute_average_loss
    replicax.train(lambda x: step(x), data, 1, evaluate=(lambda x: step(x), data), progress=False)
    begun = phases.index(Phase.EVALUATION)
    assert phases[begun + 1] == Phase.STEPS
    assert Phase.INPUT in phases[begun:]


def test_a_page_belongs_to_one_process() -> None:
    launcher = HeartbeatPage.new()
    ours, path = HeartbeatPage.claimed(launcher.path), launcher.path
    assert isinstance(ours, HeartbeatPage)
    assert launcher.pid == os.getpid()
    ours.runs = 77
    assert launcher.runs == 77
    launcher.pid = os.getppid()
    assert HeartbeatPage.claimed(path) is None
    launcher.pid = 0
    del launcher
    assert HeartbeatPage.claimed(path) is None


class Program:
    """What a program returns, when a test says so."""

    nbytes = 4

    def __init__(self) -> None:
        self.ended = False

    def is_ready(self) -> bool:
        return self.ended


class Clocked:
    """Calls of programs, and what a step timer makes of them, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = HeartbeatPage.new()
        self.now = 100.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        self.beat = Heartbeat(self.page)
        self.enter(Phase.STEPS)

    def enter(self, phase: Phase) -> None:
        self.beat.switch(phase)

    def launch(self, name: str = "step", *, is_seen: bool = True) -> Program:
        label = Label()
        label.name = name
        launch = LaunchedProgram(label)
        program = Program()
        launch.returned((), (program,) if is_seen else ())
        self.beat.launches.append(launch)
        self.page.launched += 1
        return program

    def run(self, seconds: float) -> None:
        """Time passes, in which the timer looks."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1e-3)
            self.beat.look()

    def used(self) -> list[float]:
        """The shares of the time in which the devices were idle, the host was busy, and it waited for input."""
        usage: Usage = self.page.usage
        return [round(part / usage.sampled, 2) for part in (usage.idle, usage.host, usage.input)]


def test_compiling_is_no_part_of_what_a_program_takes(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    program = clocked.launch()
    clocked.beat._compiling()
    clocked.now += 5.0
    clocked.beat._compiled()
    clocked.run(0.02)
    assert clocked.page.running == 1
    program.ended = True
    clocked.run(0.001)
    assert clocked.page.running == 0
    clocked.launch()
    clocked.run(0.001)
    assert clocked.page.expected == pytest.approx(0.02, abs=0.002)


def test_a_host_that_its_devices_wait_for_is_seen(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    monkeypatch.setattr(heartbeat._jax, "is_of_jax", lambda code: True)
    for _ in range(100):
        program = clocked.launch()
        clocked.run(0.02)
        program.ended = True
        clocked.enter(Phase.INPUT)
        clocked.run(0.008)
        clocked.enter(Phase.STEPS)
        clocked.run(0.002)
    assert clocked.used() == pytest.approx([1 / 3, 1 / 3, 0.8 / 3], abs=0.04)
    assert clocked.page.expected == pytest.approx(0.02, abs=0.002)
    idle = clocked.page.idle
    clocked.enter(Phase.EVALUATION)
    clocked.run(5.0)
    clocked.enter(Phase.STEPS)
    assert clocked.page.idle == idle  # that is no step


def test_a_host_that_waits_for_the_others_is_not_busy(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    for _ in range(100):
        clocked.launch().ended = True
        clocked.run(0.02)
        clocked.enter(Phase.RENDEZVOUS)
        clocked.run(0.08)
        clocked.enter(Phase.STEPS)
    assert clocked.used() == pytest.approx([0.2, 0.2, 0.0], abs=0.04)
    sampled = clocked.page.sampled
    assert sampled == pytest.approx(10.0, abs=0.1)
    for phase in (Phase.SAVING, Phase.RENDEZVOUS, Phase.SAVING):  # a wait that is no step's
        clocked.enter(phase)
        clocked.run(5.0)
    assert clocked.page.sampled == pytest.approx(sampled, abs=0.01)


def test_a_host_that_is_ahead_has_no_idle_devices(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    monkeypatch.setattr(heartbeat._jax, "is_of_jax", lambda code: False)
    programs = [clocked.launch(), clocked.launch()]
    for _ in range(50):
        clocked.run(0.02)
        programs.pop(0).ended = True
        clocked.run(0.005)
        programs.append(clocked.launch())
    assert clocked.used() == [0.0, 1.0, 0.0]
    assert clocked.page.expected == pytest.approx(0.025, abs=0.002)  # until the end of the first
    assert len(clocked.beat.launches) == 2


def test_programs_whose_ends_can_not_be_seen_end_with_the_next_that_can(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    clocked.launch().ended = True
    clocked.run(2.0)
    clocked.launch(is_seen=False)
    clocked.launch("other", is_seen=False)
    seen = clocked.launch()
    clocked.run(1.0)
    assert (clocked.page.running, clocked.page.expected) == (3, UNKNOWN)
    clocked.beat._usual["other"] = 4.0
    clocked.run(1.0)
    assert clocked.page.running == 3
    assert clocked.page.expected == pytest.approx(4.0 + 2 * clocked.beat._usual["step"])
    seen.ended = True
    clocked.run(1.0)
    assert not clocked.beat.launches


def test_programs_whose_ends_can_not_be_seen_have_ended(monkeypatch) -> None:
    clocked = Clocked(monkeypatch)
    for _ in range(100):
        clocked.launch(is_seen=False)
    last = clocked.launch()
    clocked.run(0.01)
    assert clocked.page.running == len(clocked.beat.launches) == heartbeat.AHEAD
    last.ended = True
    clocked.run(0.01)
    assert clocked.page.running == 0


def test_a_thread_that_waits_for_a_program_is_in_jax() -> None:
    works = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x).sum())
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            float(works(jnp.eye(100)))

    def is_in_jax(thread: int | None) -> bool:
        return _jax.is_of_jax(sys._current_frames()[thread].f_code)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 60
    while not is_in_jax(thread.ident):
        assert time.monotonic() < deadline
    done.set()
    thread.join()
    assert not is_in_jax(threading.get_ident())
