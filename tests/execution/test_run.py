from __future__ import annotations

import functools
import gc
import os
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.execution.tracing import arguments, function_key
from replicax.execution.tracing.arguments import _fits
from replicax.loop import accumulated
from tests.conftest import strategy_of


def ids(strategy: replicax.Strategy):
    return strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))


# --- arguments and results ------------------------------------------------------------------------------


def test_each_replica_gets_its_component(strategy) -> None:
    n = strategy.num_replicas_in_sync
    out = strategy.run(lambda x, y: {"x": x * 2, "y": y + 1}, args=(ids(strategy),), kwargs={"y": jnp.ones(2)})
    assert [float(v) for v in strategy.local_results(out["x"])] == [2.0 * i for i in range(n)]
    np.testing.assert_array_equal(out["y"], [2, 2])
    assert isinstance(out["x"], replicax.PerReplica) == (n > 1)  # one replica: bare values
    assert isinstance(out["y"], jax.Array)


def test_python_objects_come_back_as_themselves(pair) -> None:
    thing = object()
    out = pair.run(lambda flag, name: (flag, name, None, thing, [3, 2.5]), args=(True, "name"))
    assert out == (True, "name", None, thing, [3, 2.5])
    reference = weakref.ref(pair)
    assert pair.run(lambda r: r, args=(reference,)) is reference


def test_bools_and_strings_are_static_and_numbers_are_traced(pair) -> None:
    seen = []

    def step(x, flag):
        seen.append((isinstance(x, jax.core.Tracer), flag))
        return x + 1 if flag else x - 1

    assert [float(pair.run(step, args=(x, flag))) for x in (1, 2) for flag in (True, False)] == [2, 0, 3, 1]
    assert seen == [(True, True), (True, False)]


@pytest.mark.parametrize("value", [3, 2.5, 1 + 2j, np.float32(1), np.ones(2, np.float64), np.int64(7), np.bool_(True)])
def test_numbers_keep_jax_types(pair, value) -> None:
    got = pair.run(lambda x: x, args=(value,))
    assert got.dtype == jnp.asarray(value).dtype
    assert got.weak_type == jnp.asarray(value).weak_type
    np.testing.assert_array_equal(got, np.asarray(value).astype(got.dtype))


def test_arrays_may_lie_anywhere(pair) -> None:
    elsewhere = jax.device_put(jnp.ones(3), jax.devices()[5])
    np.testing.assert_array_equal(pair.run(lambda x: x + 1, args=(elsewhere,)), [2, 2, 2])
    np.testing.assert_array_equal(pair.run(lambda: elsewhere + 1), [2, 2, 2])
    other = strategy_of(4)
    spread = other.run(lambda: jnp.ones(3) * 2)
    np.testing.assert_array_equal(pair.run(lambda x: x + 1, args=(spread,)), [3, 3, 3])


def test_jax_is_asked_once_about_arrays_that_lie_alike(monkeypatch) -> None:
    """For each of a model's arrays that would take longer than all else."""
    asked: list[int] = []
    monkeypatch.setattr(arguments, "_fits", lambda *args: asked.append(1) or _fits(*args))
    params = [jnp.ones(i) for i in range(1, 6)]
    found = strategy_of(1).run(lambda params: params, args=(params,))
    assert [f.tolist() for f in found] == [p.tolist() for p in params]
    assert len(asked) == 1


def test_a_reduce_of_every_step_is_known_as_soon_as_a_step_is(pair, monkeypatch) -> None:
    """To go through all that it captures takes a millisecond."""
    calls = [
        lambda: pair.reduce("sum", ids(pair)),
        lambda: pair.reduce("mean", rows, axis=0),
        lambda: pair.reduce("mean", rows, axis=[0]),
        lambda: pair.gather(rows, axis=0),
    ]
    rows = pair.distribute_values_from_function(lambda ctx: np.ones(2, np.float32))
    first = [np.asarray(call()) for call in calls]
    assert [value.tolist() for value in first] == [1.0, 1.0, 1.0, [1.0] * 4]
    made: list[Any] = []
    new_key = function_key._new_key
    monkeypatch.setattr(function_key, "_new_key", lambda fn: made.append(fn) or new_key(fn))
    for call, value in zip(calls, first, strict=True):
        np.testing.assert_array_equal(call(), value)
    assert made == []


