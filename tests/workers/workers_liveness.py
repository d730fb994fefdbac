"""How workers end: each scenario in processes of its own, as ``test_liveness.py`` wants them.

Python is started once, and has imported everything when the workers are forked off. Each goes on as the main program,
so errors that nobody catches, ``sys.exit`` and the end of the program are the real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import replicax
from replicax.execution.compiled import host_calls
from replicax.workers import liveness
from replicax.workers.exchange import DistributedWorkers
from tests._jax.contexts import keep_contexts
from tests.forked import load_all
from tests.processes import free_port

keep_contexts()

# Nothing here depends on how quick a machine is: what is to happen happens in any time, and what is not, never.
liveness.INTERVAL, liveness.STUCK, liveness.EXIT_PATIENCE = 0.1, 0.3, 60.0
NEVER = 1000.0
host_calls.PATIENCE = 0.1

FEW = 6
"""As long as no more processes than these run, the next scenario starts: many would only take each other's time."""


class Worker:
    """One of them, with a step that all know."""

    def __init__(self, index: int, grace: float) -> None:
        liveness.GRACE = grace
        self.index = index
        self.strategy = replicax.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.w = replicax.Variable(np.zeros(3, np.float32), name="w")
        for _ in range(5):  # the calls 4 and 8 are compared
            self.step()

    def run(self, fn: Callable[..., Any], *args: Any, times: int = 1) -> None:
        for _ in range(times):
            jax.block_until_ready(self.strategy.run(fn, args=args))

    def train(self) -> Any:
        total = replicax.get_replica_context().all_reduce("sum", self.w + 1.0)
        self.w.assign(total * 0.1)
        return total

    def evaluate(self) -> Any:
        return replicax.get_replica_context().all_gather(jax.numpy.ones(4096), axis=0).sum()

    def step(self, times: int = 1) -> None:
        self.run(self.train, times=times)

    def caught(self, fn: Callable[..., Any], *args: Any) -> None:
        """Show the error that ``fn`` raises, and end with it."""
        try:
            fn(*args)
        except Exception as error:
            print(f"CAUGHT {type(error).__name__}: {error}", flush=True)
            raise

    def create(self) -> None:
        with self.strategy.scope():
            replicax.Variable(1.0, name="another")


def raises(worker: Worker) -> None:
    """Outside a step; the others train on."""
    if worker.index == 2:
        raise OSError("the disk is full")
    worker.caught(lambda: worker.step(10_000))


def raises_while_another_reads(worker: Worker) -> None:
    if worker.index == 1:
        raise OSError("the disk is full")
    try:
        worker.step(10_000)
    except replicax.errors.WorkerError as error:  # which reading a value raises, where JAX has not waited for the step
        raise jax.errors.JaxRuntimeError(f"UNKNOWN: Gloo all-reduce failed: {error.__cause__}") from None


def chief_raises(worker: Worker) -> None:
    """The others are inside a compiled step, and their connections to the chief stay."""
    if worker.index == 0:
        raise OSError("the disk is full")
    worker.caught(lambda: worker.step(10_000))


def interrupted(worker: Worker) -> None:
    if worker.index == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    worker.caught(worker.create)


def interrupted_in_steps(worker: Worker) -> None:
    if worker.index == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    worker.caught(lambda: worker.step(1_000_000))


def exits(worker: Worker) -> None:
    if worker.index == 1:
        sys.exit(3)
    worker.caught(lambda: worker.step(10_000))


def fails_on_one(worker: Worker) -> None:
    """A step that fails on worker 1 in the midst of its program, as the device's memory may be full there.

    A call of the host that fails, in a loop that goes on until it does not, can do that.
    """

    def on_the_host(x: Any) -> Any:
        if worker.index == 1:
            raise ValueError("no such row")
        return np.float32(1)

    def train() -> Any:
        ask = lambda x: jax.pure_callback(on_the_host, jax.ShapeDtypeStruct((), np.float32), x)  # noqa: E731
        x = jax.lax.while_loop(lambda x: x < 1, ask, np.float32(0))
        return replicax.get_replica_context().all_reduce("sum", x)

    if worker.index == 0:
        worker.caught(worker.run, train)
    with contextlib.suppress(Exception):
        worker.run(train)


def catches(worker: Worker) -> None:
    """One worker's part of a step fails, and its program ends."""
    fails_on_one(worker)
    sys.exit(3)


def catches_and_goes_on(worker: Worker) -> None:
    """It wants to run another step, while the other worker is still in the one that has failed."""
    fails_on_one(worker)
    worker.caught(worker.step)


