from __future__ import annotations

import collections
import concurrent.futures
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.errors import PACKAGE
from tests.conftest import strategy_of
from tests.soaking import soak_except

RNG = np.random.default_rng(1)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 2)).astype(np.float32)
PARAMS = [RNG.normal(size=(4, 2)).astype(np.float32), np.zeros(2, np.float32)]


def per_example(params, x, y):
    return jnp.sum((x @ params[0] + params[1][None, :] - y) ** 2, axis=1)


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.05),
    "adamw on a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "clipped by the global norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "lion": lambda: optax.lion(0.01),
    "every second step": lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2).gradient_transformation(),
    "noisy": lambda: optax.noisy_sgd(0.01, key=3),
    "injected rate": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.05),
    "masked": lambda: optax.masked(optax.sgd(0.05), [True, False]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "name",
    soak_except(TRANSFORMATIONS, "adamw on a schedule", "clipped by the global norm", "every second step", "masked"),
)
def test_it_is_optax_on_the_global_batch(strategy, name) -> None:
    tx = TRANSFORMATIONS[name]()
    params, state = [jnp.asarray(p) for p in PARAMS], None
    with strategy.scope():
        variables = [replicax.Variable(p, name=f"p{i}") for i, p in enumerate(PARAMS)]
        optimizer = replicax.Optimizer(tx)

    def step(batch):
        x, y = batch
        loss, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(per_example(variables, x, y)), variables
        )()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    @jax.jit
    def plain(params, state):
        grads = jax.grad(lambda p: jnp.mean(per_example(p, X, Y)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic
        state = tx.init(params)
        batch = next(iter(strategy.distribute_dataset([(X, Y)])))
        for _ in range(4):
            strategy.run(step, args=(batch,))
            params, state = plain(params, state)
    for variable, expected in zip(variables, params, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-6)
    for slot, expected in zip(optimizer.variables, jax.tree.leaves(state), strict=True):
        if not jnp.issubdtype(slot.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(slot.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert strategy.extended.trace_count(step) == 1


def test_slots_live_where_their_variable_lives(pair) -> None:
    with pair.scope():
        w = replicax.Variable(jnp.ones(3), name="w")
        optimizer = replicax.Optimizer(optax.adam(0.1))
    assert optimizer.variables == []
    optimizer.build([w])
    assert [s.name for s in optimizer.variables] == ["optimizer[0].count", "optimizer[0].mu/w", "optimizer[0].nu/w"]
    for slot in optimizer.variables:
        assert slot.slot.array.sharding == w.slot.array.sharding
        assert slot.strategy is pair
        assert not slot.trainable


def test_all_gradients_are_one_all_reduce() -> None:
    strategy = strategy_of(4)
    with strategy.scope():
        variables = [replicax.Variable(jnp.ones((i + 1, 8))) for i in range(5)]
        variables.append(replicax.Variable(jnp.ones((300, 100))))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x):
        _, grads = replicax.value_and_grad(lambda: x * sum(jnp.sum(v * v) for v in variables), variables)()
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    (collective,) = strategy.extended.trace(step, args=(x,)).collectives()
    assert collective.kind == "all-reduce"
    assert collective.bytes == 4 * sum(v.size for v in variables)


def apply(gradient, **options):
    def step(x):
        w.assign_add(0.0)
        optimizer.apply_gradients([(gradient(x), w)], **options)

    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(1.0))
    x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    strategy.run(step, args=(x,))
    return float(w)


def all_reduced(x):
    return replicax.get_replica_context().all_reduce("sum", x)


def test_gradients_are_summed_exactly_once() -> None:
    assert apply(lambda x: x) == -2.0
    assert apply(all_reduced, aggregate=False) == -2.0
    with pytest.raises(
        replicax.errors.LocalityError, match="gradient of variable 'w'.*already the same.*aggregate=False"
    ):
        apply(all_reduced)
    with pytest.raises(replicax.errors.LocalityError, match="gradient of variable 'w'.*differs.*pass aggregate=True"):
        apply(lambda x: x, aggregate=False)


def test_a_gradient_that_happens_to_be_the_same_is_summed(pair) -> None:
    """The derivative by a bias is a constant, but each replica has contributed its share of it."""
    with pair.scope():
        w, b, unused = (replicax.Variable(jnp.ones(()), name=n) for n in ("w", "b", "unused"))
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step(x):
        def loss():
            penalty = replicax.scale_regularization_loss(b * 2)
            return replicax.compute_average_loss(x * w + b) + penalty

        _, grads = replicax.value_and_grad(loss, [w, b, unused])()
        optimizer.apply_gradients(zip(grads, [w, b, unused], strict=True))

    for options in (None, replicax.RunOptions("per_replica")):
        for v in (w, b, unused):
            v.assign(1.0)
        x = next(iter(pair.distribute_dataset([np.array([1.0, 3.0], np.float32)])))
        pair.run(step, args=(x,), options=options)
        assert [float(v) for v in (w, b, unused)] == [-1.0, -2.0, 1.0]


def test_a_step_that_is_refused_leaves_it_unbuilt(pair) -> None:
    with pair.scope():
        w, b = replicax.Variable(1.0, name="w"), replicax.Variable(1.0, name="b")
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def bad(x):
        optimizer.apply_gradients([(x, w)])
        raise KeyError("later")

    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    for options in (None, replicax.RunOptions("per_replica")):
        with pytest.raises(KeyError):
            pair.run(bad, args=(x,), options=options)
        assert optimizer.variables == []
    pair.run(lambda x: optimizer.apply_gradients([(x, w), (x, b)]), args=(x,))
    assert (float(w), float(b)) == (-1.0, -1.0)


def test_threads_that_run_the_first_step_share_one_state(pair) -> None:
    momentum = optax.trace(0.5)

    def slow_init(params):
        time.sleep(0.2)
        return momentum.init(params)

    with pair.scope():
        w = replicax.Variable(jnp.zeros(2))
        optimizer = replicax.Optimizer(optax.GradientTransformation(slow_init, momentum.update))

    def step():
        optimizer.apply_gradients([(jnp.ones(2), w)], aggregate=False)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: pair.run(step), range(3)))
    np.testing.assert_allclose(w.numpy(), 1 + 1.5 + 1.75)
    np.testing.assert_allclose(optimizer.variables[0].numpy(), 1.75)


