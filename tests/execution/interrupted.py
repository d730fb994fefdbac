"""A program that is interrupted again and again, by real signals.

    python -m tests.execution.interrupted random COUNT KIND...
    python -m tests.execution.interrupted every STRIDE KIND...

After each interrupt all variables are those of one and the same step, and the next step works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import replicax
from replicax import _jax
from tests.conftest import logical_strategy, strategy_of
from tests.interrupting import interrupted_at

Work = Callable[[], object]
Made = tuple[Callable[[], list[float]], Work]


def ran() -> Made:
    pair = strategy_of(2)
    variables = several(pair)
    return read(variables), lambda: pair.run(add_one, args=(variables, 1.0))


def traced() -> Made:
    pair = strategy_of(2)
    variables = several(pair)
    warnings.simplefilter("ignore", replicax.errors.RetraceWarning)

    def work() -> None:
        seed = object()
        pair.run(lambda: (seed, add_one(variables, 1.0))[1])

    return read(variables), work


def ran_in_steps() -> Made:
    pair = strategy_of(2)
    variables = several(pair)

    def step(ctx: replicax.MultiStepContext, x: jax.Array) -> None:
        add_one(variables, jnp.float32(1.0))

    return read(variables), in_steps(pair, step)


def in_steps(strategy: replicax.Strategy, step: Callable[..., None]) -> Work:
    batches = [iter(())]

    def work() -> None:
        try:
            strategy.run_steps(step, batches[0], 4)
        except (StopIteration, TypeError, ValueError):
            batches[0] = iter(strategy.distribute_dataset([np.ones(2, np.float32)] * 16))

    return work


def ran_in_a_pipeline() -> Made:
    strategy = logical_strategy(2, 2)
    variables = several(strategy)

    def step(x: jax.Array) -> None:
        x = strategy.assign_to_logical_device(x, 0)
        add_one(variables[:2], x)
        add_one(variables[2:], strategy.assign_to_logical_device(x * 1.0, 1))

    return read(variables), lambda: strategy.run(step, args=(1.0,))


def ran_exactly() -> Made:
    pair = strategy_of(2)
    variables = several(pair)
    options = replicax.RunOptions(executor="per_replica")
    return read(variables), lambda: pair.run(add_one, args=(variables, 1.0), options=options)


def assigned() -> Made:
    pair = strategy_of(2)
    variables = several(pair)[:1]
    return read(variables), lambda: variables[0].assign(variables[0].value + 1)


def updated() -> Made:
    pair = strategy_of(2)
    variables = several(pair)[:1]
    return read(variables), lambda: pair.extended.update(variables[0], lambda v, x: v.assign_add(x), args=(1.0,))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param(jnp.zeros((2, 2))), nnx.Param(jnp.zeros(2))
        self.mean, self.count = nnx.BatchStat(jnp.zeros(2)), nnx.Variable(jnp.zeros((), int))

    def add_one(self) -> None:
        for cell in (self.kernel, self.bias, self.mean, self.count):
            cell[...] += 1

    def read(self) -> list[float]:
        return [float(x) for leaf in jax.tree.leaves(nnx.state(self)) for x in np.ravel(leaf)]


def ran_a_model() -> Made:
    pair, model = strategy_of(2), Model()
    return model.read, lambda: pair.run(Model.add_one, args=(model,))


def ran_a_model_in_pieces() -> Made:
    strategy, model = (
        replicax.ShardedStrategy(["cpu:0", "cpu:1"], replicax.variables.FixedShardsPartitioner(2)),
        Model(),
    )
    return model.read, lambda: strategy.run(Model.add_one, args=(model,))


def ran_a_model_in_steps() -> Made:
    pair, model = strategy_of(2), Model()

    def step(model: Model, ctx: replicax.MultiStepContext, x: jax.Array) -> None:
        model.add_one()

    return model.read, in_steps(pair, functools.partial(step, model))


def ran_a_model_exactly() -> Made:
    pair, model = strategy_of(2), Model()
    options = replicax.RunOptions(executor="per_replica")
    return model.read, lambda: pair.run(Model.add_one, args=(model,), options=options)


def ran_a_model_that_calls_the_host() -> Made:
    pair, model = strategy_of(2), Model()

    def step(model: Model) -> None:
        jax.debug.callback(lambda: None)
        model.add_one()

    return model.read, lambda: pair.run(step, args=(model,))


def several(strategy: replicax.Strategy) -> list[replicax.Variable]:
    with strategy.scope():
        return [replicax.Variable(0.0, name=f"v{i}") for i in range(4)]


def add_one(variables: list[replicax.Variable], one: jax.Array | float) -> None:
    for variable in variables:
        variable.assign_add(one)


def read(variables: list[replicax.Variable]) -> Callable[[], list[float]]:
    return lambda: [float(variable) for variable in variables]


def interrupt(make: Callable[[], Made], count: int, rng: random.Random) -> None:
    values, work = make()
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
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    with sending:
                        wanted.clear()
                    time.sleep(0)  # one that has come late is raised here
                    break
        survived += 1
        value = consistent(values, value)
        work()
        value = consistent(values, value)
        assert not replicax.has_strategy()
    over.set()
    sender.join()


def interrupt_everywhere(make: Callable[[], Made], stride: int) -> None:
    """Interrupt the same work once at each moment (each ``stride``-th) at which Python may run a signal's handler."""
    values, work = make()
    for _ in range(3):
        work()
    value = consistent(values, 0.0)
    moment, is_over = 0, False
    # What runs outside a step may be interrupted where JAX itself enters a trace, and JAX stays in it.
    put_back = _jax.trace_of_this_thread() if make in (assigned, updated) else lambda: None
    while not is_over:
        moment += stride
        try:
            is_over = not interrupted_at(moment, work)
        except RecursionError:  # JAX goes on believing that it traces what it was interrupted in
            jax.clear_caches()
        put_back()
        value = consistent(values, value)
        assert not replicax.has_strategy()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica ")]
    for _ in range(2):  # of which one may have come to the end of a dataset
        work()
    assert consistent(values, value) > value


def consistent(read: Callable[[], list[float]], before: float) -> float:
    values = read()
    assert len(set(values)) == 1, values
    assert values[0] >= before, (values, before)
    assert values[0] == int(values[0])
    return values[0]


if __name__ == "__main__":
    how, number, *kinds = sys.argv[1:]
    for kind in kinds:
        if how == "every":
            interrupt_everywhere(globals()[kind], int(number))
        else:
            interrupt(globals()[kind], int(number), random.Random(kind))
        print(kind, "survived", flush=True)
