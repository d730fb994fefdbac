from __future__ import annotations

import io
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import replicax
from replicax.execution.compiled import host_calls
from replicax.execution.signals import hold_signals
from replicax.variables.slots import escaped
from tests import processes
from tests.conftest import logical_strategy, strategy_of
from tests.soaking import soaked

MODELS = ["ran_a_model", "ran_a_model_in_pieces"]
QUICK = [*MODELS, "ran_in_steps", "updated"]
OTHERS = ["ran", "ran_in_steps", "ran_in_a_pipeline", "ran_exactly", "assigned", "ran_a_model_in_steps"]
KINDS = [*MODELS, *OTHERS, "updated", "traced", "ran_a_model_exactly", "ran_a_model_that_calls_the_host"]


# --- interrupts -----------------------------------------------------------------------------------------


def survive(how: str, number: int, kinds: list[str], timeout: float) -> None:
    program = [*processes.MODULE, "tests.execution.interrupted", how, str(number), *kinds]
    [printed] = processes.run_programs([program], timeout=timeout)
    assert [f"{kind} survived" in printed for kind in kinds] == [True] * len(kinds)


@pytest.mark.parametrize(("stride", "kinds"), [(1, QUICK), soaked(29, OTHERS)], ids=["quick", "others"])
def test_variables_survive_interrupts(stride: int, kinds: list[str]) -> None:
    survive("every", stride, kinds, 120.0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "number"), [("every", 1), ("random", 200)])
def test_variables_survive_thousands_of_interrupts(how: str, number: int, kind: str) -> None:
    survive(how, number, [kind], 900.0)


def test_signals_wait_and_are_delivered() -> None:
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)
        raise KeyError(number)

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        release = hold_signals()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert came == []
        with pytest.raises(KeyError):
            release()
        assert sorted(came) == [signal.SIGINT, signal.SIGTERM]
        assert [signal.getsignal(n) for n in before] == [handler, handler]
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# --- programs that fail while they run ------------------------------------------------------------------


def refuse(x: np.ndarray) -> np.ndarray:
    if float(x) > 2:
        raise ValueError(f"too large: {float(x)}")
    return np.asarray(x, np.float32)


def by_pure_callback(x: jax.Array) -> jax.Array:
    return jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), x)


def by_debug_callback(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda x: (refuse(x), None)[1], x)
    return x


FAILING = pytest.mark.parametrize("check", [by_pure_callback, by_debug_callback])


@FAILING
def test_a_host_callback_that_fails_leaves_variables_as_they_were(strategy, check) -> None:
    with strategy.scope():
        w, fixed = replicax.Variable(jnp.zeros(3), name="w"), replicax.Variable(2.0, name="fixed")

    def step(x):
        w.assign(w.value + check(x) * fixed.value)
        return w.value

    strategy.run(step, args=(1.0,))
    for _ in range(2):
        with pytest.raises(Exception, match=r"too large: 3\.0") as failed:
            strategy.run(step, args=(3.0,))
        assert "step writes have the values from before it" in "".join(failed.value.__notes__)
        assert w.numpy().tolist() == [2.0] * 3
    assert strategy.run(step, args=(1.0,)).tolist() == [4.0] * 3
    assert fixed.numpy() == 2


@pytest.mark.parametrize("logical", [1, 2])
def test_a_host_callback_that_fails_on_one_replica_keeps_no_other_waiting(logical) -> None:
    strategy = logical_strategy(2, logical)
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")
    seen = []

    def refused_once(x):
        seen.append(float(x))
        return refuse(x)

    def step(x):
        x = strategy.assign_to_logical_device(by_pure_callback(x), 0)
        w.assign(strategy.assign_to_logical_device(replicax.get_replica_context().all_reduce("sum", x), logical - 1))
        jax.debug.callback(refused_once, w.value)

    numbers = strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    large = strategy.distribute_values_from_function(lambda c: np.float32(3 * c.replica_id_in_sync_group))
    strategy.run(step, args=(numbers,))
    jax.effects_barrier()
    before = list(seen)
    with pytest.raises(ValueError, match=r"^too large: 3\.0\n"):
        strategy.run(step, args=(large,))
    assert float(w) == 1
    assert seen == before  # what comes after a call that has failed calls nothing
    strategy.run(step, args=(numbers,))
    assert float(w) == 1