def test_state_that_changes_its_kind(pair) -> None:
    def transformation(new_state):
        return optax.GradientTransformation(lambda p: jnp.zeros(2), lambda g, s, p=None: (g, new_state(s)))

    with pair.scope():
        w = replicax.Variable(1.0, name="w")
    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    for new_state, message in (
        (lambda s: jnp.concatenate([s, s]), r"shape \(4,\); expected \(2,\)"),
        (lambda s: (s, s), "changed the structure of its state"),
    ):
        optimizer = replicax.Optimizer(transformation(new_state))
        with pytest.raises(ValueError, match=message):
            pair.run(lambda x, o=optimizer: o.apply_gradients([(x, w)]), args=(x,))


def test_it_works_outside_every_step() -> None:
    w = replicax.Variable(3.0)
    optimizer = replicax.Optimizer(optax.sgd(0.5))
    for _ in range(2):
        _, grads = replicax.value_and_grad(lambda: w * w, [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
    assert float(w) == 0.0


def test_with_pairs_aggregate_is_the_second_argument(pair) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.5), name="sgd")
    assert repr(optimizer) == "Optimizer('sgd', not built)"
    pair.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)], False))
    assert (float(w), repr(optimizer)) == (0.5, "Optimizer('sgd', for 1 variables)")


def test_none_gradients_are_left_out(pair) -> None:
    with pair.scope():
        w, frozen = replicax.Variable(1.0), replicax.Variable(1.0)
        optimizer = replicax.Optimizer(optax.adam(0.1))
    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic
        pair.run(lambda x: optimizer.apply_gradients([(x, w), (None, frozen)]), args=(x,))
    assert float(frozen) == 1.0
    assert float(w) == pytest.approx(0.9)


def test_the_order_of_pairs_is_free(pair) -> None:
    with pair.scope():
        a, b = replicax.Variable(1.0), replicax.Variable([1.0, 1.0])
        optimizer = replicax.Optimizer(optax.sgd(1.0))
    optimizer.build([a, b])
    ones = pair.distribute_values_from_function(lambda ctx: (1.0, np.ones(2, np.float32)))
    pair.run(lambda g: optimizer.apply_gradients([(g[1], b), (g[0], a)]), args=(ones,))
    assert float(a) == -1.0
    np.testing.assert_array_equal(b.numpy(), [-1, -1])