def raised_on_all(worker: Worker, of_each: Callable[[Any], Any]) -> None:
    """A step that fails where ``x`` is -1, on worker 1: all raise its error, keep their variables, and go on."""

    def train(x: Any) -> Any:
        worker.w.assign(worker.w + replicax.get_replica_context().all_reduce("sum", x))
        return of_each(x)

    before = worker.w.numpy()
    xs = worker.strategy.distribute_values_from_function(lambda replica: 1.0 - 2.0 * replica.replica_id_in_sync_group)
    try:
        worker.run(train, xs)
    except (FloatingPointError, KeyError) as error:
        print(error, *error.__notes__)
    np.testing.assert_array_equal(worker.w.numpy(), before)
    worker.step()


def nan_on_one(worker: Worker) -> None:
    with jax.debug_nans(True):
        raised_on_all(worker, jax.numpy.log)


def host_fails_on_one(worker: Worker) -> None:
    error = KeyError("no such row")

    def on_the_host(x: Any) -> Any:
        if x == -1:
            raise error
        # Worker 1 raises its error first, and waits in the next step, also while worker 0 waits for worker 2.
        time.sleep(0.0 if x == 1 and worker.strategy.num_replicas_in_sync > 2 else 4 * liveness.STUCK)
        return x

    for _ in range(2):  # also by an object that was raised before
        raised_on_all(worker, lambda x: jax.pure_callback(on_the_host, jax.ShapeDtypeStruct((), np.float32), x))


def all_raise(worker: Worker) -> None:
    raise KeyError("the same everywhere")


def killed(worker: Worker) -> None:
    if worker.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.caught(lambda: worker.step(10_000))


def killed_in_a_run(worker: Worker) -> None:
    """The last step has been launched, so its numbers are what is waited for."""

    class Dies(replicax.Callback):
        def on_log(self, run: Any, step: int, values: Any) -> None:
            if step == 2 and worker.index == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)

    def train(x: Any) -> Any:  # of so much work that its launch does not wait for its end
        y = jax.lax.fori_loop(0, 20, lambda _, y: jax.numpy.tanh(y @ y), jax.numpy.eye(100) * x.mean())
        return replicax.get_replica_context().all_reduce("sum", y.sum())

    data = worker.strategy.distribute_dataset([np.ones((4, 3), np.float32)] * 4)
    worker.caught(
        lambda: replicax.train(train, data, 4, log_every=1, steps_per_call=1, callbacks=[Dies()], progress=False)
    )


def killed_of_three(worker: Worker) -> None:
    if worker.index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.caught(lambda: worker.step(10_000))


def killed_when_waited_for(worker: Worker) -> None:
    """No worker is in a program: only the connection tells."""
    if worker.index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.caught(worker.create)


def exits_at_once(worker: Worker) -> None:
    """As killed, with an exit code that says that all is well."""
    if worker.index == 1:
        os._exit(0)
    worker.caught(worker.create)


def chief_killed(worker: Worker) -> None:
    if worker.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.caught(lambda: worker.step(10_000))


def chief_killed_when_waited_for(worker: Worker) -> None:
    if worker.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.caught(worker.create)


def killed_at_the_end(worker: Worker) -> None:
    """The chief has come to its end, and waits for the other, which never does."""
    worker.step(3)
    if worker.index == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


def shorter(worker: Worker) -> None:
    """A pass that ends earlier on one worker than on the others."""

    def batches() -> Any:
        for _ in range(3 - (worker.index == 1)):
            yield np.ones((4, 3), np.float32)

    def train() -> None:
        for batch in worker.strategy.distribute_dataset(batches, replicax.InputOptions(auto_shard_policy="data")):
            worker.run(lambda x: replicax.get_replica_context().all_reduce("sum", x.sum()), batch)
            print("a step", flush=True)

    worker.caught(train)


def other_files(worker: Worker) -> None:
    """Both find it out; worker 1 reads late what worker 0 has sent, when that has failed since."""
    if worker.index == 1:
        get = DistributedWorkers._get

        def late(workers: DistributedWorkers, *args: Any) -> bytes | None:
            until = time.monotonic() + 1.0
            while workers._liveness._problem is None and time.monotonic() < until:
                time.sleep(0.02)
            return get(workers, *args)

        DistributedWorkers._get = late  # type: ignore[method-assign]
    paths = [__file__, replicax.__file__][: 2 - worker.index]
    worker.caught(lambda: worker.strategy.distribute_dataset(replicax.data.text_lines(paths).batch(4)))


def other_programs(worker: Worker) -> None:
    """Both know both; the collectives don't fit together."""
    worker.run(worker.evaluate, times=3)
    worker.caught(lambda: worker.run([worker.train, worker.evaluate][worker.index], times=3))