def test_an_unhashable_object_is_an_argument_too(pair) -> None:
    class Config:
        __hash__ = None
        scale = 3.0

    config = Config()
    for _ in range(2):
        assert float(pair.run(lambda c, x: c.scale * x, args=(config, 2.0))) == 6.0


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_gradients_of_integers_are_arguments_too(pair, executor) -> None:
    options = replicax.RunOptions(executor)
    gradient = jax.grad(lambda p: p["x"] * p["n"].astype(float), allow_int=True)
    gradients = pair.run(gradient, args=({"x": 2.0, "n": jnp.int32(3)},), options=options)
    assert gradients["n"].dtype == strategy_of(1).reduce("mean", gradients)["n"].dtype == jax.dtypes.float0
    assert float(pair.run(lambda g: g["x"], args=(gradients,), options=options)) == 3.0


def test_a_set_made_anew_is_the_same_argument(pair) -> None:
    step = lambda names, x: x * len(names)  # noqa: E731
    assert [float(pair.run(step, args=(set("ab"), 2.0))) for _ in range(2)] == [4.0, 4.0]
    assert float(pair.run(step, args=(set("abc"), 2.0))) == 6.0
    assert pair.extended.trace_count(step) == 2


def test_variables_arrive_as_themselves(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    pair.run(lambda given: given["v"].assign_add(1.0), args=({"v": v},))
    assert float(v) == 2.0


def test_an_array_that_a_step_closes_over_is_not_baked_in(pair) -> None:
    table = jnp.arange(1000.0)
    program = pair.extended.trace(lambda i: table[i], args=(3,))
    assert len(program.program.constants) == 1
    assert "constant({" not in program.compiled_text()
    assert float(pair.run(lambda i: table[i], args=(3,))) == 3.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.run(3), "fn must be callable, got 3"),
        (lambda s: s.run(lambda x: x, args=5), r"for one: args=\(x,\)"),
        (
            lambda s: s.run(lambda x: x, (), [1]),
            "strategy.run.*: kwargs must be a dict from names to arguments, got .1.",
        ),
        (lambda s: s.run(lambda x, y: x, (1,), np.ones(2)), "kwargs must be a dict"),
        (lambda s: s.run(lambda **k: k, kwargs={1: 2}), "kwargs must be a dict"),
        (
            lambda s: s.run(lambda x: x, (np.zeros(2, "m8[s]"),)),
            r"args\[0\] is a NumPy array of dtype timedelta64\[s\]",
        ),
        (lambda s: s.run(lambda x: x, (np.zeros(2, "f4,i4"),)), r"args\[0\] is a NumPy array of dtype \[\('f0'"),
        (
            lambda s: s.run(lambda x: x, (np.zeros(2, "f4,i4"),), options=replicax.RunOptions("per_replica")),
            r"an argument is array\(.*, and not an array of numbers",
        ),
        (
            lambda s: s.run(lambda: 1, options={}),
            r"options must be RunOptions or None, got {}; .* tuple, args=\(x, y\)",
        ),
    ],
)
def test_calls_that_are_off(pair, call, message) -> None:
    with pytest.raises(TypeError, match=message):
        call(pair)


# --- the cache ------------------------------------------------------------------------------------------


def test_the_python_runs_once(strategy) -> None:
    with strategy.scope():
        v = replicax.Variable(0.0)
    calls = []

    def step(x):
        calls.append(x)
        v.assign_add(1.0)
        return x

    for _ in range(5):
        strategy.run(step, args=(ids(strategy),))
    assert len(calls) == strategy.extended.trace_count(step) == 1
    assert float(v) == 5.0