def test_bad_input(pair) -> None:
    with pair.scope():
        w = replicax.Variable(jnp.ones(2), name="w")
        n = replicax.Variable(1, name="n")
        stat = replicax.Variable(1.0, name="stat", synchronization="on_read")
        optimizer = replicax.Optimizer(optax.sgd(0.1))
    with pytest.raises(TypeError, match="expected an optax.GradientTransformation, got 'adam'"):
        replicax.Optimizer("adam")
    with pytest.raises(TypeError, match=r"got <function adam at .*>; call it, as in optax.adam\(0.001\)"):
        replicax.Optimizer(optax.adam)
    for variables, error, message in [
        ([], ValueError, "no variables to optimise"),
        ([w, w], ValueError, "'w'.*listed twice"),
        ([n], TypeError, "'n'.*must be a float, and on-write"),
        ([stat], TypeError, "'stat'.*must be a float, and on-write"),
        ([replicax.Variable(1.0, synchronization="on_read")], TypeError, "must be a float, and on-write"),
        ([w, replicax.Variable(1.0, name="theirs")], ValueError, "'w'.*belongs to MirroredStrategy.*'theirs'"),
        ([1.0], TypeError, "expected Variables, got 1.0"),
    ]:
        with pytest.raises(error, match=message):
            optimizer.build(variables)
    with pytest.raises(ValueError, match=r"gradient of variable 'w' .*has shape \(3,\); expected \(2,\)"):
        pair.run(lambda: optimizer.apply_gradients([(jnp.ones(3), w)]))
    for gradient in (jnp.full(2, 1j), replicax.IndexedSlices(jnp.full((1,), 1j), jnp.zeros(1, jnp.int32), (2,))):
        with pytest.raises(TypeError, match=r"gradient of variable 'w' .* is complex.*pass its real part, jnp.real\("):
            pair.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, w)]))
    for arguments in [([(None, w)],), ([None], [w])]:
        with pytest.raises(
            ValueError, match=r"every gradient is None, .*: variable 'w' \(float32\[\d*\]\)\. Differentiate"
        ):
            pair.run(lambda arguments=arguments: optimizer.apply_gradients(*arguments))
    with pair.scope(), pytest.raises(replicax.errors.ContextError, match="call it inside a step"):
        optimizer.apply_gradients([(jnp.ones(2), w)])
    optimizer.build([w])
    with pytest.raises(ValueError, match=r"built for the variables \['w of Mirr.*\], but got gradients of \['stat of"):
        optimizer.build([stat])
    np.testing.assert_array_equal(w.numpy(), [1, 1])


# --- names ----------------------------------------------------------------------------------------------------


def test_slots_have_names_of_their_own(pair) -> None:
    with pair.scope():
        tree = {"w": replicax.Variable(jnp.ones((2, 3)), name="w"), "b": [replicax.Variable(jnp.ones(3), name="w")]}
        first, second = (replicax.Optimizer(optax.adam(0.1)) for _ in range(2))
        third = replicax.Optimizer(optax.adafactor(0.1), name="tail")
    assert tree["b"][0].name == "w_1"
    for optimizer in (first, second, third):
        optimizer.build(tree)
        optimizer.build(tree)
    assert [o.name for o in (first, second, third)] == ["optimizer", "optimizer_1", "tail"]
    slots = [s for o in (first, second, third) for s in o.variables]
    names = [s.name for s in slots]
    assert len(set(names)) == len(names)
    expected = [f"{o}[0].{slot}" for o in ("optimizer", "optimizer_1") for slot in ("count", "mu/w_1", "mu/w")]
    assert set(expected) < set(names)
    assert any(
        name.startswith("tail[0]") and name.endswith("/w") for name in names
    )  # of another shape, and yet its own
    shapes = {s.name: s.shape for s in slots}
    assert (shapes["optimizer[0].mu/w"], shapes["optimizer[0].mu/w_1"]) == ((2, 3), (3,))


@pytest.mark.usefixtures("promotion_of_dtypes")
def test_one_variable_is_a_tree_too(pair) -> None:
    with pair.scope():
        w = replicax.Variable(jnp.ones(3), name="w")
        optimizer = replicax.Optimizer(optax.adam(0.1))
    pair.run(lambda g: optimizer.apply_gradients(g, w), (of_each(pair, [1, 2, 3], [4, 5, 6]),))
    assert [s.name for s in optimizer.variables] == ["optimizer[0].count", "optimizer[0].mu/w", "optimizer[0].nu/w"]


