"""What a step may do with variables while it is captured, and what it may not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax


@pytest.fixture
def v(pair) -> replicax.Variable:
    with pair.scope():
        return replicax.Variable(2.0, name="v")


def written(v):
    v.assign(5.0)
    return v.value


# --- writes where they would leak -----------------------------------------------------------------------

LEAKS = {
    "grad": lambda v: jax.grad(lambda x: written(v) * x)(1.0),
    "vmap": lambda v: jax.vmap(lambda x: written(v) * x)(jnp.ones(2)),
    "jvp": lambda v: jax.jvp(lambda x: written(v) * x, (1.0,), (1.0,)),
    "scan": lambda v: jax.lax.scan(lambda c, _: (written(v), None), jnp.float32(0), None, length=2),
    "while": lambda v: jax.lax.while_loop(lambda c: c < 1, lambda c: written(v), jnp.float32(0)),
    "cond": lambda v: jax.lax.cond(jnp.float32(1) > 0, lambda: written(v), lambda: jnp.float32(0)),
    "jit": lambda v: jax.jit(lambda: written(v))(),
    "checkpoint": lambda v: jax.checkpoint(lambda: written(v))(),
    "assign_add in scan": lambda v: jax.lax.scan(lambda c, _: (v.assign_add(c).value, None), jnp.float32(0), None, 2),
    "raw grad inside value_and_grad": lambda v: replicax.value_and_grad(
        lambda: jax.grad(lambda x: written(v) * x)(1.0) * v, [v]
    )(),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_write_that_would_leak(pair, v, name) -> None:
    told = "leave jax.jit out" if name == "jit" else "replicax.value_and_grad"
    with pytest.raises(replicax.errors.TraceError, match=rf"'v'.*was written inside.*{told}.*assign it"):
        pair.run(lambda: LEAKS[name](v))
    assert float(v) == 2.0
    assert float(pair.run(lambda: v + 1)) == 3.0  # nothing is left behind


@pytest.mark.parametrize("name", ["grad", "vmap", "scan", "cond", "jit", "checkpoint"])
def test_outside_every_step_too(name) -> None:
    free = replicax.Variable(2.0, name="v")
    with pytest.raises(replicax.errors.TraceError, match="'v'"):
        LEAKS[name](free)
    assert float(free) == 2.0


def test_a_jitted_step_that_assigns_is_told_to_leave_jit_out(pair, v) -> None:
    def step():
        v.assign(3.0)

    for call in (lambda: pair.run(jax.jit(step)), jax.jit(step)):
        with pytest.raises(
            replicax.errors.TraceError, match="'v'.*strategy.run compiles the whole step: leave jax.jit out"
        ):
            call()
    pair.run(step)
    assert float(v) == 3.0


def test_reading_in_a_kept_program_outside_a_step_is_refused() -> None:
    free = replicax.Variable(2.0, name="v")
    with pytest.raises(replicax.errors.TraceError, match="'v'.*was read inside jax.jit, outside a step.*strategy.run"):
        jax.jit(lambda: free.value)()
    assert float(jax.vmap(lambda x: x * free)(jnp.ones(2))[0]) == 2.0
    assert float(replicax.get_strategy().run(lambda: jax.jit(lambda: free.value)())) == 2.0


# --- reads from anywhere --------------------------------------------------------------------------------

READS = {
    "grad": lambda v: jax.grad(lambda x: v * x)(1.0),
    "vmap": lambda v: jax.vmap(lambda x: v * x)(jnp.ones(2))[0],
    "scan": lambda v: jax.lax.scan(lambda c, _: (c + v, None), jnp.float32(0), None, length=2)[0] / 2,
    "cond": lambda v: jax.lax.cond(v > 0, lambda: v.value, lambda: jnp.float32(0)),
    "jit": lambda v: jax.jit(lambda: v.value)(),
    "checkpoint": lambda v: jax.checkpoint(lambda: v.value)(),
    "scan of grad": lambda v: (
        jax.lax.scan(lambda c, _: (c + jax.grad(lambda x: v * x)(1.0), None), jnp.float32(0), None, length=2)[0] / 2
    ),
}


@pytest.mark.parametrize("name", READS)
def test_reads_work_everywhere_inside_a_step(pair, v, name) -> None:
    def step():
        before = READS[name](v)
        v.assign_add(1.0)
        return before, READS[name](v)

    assert [float(x) for x in pair.run(step)] == [2.0, 3.0]
    assert [float(x) for x in pair.run(step)] == [3.0, 4.0]


# --- functions whose programs JAX keeps -----------------------------------------------------------------
# The body of a scan that lives on is traced once by JAX and kept. It must not keep a variable's old value.


def kept(pair):
    with pair.scope():
        w = replicax.Variable(1.0, name="w")

    def body(carry, _):
        return carry + w, None

    helper = jax.jit(lambda x: x * w)
    layer = jax.checkpoint(lambda x: jnp.sin(x * w))
    return w, lambda: (
        jax.lax.scan(body, jnp.float32(0), None, length=2)[0],
        helper(jnp.float32(3)),
        layer(jnp.float32(1)),
    )


def expected(w: float) -> list[float]:
    return pytest.approx([2 * w, 3 * w, float(np.sin(w))], rel=1e-6)


def test_kept_functions_see_each_steps_value(pair) -> None:
    w, use = kept(pair)
    for value in (1.0, 2.0):
        w.assign(value)
        # a new program each time, around the same functions
        assert [float(x) for x in pair.run(lambda: (use(), value)[0])] == expected(value)  # noqa: B023


def test_kept_functions_see_writes_in_the_step(pair) -> None:
    w, use = kept(pair)

    def step():
        before = use()
        w.assign(5.0)
        return before, use()

    before, after = pair.run(step)
    assert [float(x) for x in before] == expected(1.0)
    assert [float(x) for x in after] == expected(5.0)


def test_kept_functions_are_differentiated(pair) -> None:
    w, use = kept(pair)

    def step(x):
        outside = sum(use())
        loss, (grad,) = replicax.value_and_grad(lambda: x * sum(use()), [w])()
        return outside, loss, grad, sum(use())

    x = pair.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    outside, loss, grad, after = pair.run(step, args=(x,))
    assert float(outside) == float(after) == pytest.approx(5 + np.sin(1))
    assert [float(g) for g in pair.local_results(grad)] == pytest.approx([5 + np.cos(1), 2 * (5 + np.cos(1))])
    assert [float(g) for g in pair.local_results(loss)] == pytest.approx([5 + np.sin(1), 2 * (5 + np.sin(1))])


def test_programs_without_variables_stay_kept(pair, v) -> None:
    """Only reads inside kept programs cost a new tracing; plain steps share what JAX has traced."""
    traces = []

    @jax.jit
    def helper(x):
        traces.append(1)
        return x + 1

    for scale in (1.0, 2.0, 3.0):
        pair.run(lambda x: helper(x * v * scale), args=(1.0,))  # noqa: B023
    assert len(traces) == 1


# --- what a variable's value looks like to JAX ------------------------------------------------------------


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_variables_value_is_of_the_kind_of_what_is_computed_from_it(strategy, executor) -> None:
    """Libraries (Equinox for its states) compare what they have with what they had, shardings included."""
    with strategy.scope():
        number, key = replicax.Variable(jnp.ones((2, 3))), replicax.Variable(jax.random.key(0))

    def step(x):
        mine = jax.eval_shape(lambda: number.value)
        assert mine == jax.eval_shape(lambda: number.value + 1) == jax.eval_shape(lambda: x)
        if executor == "compiled":
            assert jax.typeof(number.value) == jax.typeof(number.value * 2)
        assert jax.typeof(key.value) == jax.typeof(jax.random.split(key.value)[0])
        return x

    strategy.run(step, (jnp.ones((2, 3)),), options=replicax.RunOptions(executor))
