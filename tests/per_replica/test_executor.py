"""The per-replica executor by itself, and beside the compiled one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.per_replica import executor
from replicax.per_replica.rendezvous import Rendezvous
from tests.conftest import leaving_no_arrays, logical_strategy, strategy_of

PER_REPLICA = replicax.RunOptions(executor="per_replica")


def context() -> replicax.ReplicaContext:
    replica = replicax.get_replica_context()
    assert replica is not None
    return replica


def data(strategy: replicax.Strategy):
    return strategy.distribute_values_from_function(
        lambda ctx: np.arange(1, 4, dtype=np.float32) + ctx.replica_id_in_sync_group
    )


def plain(strategy, tree):
    """A result as NumPy: a list of components for what differs, an array for what does not."""

    def one(leaf):
        if isinstance(leaf, replicax.PerReplica):
            return [np.asarray(v) for v in strategy.local_results(leaf)]
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, replicax.PerReplica))


def both(strategy, step, *args):
    """The step's result or error, by the compiled program and by the per-replica executor."""
    outcomes = []
    for options in (None, PER_REPLICA):
        try:
            outcomes.append(plain(strategy, strategy.run(step, args=args, options=options)))
        except Exception as error:
            outcomes.append(error)
    return outcomes


@jax.custom_jvp
def _times(x, n):
    return x * n


@_times.defjvp
def _of_times(primals, tangents):
    return _times(*primals), tangents[0] * primals[1]


@jax.custom_batching.custom_vmap
def _sum_of_rows(x):
    return jax.lax.while_loop(
        lambda y: y.max() < 9, lambda y: y + context().all_reduce("sum", jnp.abs(x).sum()), jnp.zeros(1)
    )


@_sum_of_rows.def_vmap
def _of_batches(size, batched, x):
    return context().all_reduce("sum", x.sum(1)), batched[0]


def counting():
    return jnp.float32(0), jnp.zeros(2), jax.random.key(0)


