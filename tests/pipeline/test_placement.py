"""Where operations run and variables live, by small programs whose answers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax

WEIGHTS = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)


def strategy_of(replicas: int, logical: int) -> replicax.Strategy:
    devices = np.array(jax.devices()[: replicas * logical]).reshape(replicas, logical)
    return replicax.Strategy(replicax.StrategyExtended(devices))


@pytest.fixture
def strategy() -> replicax.Strategy:
    return strategy_of(2, 4)


@pytest.fixture
def x() -> jax.Array:
    return jnp.ones((4, 16))


def variables(strategy: replicax.Strategy, count: int = 2) -> list[replicax.Variable]:
    with strategy.scope():
        return [replicax.Variable(WEIGHTS[i], name=f"w{i}") for i in range(count)]


def homes(values) -> list[int | None]:
    return [v.layout.logical_device for v in values]


def where(strategy: replicax.Strategy, value) -> int:
    """The logical device that has a result."""
    array = value.form.array if isinstance(value, replicax.PerReplica) else value
    columns = [set(column) for column in strategy.extended.logical_devices.T]
    return columns.index(array.sharding.device_set)


def operations(strategy: replicax.Strategy, step, *args) -> list[dict[str, int]]:
    """How many operations of each kind run on each logical device."""
    return [dict(d.operations) for d in strategy.extended.trace(step, args=args).placement().devices]


# --- where things are -------------------------------------------------------------------------------------


def test_operations_follow_their_operands(strategy, x):
    def step(x):
        a = jnp.sin(x)  # nothing is said: device 0
        b = jnp.cos(strategy.assign_to_logical_device(a, 2))
        c = jnp.exp(jnp.tanh(strategy.assign_to_logical_device(b, 1)))
        return a, b, c

    counts = operations(strategy, step, x)
    assert counts[0] == {"sin": 1}
    assert counts[1] == {"tanh": 1, "exp": 1}
    assert counts[2] == {"cos": 1}
    assert counts[3] == {}
    results = strategy.run(step, args=(x,))
    assert [where(strategy, r) for r in results] == [0, 2, 1]
    np.testing.assert_allclose(results[2], np.exp(np.tanh(np.cos(np.sin(x)))), rtol=1e-6)


def test_the_compiled_programs_have_them_where_they_are(strategy, x):
    def step(x):
        return jnp.cos(strategy.assign_to_logical_device(jnp.sin(x), 2))

    program = strategy.extended.trace(step, args=(x,))
    assert " sine(" in program.compiled_text(0)
    assert " cosine(" not in program.compiled_text(0)
    with pytest.raises(ValueError, match="program of 'step': there is no logical device 4: a replica has 4"):
        program.collectives(4)
    assert " cosine(" in program.compiled_text(2)
    assert " sine(" not in program.compiled_text(2)
    assert program.compiled_text(1) == ""


def test_the_example_of_the_original_document(strategy, x):
    def step(inputs):
        output = inputs + inputs
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step, args=(x,))
    assert where(strategy, result) == 0
    np.testing.assert_array_equal(result, 2 * x)


def test_arguments_go_where_they_are_used(strategy, x):
    def step(x, y):
        return strategy.assign_to_logical_device(x, 3) * 2, strategy.assign_to_logical_device(y, 1) * 2

    y = jnp.ones((100, 10))
    report = strategy.extended.trace(step, args=(x, y)).placement()
    assert [d.argument_bytes for d in report.devices] == [0, 4000, 0, 256]
    assert report.transfers == ()


def test_a_default_value_is_sent_to_where_it_is_needed(strategy, x):
    def step(x, y):
        return strategy.assign_to_logical_device(x, 1) + jnp.sin(y)

    program = strategy.extended.trace(step, args=(x, x))
    [transfer] = program.placement().transfers
    assert (transfer.origin, transfer.target, transfer.bytes) == (0, 1, 256)
    first, of_device_0, *_, last = str(program.placement()).splitlines()
    assert first == "step on 4 logical devices, each of one replica:"
    assert of_device_0.startswith("  0: 1 operations in 1 programs; 0 variables of 0 B, arguments 256 B, temporaries ")
    assert last == "  0 → 1: 1 values, 256 B"
    with pytest.raises(TypeError, match="step is not one program: see plan"):
        program.compiled()


def test_so_is_what_is_made_of_arguments_and_a_number_that_all_stages_need(strategy, x):
    """Such as a loss scale, which is on device 0, times the mask of a padded batch, which the last stage needs."""
    with strategy.scope():
        scale = replicax.Variable(2.0, name="scale")

    def step(x, y):
        here, there = (strategy.assign_to_logical_device(x, k) for k in (1, 2))
        return here * scale, there * (y * scale)

    results = strategy.run(step, args=(x, x))
    assert [where(strategy, value) for value in results] == [1, 2]
    assert homes([scale]) == [0]


def test_pytrees_and_variables_are_assigned(strategy, x):
    [w] = variables(strategy, 1)

    def step(x):
        assigned = strategy.assign_to_logical_device({"x": x, "w": w}, 2)
        return assigned["x"] @ assigned["w"]

    assert where(strategy, strategy.run(step, args=(x,))) == 2
    assert homes([w]) == [2]


def test_variables_live_where_they_are_used(strategy, x):
    w0, w1, unused = variables(strategy, 3)

    def step(x):
        h = strategy.assign_to_logical_device(x @ w0, 3)
        return h @ w1

    strategy.run(step, args=(x,))
    assert homes([w0, w1, unused]) == [0, 3, None]
    assert {d.id for d in w1.value.devices()} == {3, 7}
    assert all(len(v.slot.array.addressable_shards) == 2 for v in (w0, w1))
    assert "on logical device 3" in repr(w1)


def test_what_is_made_of_parameters_alone_goes_where_it_is_used(strategy, x):
    [w, b] = variables(strategy)

    def step(x):
        h = strategy.assign_to_logical_device(x, 2)
        return h @ w.value.astype(jnp.bfloat16).astype(jnp.float32).T + jnp.sum(b.value, axis=0)[None, :]

    counts = operations(strategy, step, x)
    assert set(counts[0]) == set()
    assert {"transpose", "dot_general", "convert_element_type"} <= set(counts[2])
    strategy.run(step, args=(x,))
    assert homes([w, b]) == [2, 2]


def test_small_values_decide_nothing_and_go_everywhere(strategy, x):
    def step(x):
        a = strategy.assign_to_logical_device(x, 1)
        b = strategy.assign_to_logical_device(x, 2)
        total = jnp.sum(a) + jnp.sum(b)  # of numbers from two devices
        return a * total, b * total

    first, second = strategy.run(step, args=(x,))
    assert (where(strategy, first), where(strategy, second)) == (1, 2)
    np.testing.assert_array_equal(first, 128 * np.ones((4, 16)))
    report = strategy.extended.trace(step, args=(x,)).placement()
    assert [(t.origin, t.target, t.bytes) for t in report.transfers] == [(0, 1, 4), (0, 2, 4), (1, 0, 4), (2, 0, 4)]


def test_masks_are_made_where_they_are_used(strategy, x):
    def step(x, key):
        def drop(h, k):
            return h * jax.random.bernoulli(jax.random.fold_in(key, k), 0.5, h.shape).astype(h.dtype)

        h = drop(x, 0)
        return drop(strategy.assign_to_logical_device(h, 3), 1)

    key = jax.random.key(0)
    report = strategy.extended.trace(step, args=(x, key)).placement()
    assert "random_bits" in report.devices[3].operations
    assert sum(t.bytes for t in report.transfers) < x.nbytes + 64  # the activations, and a key
    expected = x
    for k in range(2):
        expected = expected * jax.random.bernoulli(jax.random.fold_in(key, k), 0.5, x.shape).astype(x.dtype)
    np.testing.assert_array_equal(strategy.run(step, args=(x, key)), expected)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit, jax.vmap], ids=["bare", "checkpoint", "jit", "vmap"]
)
def test_gradients_go_back_to_where_values_were(x, wrap):
    strategy = strategy_of(1, 4)
    w0, w1 = variables(strategy)

    def step(x):
        def loss(x):
            h = jnp.tanh(x @ w0)
            return jnp.sum((strategy.assign_to_logical_device(h, 1) @ w1) ** 2)

        total, gradients = replicax.value_and_grad(
            lambda: jnp.sum(wrap(loss)(x if wrap is not jax.vmap else x[:, None])), [w0, w1]
        )()
        return total, *gradients

    def plain(weights):
        return jnp.sum((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    total, g0, g1 = strategy.run(step, args=(x,))
    assert [where(strategy, g) for g in (g0, g1)] == [0, 1]
    expected, gradients = jax.jit(jax.value_and_grad(plain))([WEIGHTS[0], WEIGHTS[1]])
    for found, wanted in zip((total, g0, g1), (expected, *gradients), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_linear_loss_whose_cotangents_are_constants(x):
    strategy = strategy_of(1, 4)
    w0, w1 = variables(strategy)

    def step(x):
        def loss():
            return jnp.mean(strategy.assign_to_logical_device(x @ w0, 2) @ w1)

        return replicax.value_and_grad(loss, [w0, w1])()[1]

    g0, g1 = strategy.run(step, args=(x,))
    assert [where(strategy, g) for g in (g0, g1)] == [0, 2]
    assert homes([w0, w1]) == [0, 2]
    expected = jax.grad(lambda w: jnp.mean(x @ w[0] @ w[1]))([WEIGHTS[0], WEIGHTS[1]])
    np.testing.assert_allclose(g0, expected[0], atol=1e-6)


def test_gradients_go_back_also_if_the_loss_is_not_returned(x):
    strategy = strategy_of(1, 4)
    w0, w1 = variables(strategy)

    def step(x):
        def loss():
            h = strategy.assign_to_logical_device(jnp.tanh(x @ w0), 2)
            return jnp.mean(strategy.assign_to_logical_device(h @ w1, 0))

        return replicax.value_and_grad(loss, [w0, w1])()[1]

    gradients = strategy.run(step, args=(x,))
    assert [where(strategy, g) for g in gradients] == [0, 2]
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1]))([WEIGHTS[0], WEIGHTS[1]])
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    counts = [
        device.operations["dot_general"] for device in strategy.extended.trace(step, args=(x,)).placement().devices
    ]
    assert counts == [2, 0, 2, 0]  # the last one forward is not done, as nothing needs the loss


def test_a_variable_that_two_stages_need_is_assigned_to_one_and_sent_to_the_other(strategy, x):
    [w] = variables(strategy, 1)

    def step(x):
        here = strategy.assign_to_logical_device(w, 0)
        there = strategy.assign_to_logical_device(here, 1)
        return strategy.assign_to_logical_device(x @ here, 1) @ there.T

    np.testing.assert_allclose(strategy.run(step, args=(x,)), x @ WEIGHTS[0] @ WEIGHTS[0].T, rtol=1e-4, atol=1e-5)
    assert homes([w]) == [0]


def test_constants_and_arguments_may_be_results(strategy, x):
    def step(x):
        there = strategy.assign_to_logical_device(jnp.ones(100), 2)
        return strategy.assign_to_logical_device(x, 1), there, 3, x, jnp.sort(jnp.arange(100)[::-1])

    first, ones, three, same, in_order = strategy.run(step, args=(x,))
    assert [where(strategy, v) for v in (first, ones, same, in_order)] == [1, 2, 0, 0]
    np.testing.assert_array_equal(in_order, np.arange(100))
    assert three == 3
    np.testing.assert_array_equal(ones, np.ones(100))
    np.testing.assert_array_equal(same, x)


def test_what_is_closed_over_goes_where_it_is_used(strategy, x):
    table = jnp.arange(64.0).reshape(4, 16)

    def step(x):
        called = jax.jit(lambda x: x + 2 * table)
        return strategy.assign_to_logical_device(x, 2) + table, jnp.sin(x) + table, called(jnp.cos(x))

    report = strategy.extended.trace(step, args=(x,)).placement()
    assert report.transfers == ()
    expected = x + table, np.sin(x) + table, np.cos(x) + 2 * table
    for found, wanted in zip(strategy.run(step, args=(x,)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_with_one_logical_device_nothing_changes(x):
    strategy = strategy_of(2, 1)
    result = strategy.run(lambda x: strategy.assign_to_logical_device(x, 0) * 2, args=(x,))
    np.testing.assert_array_equal(result, 2 * x)


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (4, ValueError, "no logical device 4: a replica has 4, with the ids 0 to 3"),
        (-1, ValueError, "no logical device -1"),
        ("1", TypeError, "must be an int, got '1'"),
        (True, TypeError, "must be an int, got True"),
    ],
)
def test_ids_are_checked(strategy, x, executor, number, error, message):
    def step(x):
        return strategy.assign_to_logical_device(x, number)

    with pytest.raises(error, match=message):
        strategy.run(step, args=(x,), options=replicax.RunOptions(executor))


def test_with_one_logical_device_the_id_is_checked(x):
    strategy = strategy_of(2, 1)
    with pytest.raises(ValueError, match="no logical device 1: a replica has 1"):
        strategy.run(lambda x: strategy.assign_to_logical_device(x, 1), args=(x,))


def test_outside_a_step_there_is_nothing_to_place(strategy, x):
    with pytest.raises(replicax.errors.ContextError, match="inside a step"):
        strategy.assign_to_logical_device(x, 1)


def test_operands_on_two_devices(strategy, x):
    def step(x):
        a = strategy.assign_to_logical_device(x, 1)
        b = strategy.assign_to_logical_device(x, 2)
        return a * b

    with pytest.raises(
        replicax.errors.PlacementError, match=r"(?s)mul at .*on two logical devices: on 1 .*on 2 .*unasked"
    ):
        strategy.run(step, args=(x,))


def test_operands_of_a_function_of_jaxs_own_have_the_users_line(strategy, x):
    def step(x):
        a = strategy.assign_to_logical_device(x, 1)
        b = strategy.assign_to_logical_device(x, 2)
        return jnp.where(x > 0, a, b)

    line = step.__code__.co_firstlineno + 3
    with pytest.raises(
        replicax.errors.PlacementError, match=rf"select_n at .*test_placement.py:{line} .* has operands"
    ):
        strategy.run(step, args=(x,))


def test_a_variable_on_two_devices(strategy, x):
    [w] = variables(strategy, 1)

    def step(x):
        return strategy.assign_to_logical_device(x @ w, 1) @ w

    with pytest.raises(
        replicax.errors.PlacementError, match=r"variable 'w0' .* lives there, as it is used at .*test_placement"
    ):
        strategy.run(step, args=(x,))
    assert homes([w]) == [None]  # as it was
    np.testing.assert_array_equal(w.numpy(), WEIGHTS[0])


def test_a_variable_that_has_a_home_stays_there(strategy, x):
    [w] = variables(strategy, 1)
    strategy.run(lambda x: strategy.assign_to_logical_device(x, 1) @ w, args=(x,))
    with pytest.raises(replicax.errors.PlacementError, match="on two logical devices"):
        strategy.run(lambda x: strategy.assign_to_logical_device(x, 2) @ w, args=(x,))
    assert where(strategy, strategy.run(lambda x: x @ w, args=(x,))) == 1  # what follows, follows it


def test_a_write_from_another_device(strategy, x):
    [w] = variables(strategy, 1)

    def step(x):
        y = strategy.assign_to_logical_device(x, 1) @ w
        w.assign(strategy.assign_to_logical_device(jnp.zeros((16, 16)) + x[:1], 2))
        return y

    with pytest.raises(replicax.errors.PlacementError, match=r"variable 'w0'.* logical device 2 .* but is on 1"):
        strategy.run(step, args=(x,))
    np.testing.assert_array_equal(w.numpy(), WEIGHTS[0])


def test_loops_and_branches_run_on_one_device(strategy, x):
    def scanned(x):
        return jax.lax.scan(lambda c, _: (strategy.assign_to_logical_device(c, 1), None), x, None, length=2)[0]

    def branching(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: strategy.assign_to_logical_device(x, 1), lambda: x)

    for step, name in ((scanned, "scan"), (branching, "cond")):
        with pytest.raises(replicax.errors.PlacementError, match=f"inside the {name} at .*in Python"):
            strategy.run(step, args=(x,))

    def whole(x):
        x = strategy.assign_to_logical_device(x, 1)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)[0]

    assert where(strategy, strategy.run(whole, args=(x,))) == 1


@pytest.mark.parametrize("branching", [lambda tx: optax.MultiSteps(tx, 2), lambda tx: optax.apply_if_finite(tx, 3)])
def test_an_optimizer_that_branches_over_the_parameters_of_all_stages_is_named(strategy, x, branching):
    w0, w1 = variables(strategy)
    with strategy.scope():
        optimizer = replicax.Optimizer(branching(optax.sgd(0.1)))

    def step(x):
        def loss():
            hidden = strategy.assign_to_logical_device(jnp.tanh(x @ w0), 1)
            return replicax.compute_average_loss(jnp.square(hidden @ w1).mean(-1))

        _, gradients = replicax.value_and_grad(loss, [w0, w1])()
        optimizer.apply_gradients(zip(gradients, [w0, w1], strict=True))

    before = w1.numpy()
    [x] = strategy.distribute_dataset([x])
    with jax.numpy_dtype_promotion("standard"):
        message = r"cond at .*\.step\) has operands on two logical devices.*, and a loop or branch runs on one device"
        with pytest.raises(replicax.errors.PlacementError, match=message):
            strategy.run(step, args=(x,))
    np.testing.assert_array_equal(w1.numpy(), before)


def test_a_step_splits_or_assigns(strategy, x):
    def step(x):
        return strategy.split_to_logical_devices(strategy.assign_to_logical_device(x, 1), [2, 2])

    with pytest.raises(replicax.errors.PlacementError, match="the one or the other"):
        strategy.run(step, args=(x,))

    with strategy.scope():
        w = replicax.Variable(WEIGHTS[0], name="w", partition_dimensions=[4, 1])
    with pytest.raises(replicax.errors.PlacementError, match=r"variable 'w' .* is split over the logical devices"):
        strategy.run(lambda x: strategy.assign_to_logical_device(x, 1) @ w, args=(x,))


def test_a_function_that_jax_keeps_assigns_values_of_one_device(strategy, x):
    @jax.jit
    def kept(x):
        return strategy.assign_to_logical_device(x, 1) * 2

    with pytest.raises(
        replicax.errors.PlacementError, match=r"function that JAX keeps.* from logical device 2 as well"
    ):
        strategy.run(lambda x: kept(strategy.assign_to_logical_device(x, 2)) + kept(x), args=(x,))


def test_mutable_arrays_are_refused(strategy, x):
    with pytest.raises(replicax.errors.PlacementError, match="mutable array"):
        strategy.run(lambda x: jax.new_ref(strategy.assign_to_logical_device(x, 1))[...], args=(x,))
