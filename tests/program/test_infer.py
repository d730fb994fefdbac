"""The dataflow pass by itself, on programs small enough to know the answer."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters.mlir import register_lowering

import replicax
from replicax.execution.program.dataflow import Dataflow


def localities(strategy, fn, *mirrored) -> str:
    """The localities of the outputs of ``fn(x, *mirrored)``, where x differs between replicas."""
    x = strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    return "".join(v.value for v in strategy.extended.trace(fn, args=(x, *mirrored)).localities)


ONE, ZERO = jnp.float32(1), jnp.float32(0)

parallel = importlib.import_module("jax._src.lax.parallel")  # where those collectives are that are not yet public
novel_p = Primitive("novel")
novel_p.def_abstract_eval(lambda aval, **_: aval)
register_lowering(novel_p, lambda _ctx, x, **_: [x])

COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "replica"), "M"),
    "pmean": (lambda x: lax.pmean(x, "replica"), "M"),
    "pmax": (lambda x: lax.pmax(x, "replica"), "M"),
    "pmin": (lambda x: lax.pmin(x, "replica"), "M"),
    "all_gather": (lambda x: lax.all_gather(x, "replica"), "M"),
    "psum of a constant": (lambda x: lax.psum(2.0, "replica") * ONE, "M"),
    "psum in groups": (lambda x: lax.psum(x, "replica", axis_index_groups=[[0], [1]]), "T"),
    "ppermute": (lambda x: lax.ppermute(ONE, "replica", [(0, 1), (1, 0)]), "T"),
    "all_to_all": (lambda x: lax.all_to_all(jnp.arange(2.0), "replica", 0, 0), "T"),
    "psum_scatter": (lambda x: lax.psum_scatter(jnp.ones(2), "replica"), "T"),
    "axis_index": (lambda x: lax.axis_index("replica"), "T"),
    "pshuffle": (lambda x: lax.pshuffle(ONE, "replica", [1, 0]), "T"),
    "pswapaxes": (lambda x: lax.pswapaxes(jnp.ones(2), "replica", 0), "T"),
    "ragged_all_to_all": (
        lambda x: lax.ragged_all_to_all(jnp.ones(2), jnp.zeros(2), *[jnp.array([0, 1])] * 4, axis_name="replica"),
        "T",
    ),
    "all_gather in groups": (lambda x: lax.all_gather(x, "replica", axis_index_groups=[[0], [1]]), "T"),
    "a cast of types": (lambda x: lax.pcast(ONE, "replica", to="varying") * ONE, "M"),
    "psum of a vmapped axis and the replicas": (
        lambda x: jax.vmap(lambda y: lax.psum(y, ("rows", "replica")), axis_name="rows")(x[None]),
        "M",
    ),
    "psum of a vmapped axis of the same name": (
        lambda x: jax.vmap(lambda y: lax.psum(y, "replica"), axis_name="replica")(x[None]),
        "T",
    ),
    "all_gather_start": (lambda x: parallel.all_gather_start(x, "replica").done(), "M"),
    "psum_scatter_start": (lambda x: parallel.psum_scatter_start(jnp.ones(2), "replica", tiled=True).done(), "T"),
    "all_to_all_start": (lambda x: parallel.all_to_all_start(jnp.ones(2), "replica", 0, 0).done(), "T"),
    "ppermute_start": (lambda x: parallel.ppermute_start(ONE, "replica", [(0, 1), (1, 0)]).done(), "T"),
    "one that nobody has heard of": (lambda x: novel_p.bind(ONE, named_axes=(("replica",),)), "T"),
    "one that nobody has heard of, over others": (lambda x: novel_p.bind(ONE, named_axes=(("rows",),)), "M"),
    "psum of a vmapped axis": (lambda x: jax.vmap(lambda y: lax.psum(y, "rows"), axis_name="rows")(x[None]), "T"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(pair, name) -> None:
    fn, expected = COLLECTIVES[name]
    assert localities(pair, fn) == expected


def test_a_carry_becomes_per_replica_only_where_data_reaches_it(pair) -> None:
    def step(x):
        # b takes two turns to be reached: x -> a -> b; c never is.
        def turn(carry, _):
            a, b, c = carry
            return (a + x, b + a, c * 2), c

        (a, b, c), cs = lax.scan(turn, (ZERO, ZERO, ONE), None, length=3)
        return a, b, c, cs

    assert localities(pair, step) == "TTMM"


def test_a_collective_in_a_loop_makes_the_carry_mirrored_again(pair) -> None:
    def step(x):
        return lax.fori_loop(0, 3, lambda _, total: total + lax.psum(x, "replica"), ZERO)

    assert localities(pair, step) == "M"


def test_a_loop_whose_trips_differ_makes_everything_differ(pair) -> None:
    def step(x):
        return lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 2), (ZERO, ONE))

    assert localities(pair, step) == "TT"


def test_a_predicate_that_becomes_per_replica_in_the_loop(pair) -> None:
    def step(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1 + c[1], x, c[2] + 1), (ZERO, ZERO, ZERO))

    assert localities(pair, step) == "TTT"


def test_branches_join_with_their_predicate(pair) -> None:
    def step(x, m):
        same = lax.cond(m > 0, lambda: m, lambda: m + 1)
        one_differs = lax.cond(m > 0, lambda: m, lambda: x)
        choice_differs = lax.cond(x > 0, lambda: m, lambda: m + 1)
        return same, one_differs, choice_differs

    assert localities(pair, step, ONE) == "MTT"


def test_calls_are_looked_into(pair) -> None:
    @jax.custom_batching.custom_vmap
    def batched(a, b):
        return a, b + 1, lax.psum(a, "replica")

    batched.def_vmap(lambda size, batched, a, b: ((a, b, a), (True, True, True)))

    def step(x, m):
        pair_ = jax.jit(lambda a, b: (a + 1, b + 1))(x, m)
        kept = jax.checkpoint(lambda a, b: (jnp.sin(a), jnp.sin(b)))(x, m)
        return *pair_, *kept, *batched(x, m)

    assert localities(pair, step, ONE) == "TMTMTMM"


def test_custom_derivatives_are_looked_into(pair) -> None:
    @jax.custom_vjp
    def f(a, b):
        return a * 2, b * 2

    f.defvjp(lambda a, b: (f(a, b), None), lambda _, ct: ct)

    @jax.custom_jvp
    def g(a, b):
        return a * 2, b * 2

    g.defjvp(lambda primals, tangents: (g(*primals), g(*tangents)))
    assert localities(pair, lambda x, m: (*f(x, m), *g(x, m)), ONE) == "TMTM"


def test_host_callbacks(pair) -> None:
    def step(x, m):
        pure = jax.pure_callback(lambda v: v, ONE, m)
        pure_of_x = jax.pure_callback(lambda v: v, ONE, x)
        impure = jax.experimental.io_callback(lambda v: v, ONE, m)
        return pure, pure_of_x, impure

    assert localities(pair, step, ONE) == "MTT"


def test_what_is_written_into_a_mutable_array_stays_in_it(pair) -> None:
    def step(x, m):
        written, mirrored, in_scan, in_branch, in_other = (jax.new_ref(jnp.zeros(2)) for _ in range(5))
        written[0] = x
        mirrored[0] = m
        jax.lax.scan(lambda c, _: (in_scan.__setitem__(0, c), c)[::-1], x, None, length=2)
        lax.cond(x > 0, lambda: in_branch.__setitem__(0, 1.0), lambda: None)
        lax.cond(m > 0, lambda: None, lambda: in_other.__setitem__(0, x))
        return written[...], mirrored[...], in_scan[...], in_branch[...], in_other[...]

    assert localities(pair, step, ONE) == "TMTTT"


def test_a_mutable_array_is_written_by_one_function_in_a_branch_and_outside(pair) -> None:
    write = jax.jit(lambda ref, value: ref.__setitem__(..., value))

    def step(x, m):
        ref, other = jax.new_ref(ZERO), jax.new_ref(ZERO)

        def turn(i, _):
            write(other, m)
            lax.cond(x > 0, lambda: write(ref, m), lambda: None)

        lax.fori_loop(0, 2, turn, None)
        return ref[...], other[...]

    assert localities(pair, step, ONE) == "TM"


def test_a_mutable_array_carries_over_the_turns_of_a_loop(pair) -> None:
    def step(x):
        a, b = jax.new_ref(ZERO), jax.new_ref(ZERO)

        def turn(i, _):
            b[...] = a[...]  # in the second turn what the first has written
            a[...] = x

        lax.fori_loop(0, 2, turn, None)
        return b[...]

    assert localities(pair, step) == "T"


def test_what_is_no_function_of_its_operands(pair) -> None:
    assert localities(pair, lambda x: lax.rng_uniform(ZERO, ONE, (2,))) == "T"


def test_memory_that_is_overwritten_is_the_same_if_the_values_are(pair) -> None:
    def ranks(v):
        return lax.empty((2,), jnp.int32).at[jnp.argsort(v)].set(jnp.arange(2))

    assert localities(pair, lambda x, m: (ranks(x + jnp.ones(2)), ranks(m * jnp.ones(2))), ONE) == "TM"


def test_branches_that_keep_different_values_for_their_derivatives(pair) -> None:
    """What one branch keeps and another has not JAX fills in, with the same on every replica."""

    def step(x, m):
        branches = [lambda v: v * v, lambda v: jnp.sin(v) * jnp.exp(v), lambda v: v + 1.0]
        _, pull = jax.vjp(lambda v: lax.switch(jnp.int32(1), branches, v), m)
        cond = jax.vjp(lambda v: lax.cond(m > 0, branches[0], branches[1], v), m)[1]
        in_scan = jax.grad(lambda v: lax.scan(lambda c, _: (lax.cond(m > 1, *branches[:2], c), None), v, length=2)[0])
        mine = jax.vjp(lambda v: lax.cond(x > 0, branches[0], branches[1], v), m)[1]
        return pull(m), cond(m), in_scan(m), mine(m)

    assert localities(pair, step, ONE) == "MMMT"


# --- deadlocks ------------------------------------------------------------------------------------------


def psum(x):
    return lax.psum(x, "replica")


DEADLOCKS = {
    "body of a while": lambda x: lax.while_loop(lambda c: c < x, lambda c: c + psum(c), ONE),
    "test of a while": lambda x: lax.while_loop(lambda c: psum(c) < x, lambda c: c + 1, ZERO),
    "branch": lambda x: lax.cond(x > 0, lambda: psum(x), lambda: x),
    "switch": lambda x: lax.switch(x.astype(jnp.int32), [lambda: x, lambda: psum(x), lambda: x]),
    "scan in a branch": lambda x: lax.cond(
        x > 0, lambda: lax.scan(lambda c, _: (psum(c), None), x, None, length=2)[0], lambda: x
    ),
    "jit in a branch": lambda x: lax.cond(x > 0, lambda: jax.jit(psum)(x), lambda: x),
    "gather in a branch": lambda x: lax.cond(x > 0, lambda: lax.all_gather(x, "replica")[0], lambda: x),
    "gradient in a branch": lambda x: lax.cond(x > 0, lambda: jax.grad(lambda y: psum(y * y))(x), lambda: x),
    "branch on a mutable array": lambda x: (
        lambda r: (r.__setitem__(..., x), lax.cond(r[...] > 0, lambda: psum(x), lambda: x))[1]
    )(jax.new_ref(ZERO)),
    "one that nobody has heard of in a branch": lambda x: lax.cond(
        x > 0, lambda: novel_p.bind(x, axis_name="replica"), lambda: x
    ),
    "all_gather_start in a branch": lambda x: lax.cond(
        x > 0, lambda: parallel.all_gather_start(x, "replica").done()[0], lambda: x
    ),
    "while in a scan": lambda x: lax.scan(
        lambda c, _: (lax.while_loop(lambda d: d < c, lambda d: d + psum(d), ONE), None), x, None, length=2
    )[0],
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_collective_that_replicas_may_disagree_on(pair, name) -> None:
    with pytest.raises(replicax.errors.DeadlockError, match=r"test_infer.py:\d+.*differs between replicas"):
        localities(pair, DEADLOCKS[name])


ALLOWED = {
    "mirrored predicate": (lambda x: lax.cond(psum(x) > 0, lambda: psum(x), lambda: x), [1, 1]),
    "while with a mirrored test": (lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + psum(c), ONE), [3, 3]),
    "scan": (lambda x: lax.scan(lambda c, _: (psum(c), None), x, None, length=2)[0], [2, 2]),
    "no collective in the loop": (lambda x: psum(lax.while_loop(lambda c: c < x, lambda c: c + 1, ZERO)), [1, 1]),
    "replica id in a branch": (lambda x: lax.cond(x > 0, lambda: lax.axis_index("replica"), lambda: 0), [0, 1]),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_collectives_that_all_replicas_reach(pair, name) -> None:
    fn, expected = ALLOWED[name]
    x = pair.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    results = pair.local_results(pair.run(fn, args=(x,)))
    assert [int(result) for result in results] == expected


def test_all_replicas_reach_a_collective_in_a_batched_branch(pair) -> None:
    """All examples take both branches: under vmap a cond is a select."""

    def step(x):
        return jax.vmap(lambda y: lax.cond(y > 0, lambda: psum(y), lambda: y))(x[None])

    assert localities(pair, step) == "T"


def test_one_replica_has_nobody_to_wait_for() -> None:
    one = replicax.MirroredStrategy(["cpu:0"])
    for fn in DEADLOCKS.values():
        one.run(fn, args=(jnp.float32(0.0),))


# --- marks ----------------------------------------------------------------------------------------------


def test_a_mark_is_found_inside_control_flow(pair) -> None:
    """The loss of an inner value_and_grad is asked about inside the scan that contains it."""
    with pair.scope():
        w = replicax.Variable(2.0)

    def step(x, mirrored):
        def turn(c, _):
            scale = mirrored if mirrored is not None else x
            return c + replicax.value_and_grad(lambda: w * scale, [w])()[0], None

        return lax.scan(turn, ZERO, None, length=2)[0]

    assert localities(pair, step, None) == "T"
    with pytest.raises(
        replicax.errors.LocalityError, match=r"the loss is the same on every replica.*\n.*test_infer.py:\d+"
    ):
        localities(pair, step, ONE)


def test_a_mark_is_found_though_nobody_uses_the_loss(pair) -> None:
    with pair.scope():
        w, rate = replicax.Variable(2.0), replicax.Variable(0.1)

    def step(x):
        def meta():
            def inner(p, _):
                _, (g,) = replicax.value_and_grad(lambda: psum(x * w), [w])()
                return p - rate * g, None

            return lax.scan(inner, x, None, length=2)[0]

        return replicax.value_and_grad(meta, [rate])()

    with pytest.raises(replicax.errors.LocalityError, match="the loss is the same on every replica"):
        localities(pair, step)


def test_nested_loops_are_not_searched_again_and_again(pair, monkeypatch) -> None:
    run, runs = Dataflow.run, []

    def counted(self, jaxpr, *args, **options):
        runs.append(jaxpr)
        return run(self, jaxpr, *args, **options)

    monkeypatch.setattr(Dataflow, "run", counted)

    def nest(depth, carry, x):
        if depth == 0:
            return carry + x
        return lax.scan(lambda c, _: (nest(depth - 1, c, x), None), carry, None, length=1)[0]

    assert localities(pair, lambda x: nest(8, 0.0, x)) == "T"
    assert len(runs) < 100  # 162 if each search searched the inner loops anew