OUTSIDE = jnp.arange(3.0)
STEPS = {
    "an array from outside": lambda x: (OUTSIDE, OUTSIDE * x),
    "results of all kinds": lambda x: (x * 2, context().all_reduce("sum", x), 3, "a", None, [x.sum()]),
    "replica id": lambda x: (context().replica_id_in_sync_group, context().num_replicas_in_sync),
    "constants are mirrored": lambda x: (jnp.ones(2), jnp.arange(3) * 2),
    "gather": lambda x: context().all_gather({"x": x}, 0),
    "mean of integers": lambda x: context().all_reduce("mean", x.astype(jnp.int32)),
    "derivatives through barriers": lambda x: jax.grad(
        lambda v, a: sum(jnp.sum(y) for y in jax.lax.optimization_barrier((v * v, a * a))), (0, 1)
    )(x, jnp.arange(3.0)),
    "booleans": lambda x: context().all_reduce("sum", x > 2),
    "gradient of sum": lambda x: jax.grad(lambda y: jnp.sum(context().all_reduce("sum", y * y)) * x[0])(x),
    "gradient of mean": lambda x: jax.grad(lambda y: jnp.sum(context().all_reduce("mean", y * y)) * x[0])(x),
    "gradient of gather": lambda x: jax.grad(lambda y: jnp.sum(jnp.cumsum(context().all_gather(y * y, 0))) * x[0])(x),
    "second derivative": lambda x: jax.grad(lambda y: jax.grad(lambda z: context().all_reduce("sum", z**3))(y))(x[0]),
    "forward derivative": lambda x: jax.jvp(lambda y: context().all_reduce("sum", y * y), (x,), (x,)),
    "collective in a scan": lambda x: jax.lax.scan(
        lambda c, _: (c + context().all_reduce("sum", x[0]), c), jnp.float32(0), None, length=3
    ),
    "gradient of a collective in a scan": lambda x: jax.grad(
        lambda y: jax.lax.scan(lambda c, _: (c * y + context().all_reduce("sum", y), None), y, None, length=3)[0]
    )(x[0]),
    "while with other trips": lambda x: jax.lax.while_loop(lambda c: c < x[2], lambda c: c + 1, jnp.float32(0)),
    "while with other trips in each row": lambda x: jax.vmap(
        lambda v: jax.lax.while_loop(
            lambda c: c[0] < v, lambda c: (c[0] + 1, c[1].at[0].add(c[0]), jax.random.split(c[2])[0]), counting()
        )[:2]
    )(x),
    "collective in a checkpoint": lambda x: jax.grad(
        lambda y: jax.checkpoint(lambda z: jnp.sum(jnp.sin(context().all_reduce("sum", z))))(y)
    )(x),
    "batched collective": lambda x: jax.vmap(lambda y: context().all_reduce("sum", y) * y)(x),
    "batched gather": lambda x: jax.vmap(lambda y: context().all_gather(y[None], 0))(x),
    "jit": lambda x: jax.jit(lambda y: context().all_reduce("sum", y) + y)(x),
    "merge_call": lambda x: context().merge_call(
        lambda s, v, k: (s.reduce("mean", v), s.reduce("mean", v, axis=0), s.gather(v, 0), s.local_results(v), v, k),
        args=(x, "k"),
    ),
    "gradient of merge_call": lambda x: jax.grad(
        lambda y: jnp.sum(context().merge_call(lambda s, v: s.reduce("sum", v), args=(y * y,)))
    )(x),
    "gradient of local results": lambda x: jax.grad(
        lambda y: context().merge_call(lambda s, v: jnp.sum(v * s.local_results(v)[0] ** 2), args=(y * x,))
    )(x),
    "random numbers": lambda x: (
        jax.random.normal(jax.random.key(0), (2,)),
        jax.random.normal(jax.random.fold_in(jax.random.key(0), context().replica_id_in_sync_group), (2,)),
    ),
    "average loss": lambda x: replicax.compute_average_loss(x),
    "a gradient of integers": lambda x: jax.tree.map(
        lambda g: g if g.size and g.dtype == x.dtype else g.shape,
        jax.grad(lambda x, n, k: jnp.sum(x * n * k), argnums=(0, 1, 2), allow_int=True)(
            x, context().num_replicas_in_sync, jnp.arange(3)
        ),
    ),
    "tangents of integers": lambda x: (
        jax.jvp(_times, (x, context().all_reduce("sum", jnp.int32(2))), (x, np.zeros((), jax.dtypes.float0))),
        jax.vjp(_times, x, jnp.int32(3))[1](x)[0],
        jax.grad(lambda x, n: jnp.sum(_times(x, n)), allow_int=True)(x, jnp.int32(3)),
    ),
    "a collective in a custom_vmap": lambda x: (_sum_of_rows(x[:, None]), jax.vmap(_sum_of_rows)(x[:, None])),
    "a linear solve over replicas": lambda x: jax.scipy.sparse.linalg.cg(
        lambda v: context().all_reduce("mean", jnp.square(x) * v) + v, jnp.ones(3), maxiter=4
    )[0],
    "linear solves in a loop": lambda x: jax.lax.scan(
        lambda b, _: (jax.scipy.sparse.linalg.gmres(lambda v: jnp.square(x) * v + v, b, maxiter=2)[0], None),
        jnp.ones(3),
        length=2,
    )[0],
    "a gradient through a linear solve": lambda x: jax.grad(
        lambda y: jnp.sum(
            jax.scipy.sparse.linalg.bicgstab(
                lambda v: context().all_reduce("sum", jnp.square(x)) * v + v, y, maxiter=4
            )[0]
        )
    )(jnp.ones(3)),
    "impure callback": lambda x: jax.experimental.io_callback(
        lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32)
    ),
    "a loss that is mirrored": lambda x: replicax.value_and_grad(
        lambda: context().all_reduce("mean", jnp.sum(x)), []
    )(),
    "a structure that jax refuses": lambda x: jnp.ones(2) @ jnp.ones(3),
    "python raises": lambda x: {}["missing"],
}


