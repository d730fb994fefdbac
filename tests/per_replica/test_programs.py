"""What the per-replica executor compiles and keeps: nothing, once it has run a step with the same shapes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax import _jax
from tests.conftest import strategy_of
from tests.programs.programs import third_party
from tests.soaking import soak_except, soaked

PER_REPLICA = replicax.RunOptions(executor="per_replica")


def context() -> replicax.ReplicaContext:
    replica = replicax.get_replica_context()
    assert replica is not None
    return replica


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Grows by one for each program that JAX compiles."""
    found: list[str] = []

    def note(event: str, _duration: float, **more: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


class Model:
    """What the steps below use, and what lives on from one call to the next."""

    def __init__(self, strategy: replicax.Strategy) -> None:
        with strategy.scope():
            self.w = replicax.Variable(np.full((3, 3), 0.5, np.float32))
            self.count = replicax.Variable(0.0, aggregation="mean")
            self.optimizer = replicax.Optimizer(optax.adam(0.1))
        self.jitted = jax.jit(lambda x: jnp.tanh(x @ self.w.value))
        self.checkpointed = jax.checkpoint(lambda x: jnp.tanh(x @ self.w.value))
        self.x = strategy.distribute_values_from_function(
            lambda ctx: np.full((2, 3), 1 + ctx.replica_id_in_sync_group, np.float32)
        )

    def gradient(self, predict: Callable[[Any], Any]) -> Any:
        return replicax.value_and_grad(lambda: replicax.compute_average_loss(predict(self.x).sum(-1)), [self.w])()

    def loss(self, x: Any, predict: Callable[[Any], Any]) -> Any:
        def loss() -> Any:
            return replicax.compute_average_loss(predict(x).sum(-1))

        return replicax.value_and_grad(loss, [self.w])()

    def train(self, x: Any) -> Any:
        value, gradients = self.loss(x, lambda x: x @ self.w)
        self.optimizer.apply_gradients(zip(gradients, [self.w], strict=True))
        return value

    def writing(self, x: Any) -> Any:
        def predict(x: Any) -> Any:
            self.count.assign_add(x.sum())
            return x @ self.w * self.count

        self.w.assign_add(jnp.ones((3, 3)))
        return self.loss(x, predict), self.w.value

    def scanning(self, x: Any) -> Any:
        return self.loss(x, lambda x: jax.lax.scan(lambda c, _: (self.jitted(c), c.sum()), x, None, length=3)[0])

    def remembering(self, x: Any) -> Any:
        before = self.checkpointed(x)
        self.w.assign_add(jnp.ones((3, 3)))
        return before, self.loss(x, self.checkpointed), self.checkpointed(x)

    def talking(self, x: Any) -> Any:
        merged = context().merge_call(lambda strategy, v: strategy.reduce("mean", v), args=(x,))
        return merged, context().all_gather(x, 0), context().all_reduce("mean", {"x": x, "n": x.sum()})

    def drawing(self, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), context().replica_id_in_sync_group)
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    def looking_up(self, x: Any) -> Any:
        return self.loss(x, lambda x: self.w.value[jnp.array([0, 2])] * x)


STEPS = ["train", "writing", "scanning", "remembering", "talking", "drawing", "looking_up"]


@pytest.mark.parametrize("kinds", [["train", "remembering", "talking"], *(soaked([kind]) for kind in STEPS)])
def test_a_second_call_compiles_nothing(pair, kinds: list[str]) -> None:
    model, other = Model(pair), Model(strategy_of(1))

    def run_all() -> None:
        for kind in kinds:
            pair.run(getattr(model, kind), args=(model.x,), options=PER_REPLICA)

    run_all()
    with compilations() as found:
        run_all()
    assert not found
    # What others do in between, with programs that hold values of variables, changes nothing.
    other.w.strategy.run(other.scanning, args=(other.x,))
    with replicax.debug():
        other.w.strategy.run(other.remembering, args=(other.x,))
    with compilations() as found:
        run_all()
    assert not found


@pytest.mark.parametrize("kind", soak_except(STEPS, "train", "scanning", "talking"))
def test_nothing_is_kept_from_call_to_call(pair, kind: str) -> None:
    model = Model(pair)
    gc.collect()
    gc.freeze()  # what other tests have left is not counted again and again

    def kept() -> tuple[int, int]:
        pair.run(getattr(model, kind), args=(model.x,), options=PER_REPLICA)
        gc.collect()
        programs = sum(isinstance(o, (_jax.Jaxpr, _jax.ClosedJaxpr)) for o in gc.get_objects())
        return len(jax.live_arrays()), programs

    kept()
    before = kept()
    assert [kept(), kept()] == [before] * 2


def test_a_checkpointed_function_that_lives_on_reads_what_was_assigned(pair) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    helper = jax.checkpoint(lambda x: x * v)

    def step() -> Any:
        before = helper(2.0)
        v.assign_add(1.0)
        return before, helper(2.0)

    found = [[float(x) for x in pair.run(step, options=PER_REPLICA)] for _ in range(3)]
    assert found == [[2.0, 4.0], [4.0, 6.0], [6.0, 8.0]]


@pytest.mark.soak
@third_party
def test_a_library_whose_solver_has_a_collective_inside(pair: replicax.MirroredStrategy) -> None:
    from tests.programs.programs import PROGRAMS
    from tests.programs.programs_libraries import solvers_of_lineax_and_optimistix_over_all_replicas as step

    [which] = [p for p in PROGRAMS if p.step is step]
    x = pair.distribute_values_from_function(lambda ctx: which.data(ctx.replica_id_in_sync_group))
    found = pair.run(step, args=(x,), options=PER_REPLICA)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(which.reference(2)[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)  # plain arrays: the same on every replica
