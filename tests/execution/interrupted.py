"""A program that is interrupted again and again, at random moments, by real signals.

    python -m tests.execution.interrupted COUNT KIND...

After each interrupt all variables are those of one and the same step, and the next step works.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import replicax
from tests.conftest import logical_strategy, strategy_of

Work = Callable[[], object]


def ran() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)
    return variables, lambda: pair.run(add_one, args=(variables, 1.0))


def traced() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)

    def work() -> None:
        seed = object()
        pair.run(lambda: (seed, add_one(variables, 1.0))[1])

    return variables, work


def ran_in_steps() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)
    batches = [iter(())]

    def step(ctx: replicax.MultiStepContext, x: jax.Array) -> None:
        add_one(variables, jnp.float32(1.0))

    def work() -> None:
        try:
            pair.run_steps(step, batches[0], 4)
        except (StopIteration, TypeError, ValueError):
            batches[0] = iter(pair.distribute_dataset([np.ones(2, np.float32)] * 16))

    return variables, work


def ran_in_a_pipeline() -> tuple[list[replicax.Variable], Work]:
    strategy = logical_strategy(2, 2)
    variables = several(strategy)

    def step(x: jax.Array) -> None:
        x = strategy.assign_to_logical_device(x, 0)
        add_one(variables[:2], x)
        add_one(variables[2:], strategy.assign_to_logical_device(x * 1.0, 1))

    return variables, lambda: strategy.run(step, args=(1.0,))


def ran_exactly() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)
    options = replicax.RunOptions(executor="per_replica")
    return variables, lambda: pair.run(add_one, args=(variables, 1.0), options=options)


def assigned() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)[:1]
    return variables, lambda: variables[0].assign(variables[0].value + 1)


def updated() -> tuple[list[replicax.Variable], Work]:
    pair = strategy_of(2)
    variables = several(pair)[:1]
    return variables, lambda: pair.extended.update(variables[0], lambda v, x: v.assign_add(x), args=(1.0,))


def several(strategy: replicax.Strategy) -> list[replicax.Variable]:
    with strategy.scope():
        return [replicax.Variable(0.0, name=f"v{i}") for i in range(4)]


def add_one(variables: list[replicax.Variable], one: jax.Array | float) -> None:
    for variable in variables:
        variable.assign_add(one)


def interrupt(make: Callable[[], tuple[list[replicax.Variable], Work]], count: int, rng: random.Random) -> None:
    variables, work = make()
    for _ in range(3):
        work()
    start = time.perf_counter()
    work()
    long = min(2 * (time.perf_counter() - start), 0.2)
    wanted, over, sending = threading.Event(), threading.Event(), threading.Lock()

    def send() -> None:
        while not over.is_set():
            if wanted.wait(0.05):
                time.sleep(rng.random() * long)
                with sending:
                    if wanted.is_set():  # the one before may have come late, on a busy machine
                        os.kill(os.getpid(), signal.SIGINT)
                # Python drops an exception that is raised in a weak reference's callback. Then there has to be another.
                over.wait(0.05 + 4 * long)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    value, survived = 0.0, 0
    while survived < count:
        try:
            wanted.set()
            while True:
                work()
        except KeyboardInterrupt:
            while wanted.is_set():
                with contextlib.suppress(KeyboardInterrupt), sending:
                    wanted.clear()
        survived += 1
        value = consistent(variables, value)
        work()
        value = consistent(variables, value)
        assert not replicax.has_strategy()
    over.set()
    sender.join()


def consistent(variables: list[replicax.Variable], before: float) -> float:
    values = [float(v) for v in variables]
    assert len(set(values)) == 1, values
    assert values[0] >= before, (values, before)
    assert values[0] == int(values[0])
    return values[0]


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        interrupt(globals()[kind], int(sys.argv[1]), random.Random(kind))
        print(kind, "survived", flush=True)