def test_lambdas_made_anew_share_a_program(pair) -> None:
    calls = []
    with pair.scope():
        v = replicax.Variable(0.0)
    for i in range(4):
        pair.run(lambda x: (calls.append(1), v.assign_add(x))[1], args=(float(i),))
    assert len(calls) == 1
    assert float(v) == 6.0


@pytest.mark.parametrize(
    "arguments",
    [
        [(1,), (1.0,)],
        [(1.0,), (jnp.float32(1),)],
        [(jnp.ones(2),), (jnp.ones(3),)],
        [(jnp.ones(2),), (jnp.ones(2, jnp.int32),)],
        [([1.0],), ((1.0,),)],
        [("a",), ("b",)],
        [(True,), (1,)],
        [(None,), (1,)],
    ],
)
def test_what_makes_another_program(pair, arguments) -> None:
    def step(x):
        return x

    for args in arguments * 2:
        pair.run(step, args=args)
    assert pair.extended.trace_count(step) == 2


def test_the_program_that_was_used_least_recently_is_forgotten_first(pair, monkeypatch) -> None:
    monkeypatch.setattr("replicax.execution.cache._CAPACITY", 2)
    step = lambda x: x * 2  # noqa: E731
    traces = []
    for size in (1, 2, 1, 3, 1, 2):
        pair.run(step, args=(np.ones(size, np.float32),))
        traces.append(pair.extended.trace_count(step))
    assert traces == [1, 2, 2, 3, 3, 4]


def test_the_tenth_retrace_says_what_changes() -> None:
    pair = strategy_of(2)

    def step(x):
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(10):
            pair.run(step, args=({"x": jnp.ones(n)},))
    told = r"step has been traced 11 times.*args\[0\]\['x'\].*; JAX's settings \(such as"
    with pytest.warns(replicax.errors.RetraceWarning, match=told) as record, jax.default_matmul_precision("highest"):
        pair.run(step, args=({"x": jnp.ones(10)},))
    assert "was float32[9] (mirrored), now float32[10] (mirrored)" in str(record[0].message)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run(step, args=({"x": jnp.ones(11)},))  # once is enough


def test_the_tenth_retrace_says_that_the_batch_is_padded_now() -> None:
    pair = strategy_of(2)

    def step(x):
        return x.sum()

    for rows in range(1, 11):
        pair.run(step, args=(next(iter(pair.distribute_dataset([np.ones(2 * rows)]))),))
    padded = iter(pair.distribute_dataset([np.ones(4), np.ones(3)], replicax.InputOptions(partial_batch="pad")))
    with pytest.warns(replicax.errors.RetraceWarning, match="whether the batch is padded: was False, now True"):
        pair.run(step, args=(next(padded),))


class Plus:
    def __init__(self, epoch):
        self.epoch = epoch

    def step(self, x):
        return x + self.epoch


@pytest.mark.parametrize(
    ("step_of", "change"),
    [
        (lambda epoch: lambda x: x + epoch, r"'epoch': was 9, now 10\. Pass"),
        (
            lambda epoch: (lambda y: lambda x: x + y)(jnp.float32(epoch)),
            r"'y': was an object that is gone, now Array\(10",
        ),
        (lambda epoch: Plus(epoch).step, "'self': was an object that is gone, now .*Plus object.* with epoch=10"),
    ],
)
def test_the_tenth_retrace_names_a_captured_value(step_of, change) -> None:
    pair = strategy_of(2)

    def eleven_epochs():
        for epoch in range(11):
            pair.run(step_of(epoch), args=(1.0,))

    with pytest.warns(replicax.errors.RetraceWarning, match=f"captured value {change}"):
        eleven_epochs()


def test_no_batch_is_kept_after_its_step(pair) -> None:
    def double(x):
        return 2 * x

    for _ in range(2):  # the first is traced
        batch = ids(pair)
        kept = [weakref.ref(array) for array in jax.tree.leaves(batch)]
        jax.block_until_ready(pair.run(double, args=(batch,)))
        del batch
        gc.collect()
        assert kept
        assert all(array() is None for array in kept)