def test_a_host_callback_that_fails_in_many_steps_keeps_none_waiting() -> None:
    three = strategy_of(3)
    with three.scope():
        total = replicax.Variable(0.0, name="total", aggregation="sum")

    def step(ctx, x):
        total.assign(by_pure_callback(x.sum() + replicax.get_replica_context().all_reduce("sum", total.value) * 0))

    batches = iter(three.distribute_dataset([np.full(3, 3.0, np.float32)] * 400))
    with pytest.raises(ValueError, match=r"^too large: 3\.0\n"):
        three.run_steps(step, batches, 400)
    assert float(total) == 0


def test_an_executable_that_is_called_by_itself_fails_where_it_is() -> None:
    executable = strategy_of(1).extended.trace(by_pure_callback, args=(1.0,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"too large: 3\.0"):
        jax.block_until_ready(executable.call([], [], [jnp.float32(3)], []))
    assert float(executable.call([], [], [jnp.float32(2)], [])[1][0]) == 2


def test_a_run_that_was_interrupted_leaves_no_error_to_the_next(pair) -> None:
    def slow(x):
        if x > 2:
            time.sleep(0.5)
            raise KeyError("of the interrupted run")
        return x

    def step(x):
        return jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x)

    pair.run(step, args=(1.0,))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            pair.run(step, args=(3.0,))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert float(pair.run(step, args=(2.0,))) == 2


def test_a_loop_that_only_a_host_callback_ends_ends_with_its_error(pair, monkeypatch) -> None:
    monkeypatch.setattr(host_calls, "PATIENCE", 0.0)

    def step(x):
        return jax.lax.while_loop(lambda y: y < 1, lambda y: by_pure_callback(x + y), 0.0)

    assert float(pair.run(step, args=(1.0,))) == 1
    with pytest.raises(Exception, match=r"too large: 3\.0"):
        pair.run(step, args=(3.0,))


def test_a_host_callback_after_one_that_failed_fails_no_program_without_a_loop(pair, monkeypatch, caplog) -> None:
    monkeypatch.setattr(host_calls, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match=r"too large: 3\.0"):
        pair.run(lambda x: by_pure_callback(by_pure_callback(x) + 1), args=(3.0,))
    assert not caplog.records  # JAX logs what fails inside a program, where other devices would wait for this one


def test_a_host_callback_that_fails_in_a_step_without_outputs(pair) -> None:
    def step(x):
        by_debug_callback(x)

    pair.run(step, args=(1.0,))
    with pytest.raises(Exception, match=r"too large: 3\.0"):
        pair.run(step, args=(3.0,))
    pair.run(step, args=(1.0,))


@FAILING
def test_a_host_callback_that_fails_in_run_steps(pair, check) -> None:
    with pair.scope():
        total = replicax.Variable(0.0, name="total", aggregation="sum")

    def step(ctx, x):
        total.assign_add(check(x.sum()))

    batches = iter(pair.distribute_dataset([np.ones(2, np.float32), np.full(2, 3.0, np.float32)]))
    with pytest.raises(Exception, match=r"too large: 3\.0"):
        pair.run_steps(step, batches, 2)
    assert float(total) == 0
    assert pair.run_steps(step, batches, 1).steps == 1  # the elements are still to come
    assert float(total) == 2


@FAILING
def test_a_host_callback_that_fails_in_a_pipeline(check) -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        first, second = (replicax.Variable(0.0, name=name) for name in ("first", "second"))

    def step(x):
        x = strategy.assign_to_logical_device(x, 0)
        first.assign_add(x)
        second.assign_add(strategy.assign_to_logical_device(check(x), 1))

    strategy.run(step, args=(1.0,))
    with pytest.raises(Exception, match=r"too large: 3\.0"):
        strategy.run(step, args=(3.0,))
    assert (float(first), float(second)) == (1, 1)
    strategy.run(step, args=(2.0,))
    assert (float(first), float(second)) == (3, 3)


