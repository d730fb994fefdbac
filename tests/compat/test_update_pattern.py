"""The standard pattern for updating variables, by hand and by ``Optimizer``, against the modern API: on digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from examples.digits import load_data
from replicax.compat import v1 as tf
from tests.compat.executors import entered, on_both, two_towers
from tests.soaking import soak_except

STEPS, BATCH, TOWERS = 20, 32, 4
SHAPES = {"w": (64, 10), "b": (10,)}
DEVICES = [f"cpu:{i}" for i in range(TOWERS)]


def on_tpu() -> tf.DistributionStrategy:
    return tf.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2"), steps_per_run=1, num_cores=TOWERS)


PLACEMENTS: dict[str, Callable[[], tf.DistributionStrategy]] = {
    "mirrored": lambda: tf.MirroredStrategy(DEVICES),
    "sharded": lambda: tf.DistributionStrategy.of(
        replicax.Strategy(
            replicax.StrategyExtended(jax.devices()[:TOWERS], replicax.variables.FixedShardsPartitioner(TOWERS))
        )
    ),
    "central storage": lambda: tf.DistributionStrategy.of(replicax.CentralStorageStrategy(DEVICES, "cpu:7")),
    "TPU": on_tpu,
}


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    (images, labels), _ = load_data()
    return images.reshape(-1, 64)[: STEPS * BATCH * TOWERS], labels


def dataset_fn(*_: Any) -> list[Any]:
    """A tower's batch for each element."""
    images, labels = data()
    count = len(images) // BATCH
    return [
        (images[k * BATCH : (k + 1) * BATCH], labels[k * BATCH : (k + 1) * BATCH])
        for k in (i % count for i in range(STEPS * TOWERS))
    ]


def initial(name: str) -> np.ndarray:
    rng = np.random.default_rng(sorted(SHAPES).index(name))
    return (rng.normal(size=SHAPES[name]) / 8).astype(np.float32)


def loss(variables: Any, images: Any, labels: Any) -> Any:
    w, b = [v.value for v in variables]
    return optax.softmax_cross_entropy_with_integer_labels(images @ w + b[None], labels).mean()


def rate(step: Any) -> Any:
    return 0.5 / (1.0 + 0.125 * jnp.asarray(step, jnp.float32))