@pytest.mark.usefixtures("young_heap")
def test_a_program_goes_with_the_variables_it_uses(pair) -> None:
    cache = pair.extended.programs
    before = len(cache._entries)

    def use():
        with pair.scope():
            v = replicax.Variable(1.0)
        step = lambda: v + 1  # noqa: E731
        assert [float(pair.run(step)) for _ in range(2)] == [2.0, 2.0]
        assert len(cache._entries) == before + 1
        return weakref.ref(pair.extended.trace(step).program)

    program = use()
    gc.collect()
    assert len(cache._entries) == before
    assert program() is None  # also as the one that was found last


def test_a_captured_container_may_change(pair) -> None:
    with pair.scope():
        layers = [replicax.Variable(1.0)]
    scales = {"x": [1.0]}

    def step(x):
        return x * scales["x"][0] + sum(v.value for v in layers)

    assert float(pair.run(step, args=(1.0,))) == 2.0
    scales["x"][0] = 2.0
    assert float(pair.run(step, args=(1.0,))) == 3.0
    with pair.scope():
        layers.append(replicax.Variable(10.0))
    assert float(pair.run(step, args=(1.0,))) == 13.0
    assert pair.extended.trace_count(step) == 3


def test_code_that_is_reloaded_is_another_step(pair) -> None:
    def step(x, by=1.0):
        return x + by

    assert float(pair.run(step, args=(1.0,))) == 2.0
    step.__defaults__ = (5.0,)
    assert float(pair.run(step, args=(1.0,))) == 6.0
    step.__code__ = (lambda x, by=1.0: x * by).__code__
    assert float(pair.run(step, args=(2.0,))) == 10.0


mean = 0.0  # a global that has the name of a method


def test_an_attribute_is_no_global(pair) -> None:
    global mean

    def step(x):
        return x.mean()

    for mean in range(3):  # noqa: B007
        pair.run(step, args=(jnp.ones(2),))
    assert pair.extended.trace_count(step) == 1


def test_threads_take_turns(pair) -> None:
    with pair.scope():
        v = replicax.Variable(0.0)

    def step(x):
        v.assign_add(replicax.get_replica_context().all_reduce("sum", x))

    def work():
        for _ in range(50):
            pair.run(step, args=(1.0,))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(v) == 300.0


def test_threads_keep_programs_of_their_own(pair) -> None:
    with pair.scope():
        w = replicax.Variable(2.0)

    def body(carry, _):
        return carry * w, None

    results = []

    def work(length):
        results.append(float(pair.run(lambda: jax.lax.scan(body, jnp.float32(1), None, length=length)[0])))

    for length in (1, 2, 3):
        thread = threading.Thread(target=work, args=(length,))
        thread.start()
        thread.join()
    assert results == [2.0, 4.0, 8.0]


def test_another_strategys_value(pair) -> None:
    with pytest.raises(ValueError, match=r"args\[0\] is a PerReplica of another strategy, with 4 components"):
        pair.run(lambda x: x, args=(ids(strategy_of(4)),))


def test_a_per_replica_does_not_leave_its_step(pair) -> None:
    kept = []

    def step(x):
        replicax.get_replica_context().merge_call(lambda s, v: kept.append(v), args=(x,))
        return kept[0]

    with pytest.raises(ValueError, match="returned a PerReplica that it got in a merge_fn"):
        pair.run(step, args=(ids(pair),))


# --- failing leaves everything as it was ----------------------------------------------------------------


def test_an_error_while_tracing_changes_nothing(pair) -> None:
    with pair.scope():
        v = replicax.Variable([1.0, 2.0])
        w = replicax.Variable(0.0)

    def bad(x):
        v.assign_add(jnp.ones(2))
        w.assign(x)  # differs between replicas

    def wrong(x):
        v.assign_add(jnp.ones(2))
        assert x.shape == (3,), "of three"

    for step, error in [(bad, replicax.errors.LocalityError), (wrong, AssertionError)] * 2:
        with pytest.raises(error, match="differs between replicas|^of three"):
            pair.run(step, args=(ids(pair),))
        np.testing.assert_array_equal(v.numpy(), [1, 2])
    pair.run(lambda: v.assign_add(jnp.ones(2)))
    np.testing.assert_array_equal(v.numpy(), [2, 3])