def alike_but_others(worker: Worker) -> None:
    """Both know both; the collectives would fit together, and the workers meet elsewhere."""

    def double(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", x * 2)

    def triple(x: Any) -> Any:
        return replicax.get_replica_context().all_reduce("sum", x * 3)

    one = np.float32(1)
    for fn in (double, triple, double):
        worker.run(fn, one)
    worker.run([double, triple][worker.index], one)
    worker.caught(worker.create)


def elsewhere(worker: Worker) -> None:
    """One is in a program that the other does not run, as it waits for the first to create a variable."""
    worker.caught([lambda: worker.step(2), worker.create][worker.index])


def ends_earlier(worker: Worker) -> None:
    """What is right: all have run all, and one has still something of its own to do, be it with JAX."""
    worker.step(3)
    if worker.index == 0:
        time.sleep(2.0)
        print("w is", jax.jit(lambda x: x * 2)(worker.w.numpy())[0])


def slow(worker: Worker) -> None:
    """What is right: a program that takes long, as another worker comes to it late."""
    if worker.index == 1:
        time.sleep(2.0)
    worker.step(2)
    print("w is", worker.w.numpy()[0])


SCENARIOS: dict[str, tuple[int, float, Callable[[Worker], None]]] = {
    "raises": (3, NEVER, raises),
    "raises while another reads": (2, NEVER, raises_while_another_reads),
    "chief raises": (3, 0.5, chief_raises),
    "interrupted": (2, NEVER, interrupted),
    "interrupted in steps": (2, NEVER, interrupted_in_steps),
    "exits": (2, 0.5, exits),
    "catches": (2, 0.5, catches),
    "catches and goes on": (2, 0.5, catches_and_goes_on),
    "nan on one": (2, NEVER, nan_on_one),
    "host fails on one": (2, NEVER, host_fails_on_one),
    "host fails on one of three": (3, NEVER, host_fails_on_one),
    "all raise": (2, NEVER, all_raise),
    "killed": (2, NEVER, killed),
    "killed in a run": (2, NEVER, killed_in_a_run),
    "killed of three": (3, NEVER, killed_of_three),
    "killed when waited for": (3, NEVER, killed_when_waited_for),
    "exits at once": (2, NEVER, exits_at_once),
    "chief killed": (3, NEVER, chief_killed),
    "chief killed when waited for": (2, NEVER, chief_killed_when_waited_for),
    "killed at the end": (2, NEVER, killed_at_the_end),
    "shorter": (2, NEVER, shorter),
    "other files": (2, NEVER, other_files),
    "other programs": (2, 0.5, other_programs),
    "alike but others": (2, NEVER, alike_but_others),
    "elsewhere": (2, 0.5, elsewhere),
    "ends earlier": (2, 0.1, ends_earlier),
    "slow": (2, 0.1, slow),
}
"""How many workers there are, for how long a program may go on in vain, and what each does."""


def forked(names: list[str], folder: pathlib.Path) -> tuple[int, int, str, str] | None:
    """In a worker: which one it is, of how many, where they meet, and what they do. In the parent, later: ``None``."""
    running: dict[int, tuple[str, int]] = {}
    codes: dict[str, dict[int, Any]] = {name: {} for name in names}
    left = list(names)
    load_all()
    deadline = time.monotonic() + float(sys.argv[1])
    while (left or running) and time.monotonic() < deadline:
        if left and len(running) <= FEW:
            name = left.pop(0)
            address = f"127.0.0.1:{free_port()}"
            for index in range(SCENARIOS[name][0]):
                pid = os.fork()
                if not pid:
                    out = os.open(folder / f"{name} {index}", os.O_CREAT | os.O_WRONLY)
                    os.dup2(out, 1)
                    os.dup2(out, 2)
                    return index, SCENARIOS[name][0], address, name
                running[pid] = name, index
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, index = running.pop(pid)
            codes[name][index] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    for pid, (name, index) in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[name][index] = "had not ended"
    if left:
        sys.exit(f"there was no time to start {left}")
    found = {n: [[codes[n][i], (folder / f"{n} {i}").read_text()] for i in range(SCENARIOS[n][0])] for n in names}
    print(json.dumps(found))
    return None


if __name__ == "__main__":
    mine = forked(sys.argv[3:] or list(SCENARIOS), pathlib.Path(sys.argv[2]))
    if mine is not None:
        index, count, address, name = mine
        replicax.use_cpu_devices(1)
        jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
        SCENARIOS[name][2](Worker(index, SCENARIOS[name][1]))
        print("END", flush=True)