# --- trees and further arguments ------------------------------------------------------------------------------


def of_each(strategy, *values):
    return strategy.distribute_values_from_function(lambda ctx: np.float32(values[ctx.replica_id_in_sync_group]))


def test_the_structure_of_the_first_call_counts(pair) -> None:
    seen = []

    def init(params):
        seen.append(jax.tree.structure(params))
        return optax.EmptyState()

    def update(updates, state, params=None):
        seen.append(jax.tree.structure(updates))
        return jax.tree.map_with_path(lambda path, u: -u if path[0].key == "a" else 2 * u, updates), state

    with pair.scope():
        a, b = (replicax.Variable(1.0, name=name) for name in "ab")
        optimizer = replicax.Optimizer(optax.GradientTransformation(init, update))
    pair.run(
        lambda x: optimizer.apply_gradients({"a": x, "b": (x, None)}, {"a": a, "b": (b, None)}), (of_each(pair, 1, 2),)
    )
    pair.run(lambda x: optimizer.apply_gradients([(x, b), (x, a)]), (of_each(pair, 1, 2),))
    pair.run(lambda x: optimizer.apply_gradients(iter([x, x]), [a, b].__iter__()), (of_each(pair, 1, 2),))
    assert (float(a), float(b)) == (-8.0, 19.0)
    assert set(seen) == {jax.tree.structure({"a": 0, "b": (0, None)})}


def test_gradients_in_another_structure(pair) -> None:
    with pair.scope():
        a, b = (replicax.Variable(1.0, name=name) for name in "ab")
        optimizer = replicax.Optimizer(optax.sgd(1.0))
    one = jnp.float32(1)
    for gradients in ({"a": one, "c": one}, [one, one], one):
        with pytest.raises(ValueError, match=r"gradients must have the structure of the variables, .*'b'.* but have"):
            pair.run(lambda g=gradients: optimizer.apply_gradients(g, {"a": a, "b": b}))
    pair.run(lambda: optimizer.apply_gradients({"a": one, "b": None}, {"a": a, "b": b}))
    assert (float(a), float(b)) == (-1.0, 1.0)


@pytest.mark.usefixtures("promotion_of_dtypes")
@pytest.mark.parametrize("executor", soak_except(["compiled", "per_replica"], "compiled"))
def test_values_and_functions_are_shares_of_the_sum(pair, executor) -> None:
    """A function may take its argument, or read the variables, which have its values meanwhile."""
    options = replicax.RunOptions(executor)
    tx = optax.lbfgs(memory_size=1, linesearch=optax.scale_by_backtracking_linesearch(4))  # compiles quickly
    found = []
    for reads in (False, True):
        with pair.scope():
            w = replicax.Variable([3.0, -1.0])
            optimizer = replicax.Optimizer(tx)

        def step(x, w=w, optimizer=optimizer, reads=reads):
            def loss(v):
                return (jnp.square((w.value if reads else v) - x) * jnp.array([1.0, 4.0])).sum()

            value, gradient = replicax.value_and_grad(lambda: loss(w.value), w)()
            optimizer.apply_gradients(gradient, w, value=value, grad=gradient, value_fn=loss)

        for _ in range(2):
            pair.run(step, (of_each(pair, 1, 2),), options=options)
        found.append(w.numpy())

    def total(v):
        return sum((jnp.square(v - x) * jnp.array([1.0, 4.0])).sum() for x in (1.0, 2.0))

    @jax.jit
    def alone(v, state):
        value, gradient = jax.value_and_grad(total)(v)
        updates, state = tx.update(gradient, state, v, value=value, grad=gradient, value_fn=total)
        return optax.apply_updates(v, updates), state

    v = jnp.array([3.0, -1.0])
    state = tx.init(v)
    for _ in range(2):
        v, state = alone(v, state)
    np.testing.assert_allclose(found, [v, v], rtol=1e-5)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_function_of_parameters_in_another_tree_is_a_share_too(pair, executor) -> None:
    """As a transformation has that flattens the parameters, or masks some of them; its other arguments are as given."""

    def update(updates, state, params=None, *, value_fn, scale, **_):
        flat = jnp.concatenate([params["a"], params["b"]])
        return jax.tree.map(lambda u: -scale["by"] * jax.grad(value_fn)(flat)[:2], updates), state

    with pair.scope():
        tree = {name: replicax.Variable([1.0, 2.0]) for name in "ab"}
        optimizer = replicax.Optimizer(optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update))

    def step(x):
        gradients = {name: x * jnp.ones(2) for name in tree}
        optimizer.apply_gradients(gradients, tree, value_fn=lambda flat: x * (flat**2).sum(), scale={"by": 0.5})

    pair.run(step, (of_each(pair, 1, 2),), options=replicax.RunOptions(executor))
    assert [v.numpy().tolist() for v in tree.values()] == [[-2.0, -4.0]] * 2