def test_another_strategys_variable(pair) -> None:
    with strategy_of(4).scope():
        v = replicax.Variable(1.0, name="theirs")
    ours = replicax.Variable(1.0, name="nobodys")
    for variable, owner in ((v, "MirroredStrategy"), (ours, "DefaultStrategy")):
        for use in (lambda x: x + 1, lambda x: x.assign(2.0)):
            with pytest.raises(
                replicax.errors.ContextError, match=f"'{variable.name}'.* belongs to {owner}.*inside this"
            ):
                pair.run(use, args=(variable,))
    assert float(v) == float(ours) == 1.0


def test_a_deadlock_is_found_before_anything_runs(pair) -> None:
    with pair.scope():
        v = replicax.Variable(0.0)

    def step(x):
        v.assign_add(1.0)
        all_reduce = replicax.get_replica_context().all_reduce
        return jax.lax.cond(x > 0, lambda: all_reduce("sum", x), lambda: x)

    with pytest.raises(replicax.errors.DeadlockError, match=r"all_reduce at .*test_run.py:\d+ .*inside a branch"):
        pair.run(step, args=(ids(pair),))
    assert float(v) == 0.0


@pytest.mark.usefixtures("young_heap")
def test_nothing_traced_is_left_over(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    with jax.checking_leaks():
        pair.run(lambda x: v.assign_add(x).value * 2, args=(1.0,))
        mean = replicax.compute_average_loss
        for partial, step in (("exact", mean), ("pad", mean), ("pad", accumulated(mean, 2))):
            options = replicax.InputOptions(partial_batch=partial)
            [batch] = pair.distribute_dataset([np.ones(3, np.float32)], options)
            assert float(pair.reduce("sum", pair.run(step, args=(batch,)))) == 1.0
    assert float(v) == 2.0


# --- devices --------------------------------------------------------------------------------------------


def test_donation_reuses_the_buffers_of_variables(pair) -> None:
    with pair.scope():
        v = replicax.Variable(jnp.zeros((64, 64)))
    program = pair.extended.trace(lambda: v.assign_add(jnp.ones((64, 64))))
    assert "input_output_alias" in program.compiled_text()


def test_the_layout_of_variables_does_not_drift(strategy) -> None:
    """JAX takes arrays of one sharding object sooner than those of equal ones."""
    with strategy.scope():
        v, other = replicax.Variable(jnp.ones((8, 8))), replicax.Variable(np.ones(3, np.float32))
    sharding = v.slot.array.sharding
    assert other.slot.array.sharding is sharding

    def step() -> None:
        v.assign(v @ v / 8)

    for _ in range(3):
        strategy.run(step)
        assert v.slot.array.sharding is sharding
    assert strategy.extended.trace(step).call._cache_size() == 1


def test_a_value_that_escaped_from_a_trace_is_no_argument() -> None:
    pair, escaped = strategy_of(2), []
    jax.jit(lambda x: escaped.append(x))(1.0)
    with pytest.raises(ValueError, match=r"args\[0\]\['x'\] is being traced: strategy.run compiles the step itself"):
        pair.run(lambda d: d["x"], args=({"x": escaped[0]},))
    pair.run(
        lambda x: replicax.get_replica_context().merge_call(lambda s, y: escaped.append(y), args=(x,)), args=(1.0,)
    )
    with pytest.raises(ValueError, match=r"args\[0\] belongs to a step that is still being traced"):
        pair.run(lambda x: x, args=(escaped[1],))
    with pytest.raises(TypeError, match="are not known while a step is traced: use strategy.local_results"):
        escaped[1].values  # noqa: B018


def test_what_comes_from_outside_can_not_be_combined_inside() -> None:
    pair = strategy_of(2)
    outside = pair.distribute_values_from_function(lambda ctx: 1.0)

    def step():
        return replicax.get_replica_context().merge_call(lambda s: s.reduce("sum", outside))

    for options in (None, replicax.RunOptions(executor="per_replica")):
        with pytest.raises(
            ValueError, match="inside a step only its own values can be combined; pass a PerReplica from"
        ):
            pair.run(step, options=options)


# --- calls of a step that has run before ----------------------------------------------------------------


def test_a_step_that_has_run_before_is_refused_where_a_new_one_is(pair) -> None:
    other = strategy_of(2)

    def step(x=1.0):
        return x * 2

    def again():
        return pair.run(step, args=(1.0,))

    assert float(again()) == 2
    with other.scope(), pytest.raises(replicax.errors.ContextError, match="mixing different Strategy objects"):
        again()
    with pytest.raises(replicax.errors.ContextError, match="A step can't run another"):
        pair.run(lambda: again())
    for call in (jax.jit(again), lambda: jax.grad(lambda x: pair.run(step, args=(x,)))(1.0)):
        with pytest.raises(replicax.errors.ContextError, match="call it outside jax.jit"):
            call()
    with pytest.raises(TypeError, match="args"):
        pair.run(step, args=1.0)
    with pytest.raises(TypeError, match="options must be RunOptions"):
        pair.run(step, args=(1.0,), options=3)
    with pair.scope():
        assert float(again()) == 2
    assert float(pair.run(step, args=[1.0])) == float(pair.run(step, kwargs={"x": 1.0})) == 2


def test_a_step_that_has_run_before_heeds_what_has_changed(pair) -> None:
    ran = []

    def step(x):
        ran.append(None)
        return x * 2

    def again():
        return float(pair.run(step, args=(1.0,)))

    assert (again(), again(), len(ran)) == (2, 2, 1)
    with replicax.debug():
        assert (again(), len(ran)) == (2, 3)  # for each replica
    with jax.default_matmul_precision("highest"):
        assert (again(), len(ran)) == (2, 4)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()), ("i",))):
        assert again() == 2
    traces = len(ran)
    replicax.set_strategy(pair)
    try:
        assert (again(), len(ran)) == (2, traces)
    finally:
        replicax.set_strategy(None)
    step.__defaults__ = (3.0,)
    assert (again(), len(ran)) == (2, traces + 1)