def modern(strategy: replicax.Strategy, steps: int = STEPS) -> list[np.ndarray]:
    """What a program of today does."""
    with strategy.scope():
        variables = [replicax.Variable(initial(name), name=name) for name in SHAPES]
        optimizer = replicax.Optimizer(optax.sgd(rate, momentum=0.875))

    def step(batch: Any) -> None:
        share = lambda: loss(variables, *batch) / TOWERS  # noqa: E731
        _, gradients = replicax.value_and_grad(share, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    batches = iter(strategy.distribute_datasets_from_function(dataset_fn))
    for _ in range(steps):
        strategy.run(step, args=(next(batches),))
    return [v.numpy() for v in variables]


def by_hand(d: tf.DistributionStrategy, steps: int = STEPS) -> list[np.ndarray]:
    """The five steps of the document, for gradient descent with momentum and a falling rate."""
    with d.scope():
        variables = [tf.get_variable(name, initializer=initial(name)) for name in SHAPES]
        slots = []
        for v in variables:
            with d.colocate_vars_with(v):
                slots.append(tf.get_variable(f"{v.name}/momentum", v.shape, initializer=jnp.zeros, trainable=False))
        with d.colocate_vars_with(d.non_slot_devices(variables)):
            count = tf.get_variable("count", initializer=0, trainable=False)

        # 1. Wrap your input dataset in `d.distribute_dataset()` and create an iterator.
        iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()

        def tower_fn(batch: Any) -> Any:
            share = lambda: loss(variables, *batch) / TOWERS  # noqa: E731
            _, gradients = replicax.value_and_grad(share, variables)()
            return list(zip(gradients, variables, strict=True))

        def apply(v: Any, gradient: Any, slot: Any, step: Any) -> None:
            slot.assign(gradient + 0.875 * slot.value)
            v.assign_add(-rate(step) * slot.value)

        for _ in range(steps):
            # 2. Define each tower up to the point of getting a list of gradient, variable pairs.
            grads_and_vars = d.call_for_each_tower(tower_fn, iterator.get_next())
            # 3. Sum the gradients (with locality T) into values with locality V(v).
            sums = d.batch_reduce("sum", [(g, v) for g, v in grads_and_vars])
            # 4. Call `d.update(v)` for each variable to update its value.
            for (_, v), gradient, slot in zip(grads_and_vars, sums, slots, strict=True):
                d.update(v, apply, gradient, slot, count.value)
            # 5. What belongs to no variable.
            d.update_non_slot(d.non_slot_devices(variables), lambda: count.assign_add(1))
        assert int(d.fetch(count)) == steps
        return [v.numpy() for v in variables]


def check_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for name, ours, theirs in zip(SHAPES, found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max(), name
        assert np.abs(theirs - initial(name)).max() > 0.01  # they have moved


@pytest.mark.parametrize("placement", soak_except(PLACEMENTS, "sharded"))
def test_the_update_pattern_by_hand(placement: str) -> None:
    d = PLACEMENTS[placement]()
    assert d.num_towers == TOWERS
    found = by_hand(d, 10)
    check_same(found, modern(PLACEMENTS[placement]().strategy, 10))
    images, labels = data()
    assert np.mean((images @ found[0] + found[1]).argmax(1) == labels[: len(images)]) > 0.75  # it has learnt


@pytest.mark.soak
def test_the_update_pattern_by_hand_on_the_per_replica_executor() -> None:
    expected = modern(PLACEMENTS["sharded"]().strategy, steps=2)
    with replicax.debug():
        check_same(by_hand(PLACEMENTS["sharded"](), steps=2), expected)


@pytest.mark.parametrize("placement", soak_except(PLACEMENTS, "mirrored"))
def test_the_pattern_inside_a_step(placement: str) -> None:
    """What ``Optimizer`` does in a tower: pairs go across, are reduced there, and update variables."""
    d = PLACEMENTS[placement]()
    with d.scope():
        variables = [tf.get_variable(name, initializer=initial(name)) for name in SHAPES]
        optimizer = tf.Optimizer(optax.sgd(rate, momentum=0.875))
        step = tf.get_or_create_global_step()
        iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()

        def step_fn(ctx: tf.MultiStepContext, images: Any, labels: Any) -> None:
            d.call_for_each_tower(tower_fn, images, labels)

        def tower_fn(images: Any, labels: Any) -> None:
            optimizer.minimize(lambda: loss(variables, images, labels), global_step=step)  # means over a tower's own

        d.run_steps_on_dataset(step_fn, iterator, iterations=STEPS)
        assert int(step) == STEPS
    check_same([v.numpy() for v in variables], modern(PLACEMENTS[placement]().strategy))


# --- Optimizer ------------------------------------------------------------------------------------------


@on_both
def test_the_scale_of_losses(executor: Any) -> None:
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=3.0)
        mean, total = tf.Optimizer(optax.sgd(1.0)), tf.Optimizer(optax.sgd(1.0), loss_reduction="sum")

        def gradients(optimizer: tf.Optimizer, x: Any) -> Any:
            [(gradient, variable)] = optimizer.compute_gradients(lambda: v.value * x, [v])
            assert variable is v
            return gradient

        x = d.call_for_each_tower(lambda i: jnp.float32(2 + i), d.worker_device_index)
        assert [float(g) for g in d.unwrap(d.call_for_each_tower(gradients, mean, x))] == [1, 1.5]
        assert [float(g) for g in d.unwrap(d.call_for_each_tower(gradients, total, x))] == [2, 3]
        # A loss that is the same on all towers counts once.
        d.call_for_each_tower(lambda: mean.minimize(lambda: v.value * 1.0))
        assert float(v) == 2.0


@pytest.mark.parametrize("rule", ["descent", "momentum", "nesterov"])
def test_rules_by_their_old_names(rule: str) -> None:
    """What the documents of 1.x say of each, on the loss w² / 2, whose gradient is w."""
    rate, momentum = 0.25, 0.5
    w, velocity, expected = 2.0, 0.0, []
    for _ in range(3):
        velocity = momentum * velocity + w
        change = {"descent": w, "momentum": velocity, "nesterov": w + momentum * velocity}[rule]
        w -= rate * change
        expected.append(w)
    optimizer: tf.Optimizer = (
        tf.GradientDescentOptimizer(rate, use_locking=True, name="descent")
        if rule == "descent"
        else tf.MomentumOptimizer(rate, momentum, use_nesterov=rule == "nesterov")
    )
    d = two_towers()
    with d.scope():
        v = tf.get_variable("v", initializer=2.0)
        found = []
        for _ in range(3):
            d.call_for_each_tower(lambda: optimizer.minimize(lambda: v.value**2 / 2))
            found.append(float(v))
    assert found == expected


@on_both
def test_a_loss_that_goes_across(executor: Any) -> None:
    """As layers do that share their statistics; and metrics may be updated in it."""
    d = two_towers()

    def fn(i: Any) -> Any:
        def loss() -> Any:
            y = jnp.float32(1 + i) * v.value
            mean = tf.get_tower_context().merge_call(lambda d, y: d.reduce("mean", y), y)
            metric.assign_add(y)
            return (y - mean) ** 2 + y

        [(gradient, _)] = tf.Optimizer(optax.sgd(1.0)).compute_gradients(loss, [v])
        return gradient

    with entered(d, executor):
        v = tf.get_variable("v", initializer=2.0)
        with d.tower_local_var_scope("sum"):
            metric = tf.get_variable("metric", initializer=0.0)
        gradients = d.call_for_each_tower(fn, d.worker_device_index)
        # The sum is the derivative of (0.5 v)² + (v + 2 v) / 2 at 2.
        assert float(d.reduce("sum", gradients)) == 2.5
        assert float(d.fetch(metric)) == 6.0


@on_both
def test_gradients_that_are_not_there(executor: Any) -> None:
    """A loss that does not depend on a variable has no gradient with respect to it, and leaves it alone."""
    d = two_towers()

    def compute(x: Any) -> Any:
        # ``seen`` has no way to the loss, and ``behind`` none that can be differentiated.
        return optimizer.compute_gradients(lambda: v.value * x + jax.lax.stop_gradient(behind.value) + 0 * x)

    with entered(d, executor):
        v, seen, behind = (tf.get_variable(name, initializer=3.0) for name in ("v", "seen", "behind"))
        optimizer = tf.Optimizer(optax.sgd(1.0, momentum=0.5))
        seen.value  # noqa: B018
        x = d.call_for_each_tower(lambda i: jnp.float32(1 + i), d.worker_device_index)
        pairs = d.call_for_each_tower(compute, x)
        assert [float(g) for g in d.unwrap(pairs[0][0])] == [0.5, 1.0]
        assert pairs[1:] == [(None, seen), (None, behind)]
        d.call_for_each_tower(lambda x: optimizer.apply_gradients(compute(x), name="step"), x)
        optimizer._distributed_apply(d, pairs)  # from across
        assert (float(v), float(seen), float(behind)) == (3.0 - 1.5 - 2.25, 3.0, 3.0)
        assert [slot.name for slot in optimizer.variables()] == [
            slot.name for slot in optimizer.optimizers[0].variables
        ]


@on_both
def test_losses_of_several_networks(executor: Any) -> None:
    """One optimizer, and losses without a variable in common: each group is as with an optimizer of its own."""
    d = two_towers()

    def once(optimizers: Any, variables: Any, x: Any) -> None:
        for optimizer, v in zip(optimizers, variables, strict=True):
            optimizer.minimize(lambda v=v: v.value**2 * x, var_list=[v])

    def only_the_second(optimizer: Any, v: Any, x: Any) -> None:
        optimizer.minimize(lambda: v.value**2 * x, var_list=[v])

    with entered(d, executor):
        rule = optax.sgd(0.125, momentum=0.5)
        shared, own = tf.Optimizer(rule), [tf.Optimizer(rule), tf.Optimizer(rule)]
        mine, theirs = ([tf.get_variable(f"{who}{i}", initializer=2.0 + i) for i in (0, 1)] for who in ("v", "w"))
        x = d.call_for_each_tower(lambda i: jnp.float32(1 + i), d.worker_device_index)
        for _ in range(2):
            d.call_for_each_tower(once, [shared, shared], mine, x)
            d.call_for_each_tower(once, own, theirs, x)
        d.call_for_each_tower(only_the_second, shared, mine[1], x)
        d.call_for_each_tower(only_the_second, own[1], theirs[1], x)
        assert [float(v) for v in mine] == [float(v) for v in theirs]
        assert float(mine[0]) < 2
        assert float(mine[1]) < 3
        assert [group.parameters for group in shared.optimizers] == [[v] for v in mine]
        values = [float(slot) for optimizer in own for slot in optimizer.variables()]
        assert [float(slot) for slot in shared.variables()] == values
        assert len({slot.name for slot in shared.variables()}) == 2
        with pytest.raises(
            ValueError, match=r"built for the variables \['v0 of .*\], but got gradients of \['v0 of .*'v1"
        ):
            d.call_for_each_tower(
                lambda x: shared.minimize(lambda: mine[0].value * mine[1].value * x, var_list=mine), x
            )
        assert [float(slot) for slot in shared.variables()] == values


@on_both
def test_a_group_whose_first_step_fails(executor: Any) -> None:
    d = two_towers()
    fails = [True]

    def step(v: Any) -> None:
        optimizer.minimize(lambda: v.value * 1.0, var_list=[v])
        if fails:
            raise KeyError(fails.pop())

    with entered(d, executor):
        first, second = (tf.get_variable(name, initializer=1.0) for name in ("first", "second"))
        optimizer = tf.Optimizer(optax.sgd(0.25))
        with pytest.raises(KeyError):
            d.call_for_each_tower(step, first)
        for v in (second, first):
            d.call_for_each_tower(step, v)
        assert (float(first), float(second)) == (0.75, 0.75)
        assert [group.parameters for group in optimizer.optimizers] == [[second], [first]]


@on_both
def test_no_gradients_at_all(executor: Any) -> None:
    d = two_towers()
    with entered(d, executor):
        v, w = tf.get_variable("v", initializer=3.0), tf.get_variable("w", initializer=3.0)
        optimizer = tf.Optimizer(optax.sgd(1.0))
        none = pytest.raises(ValueError, match=r"no gradients provided for any variable: \['v', 'w'\]\. Does the loss")
        with none:
            d.call_for_each_tower(lambda x: optimizer.minimize(lambda: jnp.float32(x)), d.worker_device_index)
        with none:
            optimizer._distributed_apply(d, [(None, v), (None, w)])
        with pytest.raises(ValueError, match="no variables provided: grads_and_vars is empty"):
            d.call_for_each_tower(lambda: optimizer.apply_gradients([]))
        assert float(v) == float(w) == 3.0


@on_both
def test_applying_what_is_the_same_on_all_towers(executor: Any) -> None:
    """From across as in towers: there is one of it for each."""
    d = two_towers()

    def gradients(x: Any) -> Any:
        pairs = optimizer.compute_gradients(lambda: jnp.float32(x + 1) * w.value + u.value, [w, u])
        return [gradient for gradient, _ in pairs]

    with entered(d, executor):
        w, u = tf.get_variable("w", initializer=3.0), tf.get_variable("u", initializer=3.0)
        step, optimizer = tf.create_global_step(), tf.Optimizer(optax.sgd(1.0))
        found = d.call_for_each_tower(gradients, d.worker_device_index)
        optimizer._distributed_apply(d, zip(found, [w, u], strict=True), global_step=step)
        assert (float(w), float(u), int(step)) == (1.5, 2.0, 1)
        d.call_for_each_tower(
            lambda x: optimizer.apply_gradients(zip(gradients(x), [w, u], strict=True)), d.worker_device_index
        )
        assert (float(w), float(u)) == (0.0, 1.0)


@on_both
def test_code_that_knows_of_no_strategy(executor: Any) -> None:
    """It works as before, in the default tower."""
    with executor():
        v = tf.get_variable(f"without a strategy, {executor.__name__}", initializer=1.0)
        step, optimizer = tf.get_or_create_global_step(), tf.Optimizer(optax.sgd(0.25))
        before = int(step)
        for _ in range(2):
            optimizer.minimize(lambda: v.value**2, global_step=step, var_list=[v])
        assert (float(v), int(step)) == (0.25, before + 2)


def test_variables_by_default() -> None:
    d = two_towers()
    with d.scope():
        optimizer = tf.Optimizer(optax.sgd(1.0))
        with pytest.raises(ValueError, match="there are no variables yet; call the model before"):
            d.call_for_each_tower(lambda: optimizer.minimize(lambda: 1.0))
        tf.get_variable("v", initializer=1.0)
        with pytest.raises(ValueError, match=r"the loss has created the variables \['w'\]; call the model before"):
            d.call_for_each_tower(lambda: optimizer.minimize(lambda: tf.get_variable("w", initializer=1.0).value))
        with pytest.raises(TypeError, match="expected a function that returns the loss"):
            d.call_for_each_tower(lambda: optimizer.minimize(1.0))
