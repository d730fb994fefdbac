from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(8, 3)).astype(np.float32)
W = RNG.normal(size=(3, 2)).astype(np.float32)


def variables_of(strategy):
    with strategy.scope():
        return replicax.Variable(W, name="w"), replicax.Variable(jnp.zeros(2), name="b")


def loss_of(w, b, x):
    return jnp.sum(jnp.tanh(x @ w + b[None, :]) ** 2, axis=1)


def batches(strategy):
    return next(iter(strategy.distribute_dataset([DATA])))


def test_gradients_sum_to_those_of_the_global_batch(strategy) -> None:
    w, b = variables_of(strategy)

    def step(x):
        loss = lambda: replicax.compute_average_loss(loss_of(w, b, x))  # noqa: E731
        value, grads = replicax.value_and_grad(loss, {"w": w, "b": b})()
        return value, grads

    value, grads = strategy.run(step, args=(batches(strategy),))
    expected, expected_grads = jax.value_and_grad(lambda p: jnp.mean(loss_of(p["w"], p["b"], DATA)))(
        {"w": W, "b": jnp.zeros(2)}
    )
    np.testing.assert_allclose(strategy.reduce("sum", value), expected, rtol=1e-6)
    for name in ("w", "b"):
        np.testing.assert_allclose(strategy.reduce("sum", grads)[name], expected_grads[name], rtol=1e-5, atol=1e-7)


def test_gradients_are_per_replica(pair) -> None:
    w, b = variables_of(pair)
    program = pair.extended.trace(
        lambda x: replicax.value_and_grad(lambda: jnp.sum(loss_of(w, b, x)), [w, b])(), args=(batches(pair),)
    )
    assert [x.value for x in program.localities] == ["T", "T", "T"]
    assert program.collectives() == []


def test_writes_inside_survive(strategy) -> None:
    w, b = variables_of(strategy)
    with strategy.scope():
        count = replicax.Variable(0, name="count")
        mean = replicax.Variable(jnp.zeros(3), name="mean", aggregation="mean")

    def step(x):
        def loss():
            count.assign_add(1)
            mean.assign(jnp.mean(x, 0))
            return jnp.sum(loss_of(w, b, x)) * (1 + 0 * count.value.astype(jnp.float32))

        return replicax.value_and_grad(loss, [w])()[0]

    strategy.run(step, args=(batches(strategy),))
    assert int(count) == 1
    np.testing.assert_allclose(mean.numpy(), DATA.mean(0), rtol=1e-5, atol=1e-6)


def test_a_write_of_what_differs_is_found_inside(pair) -> None:
    w, _ = variables_of(pair)
    with pair.scope():
        stat = replicax.Variable(0.0, name="stat")

    def step(x):
        return replicax.value_and_grad(lambda: (stat.assign(jnp.sum(x)), jnp.sum(x @ w))[1], [w])()

    with pytest.raises(replicax.errors.LocalityError, match="'stat'"):
        pair.run(step, args=(batches(pair),))


def test_aux_may_hold_anything(strategy) -> None:
    w, b = variables_of(strategy)

    def step(x):
        def loss():
            losses = loss_of(w, b, x)
            return jnp.sum(losses), {"losses": losses, "name": "aux", "none": None, "w": w}

        (value, aux), grads = replicax.value_and_grad(loss, [w], has_aux=True)()
        assert aux["name"] == "aux"
        assert aux["w"] is w
        return value, aux["losses"], grads

    _, losses, _ = strategy.run(step, args=(batches(strategy),))
    gathered = strategy.gather(losses, 0)
    np.testing.assert_allclose(gathered, loss_of(W, jnp.zeros(2), DATA), rtol=1e-5)


def test_a_variable_that_the_loss_does_not_use(strategy) -> None:
    w, b = variables_of(strategy)
    _, (grad,) = strategy.run(
        lambda x: replicax.value_and_grad(lambda: jnp.sum(x @ w), [b])(), args=(batches(strategy),)
    )
    np.testing.assert_array_equal(strategy.reduce("mean", grad), [0, 0])


def test_gradients_of_gradients() -> None:
    x = replicax.Variable(3.0)
    inner = replicax.value_and_grad(lambda: x * x * x, [x])
    (value, (second,)) = replicax.value_and_grad(lambda: inner()[1][0], [x])()
    assert (float(value), float(second)) == (27.0, 18.0)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_derivative_by_copies_that_a_merge_call_combines(pair, executor) -> None:
    with pair.scope():
        own = replicax.Variable(2.0, name="own", synchronization="on_read", aggregation="sum")
    loss = replicax.value_and_grad(lambda x: x * replicax.get_replica_context().merge_call(lambda s: own.value), [own])
    x = pair.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    values, (gradient,) = pair.run(loss, args=(x,), options=replicax.RunOptions(executor))
    assert [float(v) for v in pair.local_results(values)] == [4.0, 8.0]
    assert [float(g) for g in pair.local_results(gradient)] == [3.0, 3.0]
    for outside in (lambda: own.value, lambda: own.assign(2.0)):
        with pytest.raises(replicax.errors.ContextError, match="Differentiate inside the step: strategy.run"):
            replicax.value_and_grad(outside, [own])()