REFUSED = {
    "a loss that is mirrored": replicax.errors.LocalityError,
    "a structure that jax refuses": TypeError,
    "gradient of local results": TypeError,
    "python raises": KeyError,
}


@pytest.mark.parametrize(
    ("names", "replicas"),
    [
        # In one step, so that there is one program to compile.
        pytest.param(sorted(STEPS.keys() - REFUSED - {"linear solves in a loop"}), 2, id="nearly all"),
        *(
            pytest.param([name], n, id=name, marks=pytest.mark.soak)
            for name in sorted(STEPS.keys() - REFUSED)
            for n in (1, 2, 3)
        ),
    ],
)
def test_both_executors_agree(names: Iterable[str], replicas: int, promotion_of_dtypes) -> None:
    strategy = strategy_of(replicas)
    every_compiled, every_exact = both(strategy, lambda x: {name: STEPS[name](x) for name in names}, data(strategy))
    for outcome in (every_compiled, every_exact):
        if isinstance(outcome, Exception):
            raise outcome
    for name in names:
        compiled, exact = every_compiled[name], every_exact[name]
        assert jax.tree.structure(compiled) == jax.tree.structure(exact), (name, compiled, exact)
        for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(exact), strict=True):
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype, name
                np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6, err_msg=name)
            else:
                assert a == b, name


@pytest.mark.parametrize("name", REFUSED)
def test_both_executors_refuse(pair, name: str) -> None:
    assert [type(outcome) for outcome in both(pair, STEPS[name], data(pair))] == [REFUSED[name]] * 2


KINDS = [(s, a) for s in ("on_write", "on_read") for a in ("none", "sum", "mean", "only_first_replica")]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("synchronization", "aggregation"), KINDS, ids=["-".join(k) for k in KINDS])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("mirrored", [True, False])
def test_variables_agree(pair, synchronization, aggregation, method, mirrored) -> None:
    def step(v, x):
        change = jnp.float32(4) if mirrored else x[0]
        getattr(v, method)(change)
        return v * 2, context().merge_call(lambda s: s.local_results(v))

    outcomes = []
    for options in (None, PER_REPLICA):
        with pair.scope():
            v = replicax.Variable(10.0, synchronization=synchronization, aggregation=aggregation)
        try:
            result = plain(pair, pair.run(step, args=(v, data(pair)), options=options))
        except replicax.errors.LocalityError as error:
            result = str(error).split("was assigned")[1].split("\n")[0]
        outcomes.append((result, [float(c) for c in pair.local_results(v)]))
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_training_agrees(pair) -> None:
    def make():
        with pair.scope():
            w = replicax.Variable([1.0, 2.0, 3.0])
            stat = replicax.Variable(0.0, aggregation="mean")
            optimizer = replicax.Optimizer(optax.adam(0.1))

        def step(x):
            def loss():
                stat.assign(jnp.mean(x))
                return replicax.compute_average_loss((x * w) ** 2)

            value, grads = replicax.value_and_grad(loss, [w])()
            optimizer.apply_gradients(zip(grads, [w], strict=True))
            return value

        return step, w, stat, optimizer

    (step, *state), (exact_step, *exact_state) = make(), make()
    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic
        for _ in range(3):
            a = pair.run(step, args=(data(pair),))
            with replicax.debug():
                b = pair.run(exact_step, args=(data(pair),))
            np.testing.assert_allclose(pair.reduce("sum", a), pair.reduce("sum", b), rtol=1e-5)
    for mine, theirs in zip(
        [*state[:2], *state[2].variables], [*exact_state[:2], *exact_state[2].variables], strict=True
    ):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5)
        assert mine.slot.array.sharding == theirs.slot.array.sharding


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        np.float32("nan"),
        np.arange(3),
        np.array([1.0, np.nan]),
        np.array(["a", "b"]),
        np.array([None, "a"], dtype=object),
        np.zeros((0, 2)),
    ],
    ids=repr,
)
def test_equal_objects_and_numpy_arrays_come_back_as_one(pair, value) -> None:
    def step():
        return pickle.loads(pickle.dumps(value))

    compiled = pair.run(step)
    with replicax.debug():
        found = pair.run(step)
    assert type(found) is type(compiled) is type(value)
    np.testing.assert_array_equal(found, compiled)


