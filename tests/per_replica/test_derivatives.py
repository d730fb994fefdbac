"""Derivatives of single operations, whose rules are traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import _jax
from replicax._jax.internals import ad
from replicax.per_replica.eager.eager_trace import WatchingTrace, program_p
from tests.per_replica.test_operations import on
from tests.soaking import soak_except

X = np.linspace(-2, 3, 6, dtype=np.float32).reshape(2, 3)


@jax.custom_vjp
def second(x: Any, y: Any) -> Any:
    return y


second.defvjp(lambda x, y: (y, None), lambda _, cotangent: (None, cotangent))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "what an operand is": lambda x: x * jnp.ones((2, 3)) * x,
    "numbers": lambda x: 2.0 * x + x**3 - 1 / (3 + x * x),
    "several results": lambda x: jax.lax.sort_key_val(x, jnp.cos(x))[1][:, :2],
    "whole numbers besides": lambda x: x[jnp.array([1, 0, 1]), jnp.argmax(x)],
    "a product": lambda x: (x @ x.T) / jnp.linalg.norm(x),
    "branches": lambda x: jnp.where(x > 0, jnp.log1p(jnp.abs(x)), jnp.tanh(x)),
    "a power": lambda x: (1 + x * x) ** jnp.float32(0.3),
    "half of the digits": lambda x: jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "a loop": lambda x: jax.lax.scan(lambda c, row: (c * row.sum(), c), 1.0, x)[0],
    "nothing": lambda x: jnp.sign(x) + jax.lax.stop_gradient(x),
}
QUICK = ("what an operand is", "whole numbers besides", "branches", "a power", "a loop", "nothing")
DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x)))),
    "twice": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(jnp.sin(f(y))))(x) ** 2)),
    "rows": lambda f: jax.jacrev(f),
    "forward": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "through the linear map": lambda f: lambda x: jax.grad(lambda t: jnp.sum(jax.linearize(f, x)[1](t)))(jnp.cos(x)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", soak_except(FUNCTIONS, *QUICK))
def test_derivatives_are_those_of_jax(name: str, derivative: str) -> None:
    same_as_jax(DERIVATIVES[derivative](FUNCTIONS[name]))


@pytest.mark.parametrize("derivative", ["grad", "twice", "rows"])  # a custom_vjp has no others
def test_an_operation_that_gets_no_cotangent(derivative: str) -> None:
    same_as_jax(DERIVATIVES[derivative](lambda x: second(jax.lax.sort_key_val(x, jnp.cos(x))[1], x)))


def same_as_jax(function: Callable[[Any], Any]) -> None:
    expected = jax.jit(function)(X)
    for device in jax.devices()[:2]:
        x = jax.device_put(X, device)
        with on(device):
            found = function(x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype, a.devices()) == (b.shape, b.dtype, {device})
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_the_rule_of_a_derivative_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def noted(rule: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            traced.append(rule)
            return rule(*args, **kwargs)

        return note

    for primitive in (jax.lax.sinh_p, jax.lax.mul_p):
        monkeypatch.setitem(ad.primitive_jvps, primitive, noted(ad.primitive_jvps[primitive]))
    strategy = replicax.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = replicax.Variable(jnp.ones((3, 11)), name="w")

    def step(x: Any) -> Any:
        return replicax.value_and_grad(lambda: jnp.sum(jnp.sinh(w * x)), [w])()

    batch = strategy.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    counts = []
    for _ in range(3):
        before = len(traced)
        strategy.run(step, args=(batch,), options=replicax.RunOptions(executor="per_replica"))
        counts.append(len(traced) - before)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize("name", ["arccosh", "a product", "a sum over rows"])
def test_a_cotangent_goes_back_through_an_operation_as_one_program(name: str) -> None:
    functions = {
        "arccosh": jax.lax.acosh,
        "a product": lambda x: jax.lax.mul(x, np.full((3, 5), 2, np.float32)),
        "a sum over rows": lambda x: jax.lax.reduce(x, np.float32(0), jax.lax.add, (0,)),
    }
    function, watched = functions[name], []
    device = jax.devices()[1]
    trace = WatchingTrace(lambda primitive, *_: watched.append(primitive), device, each=False)
    x = jax.device_put(np.full((3, 5), 1.5, np.float32), device)
    with on(device), _jax.set_current_trace(trace):
        y, back = jax.vjp(function, x)
        watched.clear()
        (found,) = back(y)
    assert watched == [program_p]
    (expected,) = jax.vjp(function, x)[1](y)
    assert found.devices() == {device}
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_cotangents_way_back_has_a_derivative() -> None:
    strategy, x = replicax.MirroredStrategy(jax.devices()[:2]), np.arange(1.0, 4.0, dtype=np.float32)

    def step(x: Any) -> Any:
        _, back = jax.vjp(lambda x: jnp.sin(x) * x, x)
        return jax.jvp(lambda y: back(y)[0], (x,), (jnp.ones_like(x),))[1]

    expected = strategy.run(step, args=(x,))
    with replicax.debug():
        np.testing.assert_allclose(strategy.run(step, args=(x,)), expected, rtol=1e-6)


def test_what_is_computed_together_has_localities_of_its_own() -> None:
    # x * y keeps x and y for the derivative: each as it was, though the product differs between replicas.
    strategy = replicax.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = replicax.Variable(1.5, name="w")
        kept = replicax.Variable(0.0, name="kept")

    def step(x: Any, write: bool) -> Any:
        # The gradient for x is w, which is the same everywhere; that for w is x, which is not.
        value, by_x = jax.value_and_grad(lambda x: w.value * x)(x)
        (by_w,) = replicax.value_and_grad(lambda: w * x, [w])()[1]
        kept.assign(by_w if write else by_x)
        return value

    batch = strategy.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    for executor in ("compiled", "per_replica"):
        options = replicax.RunOptions(executor=executor)
        strategy.run(step, args=(batch, False), options=options)
        assert kept.numpy() == 1.5
        with pytest.raises(replicax.errors.LocalityError, match="kept"):
            strategy.run(step, args=(batch, True), options=options)


def test_what_is_handed_on_together_has_localities_of_its_own() -> None:
    strategy = replicax.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        kept = replicax.Variable(0.0, name="kept")

    def step(x: Any) -> None:
        def loss(x: Any) -> Any:
            same, own = jax.lax.optimization_barrier((jnp.float32(3), x))
            return own * same

        kept.assign(jax.grad(loss)(x))

    batch = strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    strategy.run(step, args=(batch,), options=replicax.RunOptions(executor="per_replica"))
    assert kept.numpy() == 3


def test_elsewhere_jax_differentiates() -> None:
    assert _jax.current_trace() is _jax.eval_trace()
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sinh(x) * x)(2.0), np.sinh(2) + 2 * np.cosh(2), rtol=1e-6)


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_a_reduction_of_a_number_of_python_has_derivatives(derivative: Callable[..., Any]) -> None:
    strategy = replicax.MirroredStrategy(jax.devices()[:2])

    def reduced(x: Any, op: str) -> Any:
        ctx = replicax.get_replica_context()
        return ctx.merge_call(lambda strategy, y: strategy.extended.reduce_to(op, y), (x,))

    def step() -> Any:
        return [derivative(lambda x, op=op: reduced(x, op))(3.0) for op in ("sum", "mean", "only_first_replica")]

    results = (strategy.run(step, options=replicax.RunOptions(executor)) for executor in ("compiled", "per_replica"))
    for expected, found in zip(*results, strict=True):
        for a, b in zip(strategy.local_results(expected), strategy.local_results(found), strict=True):
            assert a == b
