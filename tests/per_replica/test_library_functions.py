"""Functions of libraries, which are one program where a step runs operation by operation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax import _jax
from replicax.per_replica.eager.eager_trace import WatchingTrace
from replicax.per_replica.eager.library_functions import identity_of
from tests.per_replica.test_operations import on
from tests.soaking import soak_except

PER_REPLICA = replicax.RunOptions(executor="per_replica")


def noted(update: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(update)(lambda *args, **kwargs: update(*args, **kwargs))


LIBRARIES: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(0.1),
    "a schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)),
    "a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "a mask": lambda: optax.masked(optax.sgd(0.1), {"a": True}),
    "parts": lambda: optax.partition({"x": optax.sgd(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}),
    "a number of NumPy's": lambda: optax.adam(np.float32(0.1)),
    "another one": lambda: optax.adam(np.float32(0.2)),
    "a dtype": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "a line search": lambda: optax.polyak_sgd(),
}
OWN: dict[str, Callable[[], Any]] = {
    "a schedule": lambda: optax.adam(lambda count: 0.1 / (1 + count)),
    "a mask": lambda: optax.masked(optax.sgd(0.1), lambda tree: jax.tree.map(lambda _: True, tree)),
    "a transformation": lambda: optax.chain(optax.sgd(0.1), optax.stateless(lambda updates, _: updates)),
    "an array": lambda: optax.adam(jnp.float32(0.1)),
    "under another name": lambda: optax.adam(noted(optax.constant_schedule(0.1))),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_library_makes_is_equal_if_it_is_made_alike(name: str) -> None:
    found = identity_of(LIBRARIES[name]().update)
    assert found is not None
    assert hash(found) == hash(identity_of(LIBRARIES[name]().update))
    assert [identity_of(make().update) == found for make in LIBRARIES.values()] == [n == name for n in LIBRARIES]


@pytest.mark.parametrize("name", OWN)
def test_what_somebody_has_written_is_no_librarys(name: str) -> None:
    assert identity_of(OWN[name]().update) is None


def test_what_is_changed_is_something_else() -> None:
    labels = {"a": "x", "b": "x"}
    tx = optax.partition({"x": optax.sgd(0.1), "y": optax.adam(0.1)}, labels)
    before = identity_of(tx.update)
    labels["b"] = "y"
    assert before is not None is not identity_of(tx.update) != before


def step_of(strategy: replicax.Strategy, tx: Any) -> tuple[Callable[[Any], Any], list[Any], Any]:
    with strategy.scope():
        variables = {"a": replicax.Variable([1.0, 2.0], name="a"), "b": replicax.Variable(np.ones((2, 2), np.float32))}
    optimizer = replicax.Optimizer(tx)

    def step(x: Any) -> None:
        _, gradients = replicax.value_and_grad(lambda: (x * variables["a"] @ variables["b"]).sum(), variables)()
        optimizer.apply_gradients(gradients, variables)

    x = strategy.distribute_values_from_function(lambda ctx: np.float32(1 + ctx.replica_id_in_sync_group))
    return lambda options: strategy.run(step, args=(x,), options=options), list(variables.values()), optimizer


@pytest.mark.parametrize("name", soak_except(["a schedule", "a chain", "parts"], "parts"))
def test_updates_are_those_of_the_compiled_step(pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    compute = WatchingTrace.compute_program

    def note(self: Any, program: Any, args: Any) -> Any:
        made.append(compute(self, program, args))
        return made[-1]

    monkeypatch.setattr(WatchingTrace, "compute_program", note)
    outcomes = []
    with jax.numpy_dtype_promotion("standard"):
        for options in (None, PER_REPLICA):
            call, variables, optimizer = step_of(pair, LIBRARIES[name]())
            for _ in range(3):
                call(options)
            outcomes.append([v.numpy() for v in (*variables, *optimizer.variables)])
    for a, b in zip(*outcomes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(made) == 6  # three steps of two replicas
    assert None not in made


def test_who_has_written_some_of_it_sees_values(pair) -> None:
    seen: list[Any] = []

    def schedule(count: Any) -> float:
        seen.append(int(count))
        return 0.1

    call, *_ = step_of(pair, optax.adam(schedule))
    for _ in range(2):
        call(PER_REPLICA)
    assert seen == [0, 0, 1, 1]


def test_whoever_follows_line_by_line_sees_values() -> None:
    of = optax.sgd(0.1).update
    seen: list[bool] = []

    def double(x: Any) -> Any:
        seen.append(isinstance(x, jax.core.Tracer))
        return x * 2

    x, watched = jax.device_put(np.float32(3), jax.devices()[0]), sys.gettrace()
    trace = WatchingTrace(lambda *_: None, jax.devices()[0], each=False)
    with on(jax.devices()[0]), _jax.set_current_trace(trace):
        function = _jax.as_one_program(double, of)
        assert float(function(x)) == 6.0
        try:
            sys.settrace(lambda *_: None)
            assert float(function(x)) == 6.0
        finally:
            sys.settrace(watched)
    assert function(3.0) == 6.0
    assert seen == [True, False, False]