def test_numpy_arrays_that_differ_come_back_for_each_replica(pair) -> None:
    for values in ([np.arange(3), np.arange(2)], [np.arange(2), np.arange(2.0)], [np.ones(1), np.full(1, np.nan)]):
        with replicax.debug():
            found = pair.run(lambda values=values: values[int(context().replica_id_in_sync_group)])
        assert isinstance(found, replicax.PerReplica)


def test_without_jit_steps_are_plain_python(pair) -> None:
    seen = []

    def step(x):
        seen.append(float(x[0]))
        return context().all_reduce("sum", x)

    def steps(ctx, x):
        ctx.set_last_step_output("last", step(x), reduce_op="only_first_replica")

    split = logical_strategy(2, 2)
    with jax.disable_jit():
        np.testing.assert_array_equal(pair.run(step, args=(data(pair),)), [3, 5, 7])
        elements = iter(pair.distribute_dataset([np.arange(2.0), np.arange(2.0, 4.0)]))
        done = pair.run_steps(steps, elements, 2)
        # These are compiled under all settings.
        assert split.reduce("sum", data(split), axis=0) == 6 + 9
        plan = replicax.plan(split, lambda x: x.sum(), jax.ShapeDtypeStruct((4,), np.float32))
        assert split.run(lambda x: x[0], args=(data(split),), options=replicax.RunOptions("compiled")) is not None
        with split.scope():
            v = replicax.Variable(lambda: jnp.arange(4.0), partition_dimensions=[2])
        shared = replicax.MirroredStrategy(["cpu:0"], num_replicas=2, reproducible=True)
        assert shared.reduce("sum", data(shared), axis=0) == 6 + 9
    assert [piece.data.shape for piece in v.stored().addressable_shards] == [(2,)] * 4
    assert plan.replicas == 2
    assert seen == [1, 2, 0, 1, 2, 3]
    assert done.last_step_outputs["last"].tolist() == [5]