@FAILING
def test_a_host_callback_without_a_use_that_fails_in_a_pipeline(check) -> None:
    strategy = logical_strategy(2, 2)
    with strategy.scope():
        w = replicax.Variable(0.0, name="w")

    def step(x):
        x = strategy.assign_to_logical_device(x, 0)
        by_debug_callback(check(x))
        w.assign_add(strategy.assign_to_logical_device(x, 1))

    strategy.run(step, args=(1.0,))
    with pytest.raises(Exception, match=r"too large: 3\.0") as failed:
        strategy.run(step, args=(3.0,))
    assert "step writes have the values from before it" in "".join(failed.value.__notes__)
    assert float(w) == 1


def test_an_ordered_callback_that_fails_does_not_fail_the_next_one() -> None:
    one = strategy_of(1)
    with one.scope():
        w = replicax.Variable(0.0, name="w")

    def step(x):
        w.assign(io_callback(refuse, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True))

    one.run(step, args=(1.0,))
    with pytest.raises(Exception, match=r"too large: 3\.0"):
        one.run(step, args=(3.0,))
    jax.effects_barrier()  # nor does whoever waits for all of them get the error again
    assert float(w) == 1
    one.run(step, args=(2.0,))
    assert float(w) == 2


def test_a_callback_sees_a_variable_as_it_was_before_the_step(pair) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")
    seen = []

    def step(x):
        jax.debug.callback(lambda x: seen.append(np.asarray(w.value.addressable_data(0)).item()), x)
        w.assign_add(x)

    pair.run(step, args=(1.0,))
    pair.run(step, args=(1.0,))
    assert set(seen) == {1.0, 2.0}


@pytest.mark.parametrize("strategy", [strategy_of(2), logical_strategy(1, 2)], ids=["pair", "logical devices"])
def test_a_nan_names_its_line_and_leaves_variables_as_they_were(strategy) -> None:
    with strategy.scope():
        w = replicax.Variable(1.0, name="w")

    def step(x):
        w.assign_add(jnp.log(x))

    strategy.run(step, args=(1.0,))  # a program that is not looked into, which must not serve the other call
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"nan.* in log: step 'step' at .*py:\d+: `w.assign_add"):
            strategy.run(step, args=(-1.0,))
        assert float(w) == 1
        batches = iter(strategy.distribute_dataset(np.array([[jnp.e] * 2, [-1.0] * 2, [1.0] * 2], np.float32)))
        with pytest.raises(FloatingPointError, match="in step at .*w.assign_add"):  # the second of them
            strategy.run_steps(lambda _, x: step(replicax.get_replica_context().all_reduce("mean", x[0])), batches, 3)
    assert float(w) == pytest.approx(2)


@pytest.mark.parametrize(("error", "looks"), [(FloatingPointError, False), (ValueError, True)])
def test_a_step_that_fails_runs_again_only_if_a_nan_is_looked_for(pair, error, looks) -> None:
    runs = []

    def step(x):
        runs.append(x)
        raise error("no NaN")

    with jax.debug_nans(looks), pytest.raises(error, match="^no NaN$"):
        pair.run(step, args=(1.0,))
    assert len(runs) == 1


def test_a_nan_of_a_step_that_runs_compiled_only_has_no_line(pair) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan.* in the step") as failed:
        pair.run(lambda x: (jax.lax.axis_index("replica"), jnp.log(x)), args=(-1.0,))
    assert "this step runs compiled only" in failed.value.__notes__[0]


@pytest.mark.parametrize(
    ("given", "ordered", "problem"),
    [
        ("{x:d}", False, "format code 'd'"),
        ("{v:.2f}", False, "unsupported format string"),
        ("{x}", True, "Leave ordered=True out"),
    ],
)
def test_a_print_that_is_wrong_fails_before_anything_runs(pair, given, ordered, problem) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")

    def step(x, format, ordered):
        jax.debug.print(format, x=x, v=x * jnp.ones(2), ordered=ordered, skip_format_check=True)
        jax.debug.callback(lambda: None)
        w.assign_add(x)

    with pytest.raises((ValueError, TypeError), match=problem) as failed:
        pair.run(step, args=(1.0, given, ordered))
    said = " ".join([str(failed.value), *getattr(failed.value, "__notes__", ())])
    assert re.search(r"jax.debug.print.* at .*test_launch.py:\d+ .*step", said)
    pair.run(step, args=(1.0, "{x:.1f} {v} {x.sharding}", False))
    assert float(w) == 2.0