def refused(pair, tx, extra, aggregate=True):
    with pair.scope():
        w, seen = replicax.Variable(1.0, name="w"), replicax.Variable(0.0, name="seen")
        optimizer = replicax.Optimizer(tx)

    def step(x):
        gradient = x if aggregate else all_reduced(x)
        optimizer.apply_gradients(gradient, w, aggregate=aggregate, **extra(x, seen))

    try:
        pair.run(step, (of_each(pair, 1, 2),))
    finally:
        assert float(w) == 1.0


@pytest.mark.usefixtures("promotion_of_dtypes")
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_value_that_has_been_reduced_is_taken_as_it_is(pair, executor: str) -> None:
    found = []
    for strategy, of in ((pair, lambda x: x), (pair, all_reduced), (strategy_of(1), lambda x: x)):
        with strategy.scope():
            w = replicax.Variable(1.0, name="w")
            optimizer = replicax.Optimizer(optax.polyak_sgd())

        def step(x, of=of, w=w, optimizer=optimizer):
            loss, gradient = replicax.value_and_grad(lambda: x * w**2, w)()
            optimizer.apply_gradients(gradient, w, value=of(loss))

        strategy.run(step, (of_each(strategy, 1, 2),), options=replicax.RunOptions(executor=executor))
        found.append(float(w))
    assert found == [0.5, 0.5, 0.5]  # the loss is 3, and its gradient 6; of one replica 1 and 2


def test_reduced_and_other_values_are_summed_in_one_all_reduce(pair) -> None:
    with pair.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.polyak_sgd())
    program = pair.extended.trace(lambda x: optimizer.apply_gradients(x, w, value=x), args=(of_each(pair, 1, 2),))
    assert [c.kind for c in program.collectives()] == ["all-reduce"]


@pytest.mark.usefixtures("promotion_of_dtypes")
def test_further_arguments_that_count_wrongly(pair) -> None:
    polyak = optax.polyak_sgd()
    with pytest.raises(replicax.errors.LocalityError, match="value differs between replicas.*reduce it first"):
        refused(pair, polyak, lambda x, _: {"value": x}, aggregate=False)
    with pytest.raises(replicax.errors.LocalityError, match=r"scales\['a'\] differs between replicas"):
        refused(pair, polyak, lambda x, _: {"value": x, "scales": {"a": x}})
    search = optax.lbfgs(memory_size=1)
    kwargs = {"value": jnp.float32(1), "grad": jnp.float32(1)}
    for aggregate, what in ((True, all_reduced), (False, lambda v: v)):
        with pytest.raises(replicax.errors.LocalityError, match="the result of value_fn .*return this replica's share"):
            refused(pair, search, lambda x, _, f=what: {**kwargs, "value_fn": lambda p: f(p * x)}, aggregate)


@pytest.mark.usefixtures("promotion_of_dtypes")
def test_functions_that_write(pair) -> None:
    def extra(x, seen):
        return {"value": x, "grad": x, "value_fn": lambda p: seen.assign(p).value * x}

    with pytest.raises(replicax.errors.TraceError, match="value_fn assigns variable 'seen'.*any number of times"):
        refused(pair, optax.lbfgs(memory_size=1), extra)