def test_what_is_computed_from_python_numbers_stays_of_a_weak_type(pair) -> None:
    for options in (None, PER_REPLICA):
        twice = pair.run(lambda x: x * 2, args=(1.5,), options=options)
        assert twice.weak_type
        assert (
            pair.run(lambda x, y: x * y, args=(np.ones(2, jnp.bfloat16), twice), options=options).dtype == jnp.bfloat16
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_arrays_are_freed_without_the_garbage_collector(pair, options, fails: bool) -> None:
    with pair.scope():
        w = replicax.Variable([1.0, 2.0, 3.0])
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        value, grads = replicax.value_and_grad(lambda: replicax.compute_average_loss((x * w) ** 2), [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        if fails:
            raise ArithmeticError
        return value

    def run():
        with contextlib.suppress(ArithmeticError):
            pair.run(step, args=(data(pair),), options=options)

    run()
    with leaving_no_arrays():
        run()


def test_what_is_reduced_is_not_reduced_again(pair) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(1.0))
    with replicax.debug():
        with pytest.raises(replicax.errors.LocalityError, match="already the same on every replica"):
            pair.run(lambda x: optimizer.apply_gradients([(context().all_reduce("sum", x[0]), w)]), args=(data(pair),))
        with pytest.raises(replicax.errors.LocalityError, match="differs between replicas, and aggregate=False"):
            pair.run(lambda x: optimizer.apply_gradients([(x[0], w)], aggregate=False), args=(data(pair),))
    assert float(w) == 1.0


# --- what only it can do --------------------------------------------------------------------------------


def test_python_sees_values(pair, capsys) -> None:
    def step(x):
        if context().replica_id_in_sync_group == 0:
            print("first:", x)
        jax.lax.fori_loop(0, 2, lambda i, c: (print("turn", i), c)[1], 0)
        return float(x[0])

    with replicax.debug():
        result = pair.run(step, args=(data(pair),))
    assert result.values == (1.0, 2.0)
    assert capsys.readouterr().out == "first: [1. 2. 3.]\n" + "turn 0\nturn 1\n" * 2


def test_each_replica_runs_on_its_device_and_one_at_a_time(pair) -> None:
    running, seen = [], []

    def step(x):
        assert not running
        running.append(1)
        seen.append((threading.current_thread().name, (x + jnp.ones(3)).devices()))
        running.pop()
        context().all_reduce("sum", x)
        assert not running

    pair.run(step, args=(data(pair),), options=PER_REPLICA)
    assert seen == [("replica 0", {jax.devices()[0]}), ("replica 1", {jax.devices()[1]})]


def test_replicas_may_have_different_shapes(pair) -> None:
    pieces = pair.distribute_values_from_function(lambda ctx: np.ones(1 + ctx.replica_id_in_sync_group, np.float32))

    def step(x):
        return x * 2, context().all_gather(x, 0), replicax.compute_average_loss(x), context().all_reduce("sum", x.sum())

    doubled, whole, share, total = pair.run(step, args=(pieces,), options=PER_REPLICA)
    assert [v.tolist() for v in pair.local_results(doubled)] == [[2.0], [2.0, 2.0]]
    assert whole.tolist() == [1.0, 1.0, 1.0]
    assert float(pair.reduce("sum", share)) == pytest.approx(1.0)
    assert float(total) == 3.0


def test_arrays_that_are_reduced_together_meet_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives: list[str] = []

    def exchange(self, number, collective, *args):
        collectives.append(collective)
        return Rendezvous.exchange(self, number, collective, *args)

    monkeypatch.setattr(executor, "Rendezvous", type("Counting", (Rendezvous,), {"exchange": exchange}))

    def step(x):
        def reduced(x, y):
            total, mean, _ = context().all_reduce("sum", (x, x * y, jnp.arange(2)))
            return jnp.sum(total * x), mean

        return jax.grad(reduced, has_aux=True)(x, 2.0), context().all_reduce("mean", [x, x[0], jnp.ones(4) * x[0]])

    compiled, exact = both(pair, step, data(pair))
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)
    # Both replicas each time; integers have no gradient.
    assert collectives == [f"all_reduce of {n} arrays" for n in (3, 3, 2, 2, 3, 3)]


# --- replicas that go astray ----------------------------------------------------------------------------


def is_first() -> bool:
    return int(context().replica_id_in_sync_group) == 0


ASTRAY = {
    "one has returned": (
        lambda x: None if is_first() else context().all_reduce("sum", x),
        "replica 0 has returned; replica 1 is in all_reduce of 1 arrays at .*test_executor.py",
    ),
    "other collectives": (
        lambda x: context().all_gather(x, 0) if is_first() else context().all_reduce("sum", x),
        "replica 0 is in all_gather at .*; replica 1 is in all_reduce of 1 arrays at",
    ),
    "other numbers of arrays": (
        lambda x: context().all_reduce("sum", [x] * (1 if is_first() else 2)),
        "replica 0 is in all_reduce of 1 arrays at .*; replica 1 is in all_reduce of 2 arrays",
    ),
    "unequal merge_calls": (
        lambda x: [context().merge_call(lambda s: None) for _ in range(1 if is_first() else 2)],
        "replica 0 has returned; replica 1 is in merge_call at",
    ),
    "a branch": (
        lambda x: jax.lax.cond(x[0] > 1, lambda: context().all_reduce("sum", x), lambda: x),
        "replica 0 has returned; replica 1 is in all_reduce",
    ),
}


@pytest.mark.parametrize("name", ASTRAY)
def test_replicas_that_call_different_collectives(pair, name) -> None:
    step, message = ASTRAY[name]
    before = threading.active_count()
    with pytest.raises(replicax.errors.DeadlockError, match=f"not all replicas reach the same collective: {message}"):
        pair.run(step, args=(data(pair),), options=PER_REPLICA)
    assert threading.active_count() == before
    total = pair.run(lambda x: context().all_reduce("sum", x), args=(data(pair),), options=PER_REPLICA)
    assert total.tolist() == [3.0, 5.0, 7.0]


def test_an_exception_in_one_replica(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)

    def step(x):
        v.assign_add(1.0)
        context().all_reduce("sum", x)
        if not is_first():
            raise KeyError("mine")
        return context().all_reduce("sum", x)

    with pytest.raises(KeyError, match="mine") as caught:
        pair.run(step, args=(data(pair),), options=PER_REPLICA)
    assert caught.value.__notes__ == ["(raised by replica 1 of 2)"]
    assert float(v) == 1.0


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda x: context().all_reduce("sum", x), ValueError, r"one shape and dtype, got float32\[1\], float32\[2\]"),
        (lambda x: context().all_gather(jnp.ones((len(x), len(x))), 0), ValueError, r"may differ in dim 0 only"),
        (
            lambda x: context().all_gather(x.astype([jnp.float32, jnp.int32][len(x) - 1]), 0),
            ValueError,
            "all_gather: the replicas' arrays must have one dtype, got float32, int32",
        ),
        (lambda x: [1] * len(x), ValueError, "replicas must return the same structure: replica 0"),
        (lambda x: jax.lax.psum(x, "replica"), NameError, "In compiled steps the axis of the replicas is called"),
        (
            lambda x: jax.lax.ppermute(x, "replica", [(0, 1)]),
            NotImplementedError,
            "uses an axis, and nothing maps over",
        ),
        (lambda x: jax.lax.pcast(x, "replica", to="varying"), ValueError, "In compiled steps the axis of the replicas"),
    ],
)
def test_what_does_not_fit(pair, step, error, message) -> None:
    pieces = pair.distribute_values_from_function(lambda ctx: np.ones(1 + ctx.replica_id_in_sync_group, np.float32))
    with pytest.raises(error, match=message):
        pair.run(step, args=(pieces,), options=PER_REPLICA)