@pytest.mark.parametrize("split", [False, True])
def test_arrays_of_nothing_are_arrays_like_others(split: bool) -> None:
    """Compilers of JAX 0.11 end the process where a program for several devices is given one."""
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"]) if split else strategy_of(2)
    with strategy.scope():
        empty = replicax.Variable(jnp.zeros((0, 3)), name="empty")
        w = replicax.Variable(jnp.ones(3), name="w")
        keys = replicax.Variable(jax.random.split(jax.random.key(0), 2)[:0], name="keys")

    def step(x: Any) -> Any:
        empty.assign(empty.value + 1)
        total, more = replicax.get_replica_context().all_reduce("sum", [empty.value.sum(0) + x.sum() + 1, x])
        w.assign_add(w.value * 2 + total)
        return empty.value, x, more, keys.value

    for _ in range(3):
        results = strategy.run(step, args=(jnp.zeros((4, 0)),))
    assert [r.shape for r in results] == [(0, 3), (4, 0), (4, 0), (0,)]
    assert w.numpy().tolist() == [((1 * 3 + 2) * 3 + 2) * 3 + 2] * 3
    assert empty.numpy().shape == (0, 3)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_that_nothing_can_run_in_it(pair) -> None:
    pair.run(lambda x: x + 1, args=(1.0,))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pair.run(lambda x: x + 1, args=(1.0,))
        except replicax.errors.ContextError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        message = file.read()
    os.waitpid(child, 0)
    assert message.startswith("strategy.run was called in a process that was forked after JAX had made its devices.")
    assert "multiprocessing.get_context('spawn')" in message