def test_it_passes_arguments_on() -> None:
    x = replicax.Variable(3.0)
    value, (grad,) = replicax.value_and_grad(lambda a, *, b: a * x + b, [x])(2.0, b=1.0)
    assert (float(value), float(grad)) == (7.0, 2.0)


def test_a_mirrored_loss_is_refused(pair) -> None:
    w, b = variables_of(pair)

    def step(x):
        def loss():
            return replicax.get_replica_context().all_reduce("mean", jnp.mean(loss_of(w, b, x)))

        return replicax.value_and_grad(loss, [w])()

    with pytest.raises(replicax.errors.LocalityError, match="loss is the same on every replica.*compute_average_loss"):
        pair.run(step, args=(batches(pair),))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x: x * jnp.ones(3), r"float scalar, got float32\[3\]; replicax.compute_average_loss"),
        (lambda x: 1, "float scalar, got int32"),
        (lambda x: jax.lax.complex(x.value, x.value), "float scalar, got complex64"),
    ],
)
def test_what_is_no_loss(loss, message) -> None:
    x = replicax.Variable(3.0)
    with pytest.raises(TypeError, match=message):
        replicax.value_and_grad(lambda: loss(x), [x])()


def test_the_loss_may_be_a_variable() -> None:
    x = replicax.Variable(3.0)
    loss, (gradient,) = replicax.value_and_grad(lambda: x, [x])()
    assert (float(loss), float(gradient)) == (3.0, 1.0)


def test_a_variable_has_one_gradient() -> None:
    x = replicax.Variable(3.0, name="x")
    with pytest.raises(ValueError, match="'x'.*listed twice"):
        replicax.value_and_grad(lambda: x * x, [x, x])


def test_outside_a_step_it_leaves_jax_as_it_was() -> None:
    x = replicax.Variable(3.0)
    traces = []

    @jax.jit
    def unrelated(y):
        traces.append(1)
        return y + 1

    def body(carry, _):
        return carry * x, None

    for value in (1.0, 2.0, 3.0):
        x.assign(value)
        _, (grad,) = replicax.value_and_grad(lambda: jax.lax.scan(body, jnp.float32(1), None, length=2)[0], [x])()
        assert float(grad) == 2 * value
        unrelated(1.0)
    assert len(traces) == 1


def test_what_has_no_gradient() -> None:
    with pytest.raises(TypeError, match="'n'.*has no gradient"):
        replicax.value_and_grad(lambda: 1.0, [replicax.Variable(1, name="n")])
    with pytest.raises(TypeError, match="expected Variables, got 1.0"):
        replicax.value_and_grad(lambda: 1.0, [1.0])
    with pytest.raises(TypeError, match="must return a pair"):
        replicax.value_and_grad(lambda: 1.0, [replicax.Variable(1.0)], has_aux=True)()


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_unconnected_gradients(pair, executor) -> None:
    """``None`` where no derivative comes back, be it through a loop, a branch or a program; zeros otherwise."""
    names = ("used", "stopped", "unread", "in a loop", "in no loop", "in a program", "in a branch", "in aux", "written")
    names += ("in a rule",)
    rule = jax.custom_vjp(lambda a, b: a + b)  # whose author says that the first has no influence
    rule.defvjp(lambda a, b: (a + b, None), lambda _, g: (None, g))
    with pair.scope():
        variables = {name: replicax.Variable(jnp.ones(4), name=name) for name in names}

    def step(x, unconnected):
        def loss():
            value = {name: v.value for name, v in variables.items() if name != "unread"}
            variables["written"].assign(jnp.zeros(4))

            def body(total, t):
                return total + (value["in a loop"] * t).sum() + jax.lax.stop_gradient(value["in no loop"]).sum(), None

            total, _ = jax.lax.scan(body, (value["used"] * x).sum(), jnp.arange(3.0))
            total += jax.jit(lambda v: 2 * v.sum())(value["in a program"]) + variables["written"].value.sum()
            total += jax.lax.cond(x > 0, lambda: value["in a branch"].sum(), lambda: 0.0)
            total += rule(value["in a rule"], value["used"]).sum()
            return total + jax.lax.stop_gradient(value["stopped"]).sum(), value["in aux"]

        _, gradients = replicax.value_and_grad(loss, variables, has_aux=True, unconnected_gradients=unconnected)()
        return gradients

    x = pair.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    options = replicax.RunOptions(executor=executor)
    zeros = pair.run(step, (x, "zero"), options=options)
    found = pair.run(step, (x, "none"), options=options)
    connected = {"used", "in a loop", "in a program", "in a branch"}
    assert {name for name, gradient in found.items() if gradient is not None} == connected
    for name in names:
        for gradient in pair.local_results(zeros[name]):
            assert bool((gradient != 0).any()) == (name in connected)
    for name in connected:
        for one, other in zip(pair.local_results(found[name]), pair.local_results(zeros[name]), strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="unconnected_gradients must be 'zero' or 'none', got None"):
        replicax.value_and_grad(lambda: 0.0, variables, unconnected_gradients=None)
    with pytest.raises(TypeError, match="has_aux must be a bool, got <Variable .*; several variables go into a list"):
        replicax.value_and_grad(lambda: 0.0, replicax.Variable(1.0), replicax.Variable(2.0))  # type: ignore[arg-type]