def test_what_differs_without_saying_so(pair) -> None:
    """A value that Python made different, where no operation could be followed."""
    with pair.scope():
        v = replicax.Variable(1.0, name="v")
    with pytest.raises(replicax.errors.LocalityError, match="'v'.*differs between replicas"):
        pair.run(lambda: v.assign(2.0 if is_first() else 3.0), options=PER_REPLICA)
    assert float(v) == 1.0
    result = pair.run(lambda: jnp.float32(2.0 if is_first() else 3.0), options=PER_REPLICA)
    assert [float(x) for x in pair.local_results(result)] == [2.0, 3.0]


# --- choosing it ----------------------------------------------------------------------------------------


def test_options(pair) -> None:
    def step(x):
        return isinstance(x, jax.core.Tracer)

    assert pair.run(step, args=(1.0,))
    with replicax.debug():
        assert not pair.run(step, args=(1.0,))
        assert pair.run(step, args=(1.0,), options=replicax.RunOptions())
    assert pair.run(step, args=(1.0,))
    with pytest.raises(ValueError, match="must be 'compiled' or 'per_replica', got 'fast'"):
        replicax.RunOptions(executor="fast")


def test_settings_of_the_thread_are_taken_along(pair) -> None:
    with jax.numpy_dtype_promotion("standard"):
        assert float(pair.run(lambda: jnp.int32(1) + jnp.float32(1), options=PER_REPLICA)) == 2.0
    with pytest.raises(jax.dtypes.TypePromotionError, match="promotion"):
        pair.run(lambda: jnp.int32(1) + jnp.float32(1), options=PER_REPLICA)