def test_a_function_that_captures_what_a_step_computes_does_not_leave_it(pair) -> None:
    def step(x):
        y = x * 2

        def inner():
            return y

        return {"f": lambda: inner()}

    for returned in (step, lambda x: functools.partial(step, x + 1)):
        with pytest.raises(TypeError, match=r"returned the function .*, which captures '(y|args\[0\])', a value that"):
            pair.run(returned, args=(1.0,))
    assert pair.run(lambda x: functools.partial(abs, -1), args=(1.0,))() == 1

    def countdown(n):  # captures itself
        return countdown(n - 1) if n else "done"

    assert pair.run(lambda x: countdown, args=(1.0,))(3) == "done"


def test_numpy_arrays_that_a_step_returns_belong_to_the_caller(pair) -> None:
    captured = np.ones(2)
    for _ in range(2):
        made, same = pair.run(lambda: (np.zeros(2), captured))
        assert (made.tolist(), same.tolist()) == ([0.0, 0.0], [1.0, 1.0])
        made += 7
        same += 7


def _edited_cell(rate: float):
    exec(f"def step(x): return x * {rate}", _notebook)
    return _notebook["step"]


_notebook: dict[str, Any] = {}


@pytest.mark.filterwarnings("ignore::replicax.errors.RetraceWarning")
@pytest.mark.parametrize("make", [lambda rate: lambda x: x * rate, _edited_cell], ids=["captured", "a cell's"])
def test_programs_that_differ_in_a_number_do_not_pile_up(pair, make) -> None:
    found = [float(pair.run(make(float(rate)), args=(1.0,))) for rate in range(20)]
    assert found == list(range(20))
    assert len(pair.extended.programs._entries) == 16
    count = pair.extended.trace_count(make(19.0))
    assert float(pair.run(make(19.0), args=(1.0,))) == 19.0  # the latest are kept
    assert pair.extended.trace_count(make(19.0)) == count


def test_programs_for_other_shapes_are_all_kept(pair, monkeypatch) -> None:
    monkeypatch.setattr("replicax.execution.cache._CAPTURES", 2)
    step = lambda x: x * 2  # noqa: E731
    for size in (1, 2, 3, 4, 1, 2, 3, 4):
        pair.run(step, args=(np.ones(size, np.float32),))
    assert pair.extended.trace_count(step) == 4


def test_steps_that_fail_do_not_pile_up(pair) -> None:
    def make(rate: float, options: replicax.RunOptions) -> None:
        def step(x: jax.Array) -> jax.Array:
            raise KeyError(rate)

        with pytest.raises(KeyError):
            pair.run(step, args=(1.0,), options=options)

    for rate in range(3):
        make(float(rate), replicax.RunOptions())
        make(float(rate), replicax.RunOptions(executor="per_replica"))
    assert not pair.extended.programs._created


def test_a_step_that_fails_keeps_the_variables_that_it_has_created(pair) -> None:
    def step(x: jax.Array, fails: bool) -> jax.Array:
        variable = replicax.Variable(2.0)
        if fails:
            raise KeyError("later")
        return variable * x

    for options in (replicax.RunOptions(), replicax.RunOptions(executor="per_replica")):
        with pytest.raises(KeyError):
            pair.run(step, args=(1.0, True), options=options)
        assert float(pair.run(step, args=(3.0, False), options=options)) == 6.0
    [created] = {id(created): created for created in pair.extended.programs._created.values()}.values()
    assert len(created) == 1


def test_a_step_is_traced_though_jax_is_to_fold_constants_eagerly(strategy) -> None:
    with strategy.scope():
        w = replicax.Variable(2.0)

    def step(x):
        context = replicax.get_replica_context()
        return x * w.value + context.all_reduce("sum", jnp.where(context.replica_id_in_sync_group > 0, 1.0, 2.0))

    expected = strategy.run(step, args=(1.0,))
    jax.config.update("eager_constant_folding", True)
    try:
        for _ in range(2):
            assert float(strategy.run(lambda x: step(x), args=(1.0,))) == float(expected)
    finally:
        jax.config.update("eager_constant_folding", False)