def test_arguments_that_a_transformation_does_not_take(pair) -> None:
    plain = optax.GradientTransformation(
        lambda p: optax.EmptyState(), lambda updates, state, params=None: (updates, state)
    )
    with pytest.raises(
        TypeError, match="takes no argument 'value', 'agregate'; its update takes updates, state, params"
    ):
        refused(pair, plain, lambda x, _: {"value": x, "agregate": False})


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_integers_that_are_too_large_for_a_gradient(pair, executor: str) -> None:
    with pair.scope():
        w = replicax.Variable(np.zeros(2, np.float32), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1))
        slow = replicax.Optimizer(optax.polyak_sgd())
    options = replicax.RunOptions(executor=executor)
    with pytest.raises(
        replicax.errors.IntegerRangeError, match=r"apply_gradients: the gradient of .*'w'.* 1099511627776"
    ):
        pair.run(lambda: optimizer.apply_gradients([(np.array([1, 2**40]), w)]), options=options)
    with pytest.raises(replicax.errors.IntegerRangeError, match="apply_gradients: value has the integer 1099511627776"):
        pair.run(lambda: slow.apply_gradients([(np.ones(2, np.float32), w)], value=2**40), options=options)
    assert w.numpy().tolist() == [0.0, 0.0]


def test_setting_an_item_of_the_state_assigns_the_variable(pair) -> None:
    with pair.scope():
        w = replicax.Variable([1.0, 1.0], name="w")
        optimizer = replicax.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.0))
        tree = {"layer": {"w": w}}

    def step():
        optimizer.apply_gradients({"layer": {"w": jnp.ones(2)}}, tree, aggregate=False)

    pair.run(step)
    rate = optimizer.state.hyperparams["learning_rate"]
    optimizer.state.hyperparams["learning_rate"] = 0.25
    pair.run(step)
    assert w.numpy().tolist() == [0.25, 0.25]
    optimizer.state.hyperparams.update(learning_rate=0.0)
    pair.run(step)
    assert w.numpy().tolist() == [0.25, 0.25]
    assert optimizer.state.hyperparams["learning_rate"] is rate
    trace = next(s for s in optimizer.state.inner_state if hasattr(s, "trace")).trace
    assert type(trace["layer"]) is dict  # so that states of Optax can be mapped along
    with pytest.raises(KeyError, match="rate"):
        optimizer.state.hyperparams["rate"] = 0.5
    hyperparams = optimizer.state.hyperparams
    hyperparams |= {"learning_rate": 0.0, "momentum": 0.5}
    assert float(optimizer.state.hyperparams["momentum"]) == 0.5
    arrays = jax.tree.map(jnp.asarray, optimizer.state)
    arrays.hyperparams["learning_rate"] = 3.0
    assert (arrays.hyperparams["learning_rate"], float(rate)) == (3.0, 0.0)


def test_the_transformation_stays_the_same(pair) -> None:
    optimizer = replicax.Optimizer(optax.sgd(0.5))
    with pytest.raises(AttributeError, match="'tx' of 'Optimizer' object has no setter"):
        optimizer.tx = optax.sgd(0.1)


def test_one_that_a_step_makes_for_itself_is_told(pair) -> None:
    with pair.scope():
        w = replicax.Variable([1.0, 1.0], name="w")

    def step():
        optimizer = replicax.Optimizer(optax.sgd(0.5, momentum=0.9))
        optimizer.apply_gradients([(jnp.ones(2), w)], aggregate=False)

    for _ in range(2):
        with pytest.raises(replicax.errors.VariableLostError, match="makes for itself. Make that once, outside"):
            pair.run(step)
    assert w.numpy().tolist() == [1.0, 1.0]


def test_the_work_of_a_first_call_grows_as_the_number_of_variables() -> None:
    """No line runs as often as that number squared: for the thousands of a large model that would take seconds."""

    def lines_run(number: int) -> collections.Counter[Any]:
        strategy = strategy_of(2)
        with strategy.scope():
            variables = [replicax.Variable(np.full(2, float(i), np.float32)) for i in range(number)]
            optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

        def step(x: Any) -> None:
            _, grads = replicax.value_and_grad(lambda: sum((v.value * x).sum() for v in variables), variables)()
            optimizer.apply_gradients(grads, variables)

        x = strategy.distribute_values_from_function(lambda ctx: np.ones(2, np.float32))
        counts: collections.Counter[Any] = collections.Counter()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                counts[frame.f_code.co_filename, frame.f_lineno] += 1
            return trace if frame.f_code.co_filename.startswith(PACKAGE) else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            strategy.extended.trace(step, args=(x,))
        finally:
            sys.settrace(before)
        return counts

    few, many = lines_run(5), lines_run(40)
    assert {place: count for place, count in many.items() if count > 16 * max(few[place], 8)} == {}