def test_the_components_of_another_strategy_are_refused() -> None:
    theirs = strategy_of(4).distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    for options in (None, replicax.RunOptions(executor="per_replica")):
        with pytest.raises(ValueError, match=r"args\[0\] is a PerReplica of another strategy, with 4 components; this"):
            strategy_of(2).run(lambda x: x, args=(theirs,), options=options)


@pytest.mark.parametrize("differentiated", [False, True])
def test_loops_and_branches_with_collectives_inside_checkpoint(pair, differentiated: bool) -> None:
    def add_up(v):
        return replicax.get_replica_context().all_reduce("sum", v)

    @jax.checkpoint
    def body(x):
        y = jax.lax.cond(add_up(x) > 0, lambda: add_up(x) * x, lambda: x)
        z, kept = jax.lax.scan(lambda c, t: (c + jnp.sin(add_up(c * t)), c * t), y, jnp.arange(3.0), reverse=True)
        z = z + kept.sum() + jax.jit(add_up)(x)
        if differentiated:
            return z
        return jax.lax.while_loop(lambda v: add_up(v) < 1e3, lambda v: v * 2 + add_up(v), z)

    x = pair.distribute_values_from_function(lambda ctx: jnp.float32(1 + ctx.replica_id_in_sync_group))
    step = jax.grad(body) if differentiated else body
    compiled = pair.run(step, args=(x,))
    exact = pair.run(step, args=(x,), options=replicax.RunOptions(executor="per_replica"))
    if not isinstance(exact, replicax.PerReplica):  # it sees which branch was taken, and that its result is the same
        exact = replicax.values.regroup([exact, exact], always_wrap=True)
    for mine, theirs in zip(pair.local_results(compiled), pair.local_results(exact), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_a_mirrored_variable_that_only_one_replica_writes(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0, name="v")

    def step():
        if replicax.get_replica_context().replica_id_in_sync_group == 0:
            v.assign(5.0)

    with pytest.raises(
        replicax.errors.LocalityError, match="variable 'v' .* was assigned a value, but it differs between rep"
    ):
        pair.run(step, options=replicax.RunOptions(executor="per_replica"))
    assert float(v) == 1.0


def test_replicas_that_merge_other_structures(pair) -> None:
    def step():
        context = replicax.get_replica_context()
        mine = [jnp.ones(2)] * (1 + int(context.replica_id_in_sync_group))
        return context.merge_call(lambda s, x: x, args=(mine,))

    with pytest.raises(ValueError, match="merge_call: the replicas' arguments differ in structure"):
        pair.run(step, options=replicax.RunOptions(executor="per_replica"))


def test_steps_of_several_threads_with_one_variable_take_turns(pair) -> None:
    with pair.scope():
        total = replicax.Variable(0.0)

    def step(x):
        before = total.value
        time.sleep(0.001)
        total.assign(before + context().all_reduce("sum", x.sum()))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for run in [pool.submit(pair.run, step, args=(data(pair),), options=PER_REPLICA) for _ in range(8)]:
            run.result()
    assert float(total) == 8 * 15.0


def test_the_handler_of_a_signal_may_run_a_step(pair) -> None:
    found = []

    def handle(*_) -> None:
        if found:
            raise TimeoutError
        signal.setitimer(signal.ITIMER_REAL, 20.0)
        found.append("begun")
        found.append(pair.run(lambda: 1.0, options=PER_REPLICA))

    def step() -> None:
        if not found:
            signal.raise_signal(signal.SIGALRM)  # handled on the thread that runs the step

    before = signal.signal(signal.SIGALRM, handle)
    try:
        pair.run(step, options=PER_REPLICA)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert len(found) == 2


def test_a_loop_over_no_rows_says_what_to_do(pair) -> None:
    with pytest.raises(ValueError, match="zero-length scan") as failed:
        pair.run(lambda: jax.lax.map(jnp.sum, jnp.zeros((0, 3))), options=PER_REPLICA)
    assert "a loop of jax.lax over 0 rows" in "".join(failed.value.__notes__)