def test_a_print_to_a_closed_stream_fails_once(pair, monkeypatch) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")

    def step(x):
        jax.debug.print("{x}", x=x)
        w.assign_add(x)

    with monkeypatch.context() as patched:
        closed = io.StringIO()
        closed.close()
        patched.setattr("sys.stdout", closed)
        with pytest.raises(Exception, match="closed file"):
            pair.run(step, args=(1.0,))
    with pytest.raises(replicax.errors.VariableLostError, match=r"'w'.*failed while it ran.*Assign it a new value"):
        w.numpy()
    w.assign(2.0)
    jax.effects_barrier()
    pair.run(step, args=(1.0,))
    assert float(w) == 3.0


# --- steps that run again and again ---------------------------------------------------------------------


def test_a_step_takes_arguments_of_other_kinds_in_between(strategy) -> None:
    with strategy.scope():
        variables = [replicax.Variable(float(i), name=f"v{i}") for i in range(9)]
        fixed = replicax.Variable(1.0, name="fixed")

    def step(x):
        for v in variables:
            v.assign_add(x * fixed.value)
        return x + variables[0].value

    one = strategy.distribute_values_from_function(lambda ctx: 1.0)
    held, _ = fixed.value, variables[0].value
    for i in range(8):
        result = strategy.run(lambda x: step(replicax.get_replica_context().all_reduce("mean", x)), args=(one,))
        assert float(strategy.local_results(result)[0]) == i + 2
    assert fixed.value is held  # a step that only reads it takes no copy,
    assert escaped.isdisjoint(v.slot for v in variables)  # and one that writes it a single one
    variables[3].assign(-5.0)
    fixed.assign(2.0)
    mean = lambda x: step(replicax.get_replica_context().all_reduce("mean", x))  # noqa: E731
    for given in (one, 1.0, np.float32(1), jax.device_put(np.float32(1), jax.devices()[5]), one, one):
        strategy.run(mean, args=(given,))
    assert [float(v) for v in variables] == [i + 20.0 if i != 3 else 7.0 for i in range(9)]
    one.form.array.delete()
    with pytest.raises(Exception, match="deleted"):
        strategy.run(mean, args=(one,))
    assert float(variables[3]) == 7


def test_a_deleted_value_is_found_after_many_runs(pair) -> None:
    with pair.scope():
        variables = [replicax.Variable(float(i), name=f"v{i}") for i in range(4)]

    def step():
        for v in variables:
            v.assign_add(1.0)

    for _ in range(6):
        pair.run(step)
    variables[2].value.delete()
    with pytest.raises(replicax.errors.VariableLostError, match="variable 'v2'"):
        pair.run(step)
    assert [float(v) for v in variables if v.name != "v2"] == [6, 7, 9]
    variables[2].assign(0.0)
    for _ in range(3):
        pair.run(step)
    assert [float(v) for v in variables] == [9, 10, 3, 12]


# --- arrays that somebody has deleted -------------------------------------------------------------------


@pytest.mark.parametrize("writes", [False, True])
def test_a_deleted_value_is_an_error_with_a_name(strategy, writes) -> None:
    with strategy.scope():
        w, other = replicax.Variable(1.0, name="w"), replicax.Variable(2.0, name="other")

    def step():
        (w if writes else other).assign_add(1.0)
        return w.value + other.value

    strategy.run(step)
    w.value.delete()
    for use in (lambda: strategy.run(step), lambda: w.value, w.numpy, lambda: strategy.run(step)):
        with pytest.raises(
            replicax.errors.VariableLostError, match=r"variable 'w' .*no value any more: the array of its"
        ):
            use()
    exact = replicax.RunOptions(executor="per_replica")
    with pytest.raises(replicax.errors.VariableLostError, match="variable 'w'"):
        strategy.run(step, options=exact)
    w.assign(1.0)
    before = float(other)
    assert float(strategy.run(step)) == 1 + before + 1


def test_a_value_donated_to_a_function_of_jax(pair) -> None:
    with pair.scope():
        w = replicax.Variable(jnp.ones(3), name="w")
    jax.jit(lambda x: x + 1, donate_argnums=0)(w.value)
    with pytest.raises(replicax.errors.VariableLostError, match="donated to a function"):
        w.numpy()
