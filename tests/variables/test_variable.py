from __future__ import annotations

import concurrent.futures
import copy
import pickle
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.conftest import strategy_of
from tests.soaking import soak_except

# The table of docs/variables.md: two replicas, initial value 10; in a step, replica i assigns i + 1.
# synchronization, aggregation, after a cross assign of 6, after the step's assign, cross read afterwards
TABLE = [
    ("on_write", "none", [6, 6], replicax.errors.LocalityError, None),
    ("on_write", "sum", [6, 6], [3, 3], 3),
    ("on_write", "mean", [6, 6], [1.5, 1.5], 1.5),
    ("on_write", "only_first_replica", [6, 6], [1, 1], 1),
    ("on_read", "none", [6, 6], [1, 2], replicax.errors.LocalityError),
    ("on_read", "sum", [3, 3], [1, 2], 3),
    ("on_read", "mean", [6, 6], [1, 2], 1.5),
    ("on_read", "only_first_replica", [6, 6], [1, 2], 1),
]
table = pytest.mark.parametrize(
    ("synchronization", "aggregation", "across", "inside", "read"), TABLE, ids=[f"{r[0]}-{r[1]}" for r in TABLE]
)


def make(strategy: replicax.Strategy, value=10.0, **options) -> replicax.Variable:
    with strategy.scope():
        return replicax.Variable(value, name="v", **options)


def copies(v: replicax.Variable) -> list[float]:
    return [float(x) for x in v.strategy.local_results(v)]


def one_based() -> jax.Array:
    replica = replicax.get_replica_context()
    assert replica is not None
    return jnp.float32(replica.replica_id_in_sync_group + 1)


@table
def test_the_table(pair, synchronization, aggregation, across, inside, read) -> None:
    v = make(pair, synchronization=synchronization, aggregation=aggregation)
    assert copies(v) == [10, 10]
    if isinstance(inside, list):
        pair.run(lambda: v.assign(one_based()))
        assert copies(v) == inside
        if isinstance(read, type):
            with pytest.raises(read, match="local_results"):
                v.read_value()
        else:
            assert float(v.read_value()) == read
            # in a merge_fn, which looks across as well, inside a step
            merged = pair.run(lambda: replicax.get_replica_context().merge_call(lambda s: v.read_value()))
            assert float(merged) == read
    else:
        with pytest.raises(inside, match="'v'.*no aggregation.*Reduce the value first"):
            pair.run(lambda: v.assign(one_based()))
        assert copies(v) == [10, 10]
    v.assign(6.0)
    assert copies(v) == across
    with pair.scope():
        v.assign(8.0)
    assert sum(copies(v)) == sum(across) * 8 / 6


# After the step's assign_add of i + 1 to 10, and after a cross assign_add of 4 to that.
ADDED = {
    ("on_write", "sum"): ([13, 13], [17, 17]),
    ("on_write", "mean"): ([11.5, 11.5], [15.5, 15.5]),
    ("on_write", "only_first_replica"): ([11, 11], [15, 15]),
    ("on_read", "none"): ([11, 12], [15, 16]),
    ("on_read", "sum"): ([11, 12], ValueError),
    ("on_read", "mean"): ([11, 12], [15, 16]),
    ("on_read", "only_first_replica"): ([11, 12], [15, 16]),
}
QUICK = {("on_write", "mean"), ("on_read", "none"), ("on_read", "sum")}


@pytest.mark.parametrize(
    ("kind", "expected"),
    soak_except(ADDED.items(), *(item for item in ADDED.items() if item[0] in QUICK)),
    ids=[f"{a}-{b}" for a, b in ADDED],
)
def test_assign_add_and_sub(pair, kind, expected) -> None:
    v = make(pair, synchronization=kind[0], aggregation=kind[1])
    pair.run(lambda: v.assign_add(one_based()))
    assert copies(v) == expected[0]
    if expected[1] is ValueError:
        with pytest.raises(ValueError, match="assign_add in cross-replica context does not say which"):
            v.assign_add(4.0)
        with pytest.raises(ValueError, match="assign_sub in cross-replica context"):
            v.assign_sub(4.0)
    else:
        v.assign_add(4.0)
        assert copies(v) == expected[1]
        v.assign_sub(4.0)
    pair.run(lambda: v.assign_sub(one_based()))
    assert copies(v) == [10, 10]


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_a_value_that_replicas_share(pair, aggregation) -> None:
    v = make(pair, aggregation=aggregation)
    pair.run(lambda: v.assign(4.0))
    assert copies(v) == ([8, 8] if aggregation == "sum" else [4, 4])


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_one_replica_is_an_ordinary_variable(synchronization, aggregation) -> None:
    one = strategy_of(1)
    v = make(one, synchronization=synchronization, aggregation=aggregation)
    one.run(lambda: v.assign(one_based() + 1))
    assert float(v.value) == 2.0
    v.assign_add(3.0)
    assert float(v.value) == 5.0


def test_reads_are_mirrored_or_per_replica(pair) -> None:
    on_write, on_read = make(pair), make(pair, synchronization="on_read")
    program = pair.extended.trace(lambda: (on_write + 1, on_read + 1))
    assert [x.value for x in program.localities] == ["M", "T"]


def test_across_a_per_replica_value_is_refused(pair) -> None:
    v = make(pair, aggregation="mean")
    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    with pytest.raises(replicax.errors.LocalityError, match="'v'.*one value for each replica"):
        v.assign(x)
    with pytest.raises(replicax.errors.LocalityError, match="'v'.*one value for each replica"):
        pair.run(lambda x: replicax.get_replica_context().merge_call(lambda s, x: v.assign(x), args=(x,)), args=(x,))
    assert copies(v) == [10, 10]


def test_across_inside_a_step_all_must_agree(pair) -> None:
    v = make(pair)

    def merge(strategy, x):
        v.assign(strategy.reduce("sum", x))

    pair.run(lambda: replicax.get_replica_context().merge_call(merge, args=(one_based(),)))
    assert copies(v) == [3, 3]


# --- creation -------------------------------------------------------------------------------------------


def test_a_callable_is_initialised_on_its_placement(strategy) -> None:
    v = make(strategy, lambda: jax.random.normal(jax.random.key(3), (4, 5)))
    assert v.slot.array.devices() == set(strategy.extended.worker_devices)
    np.testing.assert_array_equal(v.numpy(), jax.random.normal(jax.random.key(3), (4, 5)))


@pytest.mark.parametrize(
    ("value", "dtype"), [(1, jnp.int32), (1.0, jnp.float32), (True, jnp.bool_), (np.float16(1), jnp.float16)]
)
def test_the_dtype_is_that_of_the_value(value, dtype) -> None:
    assert replicax.Variable(value).dtype == dtype
    assert replicax.Variable(value, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert replicax.Variable(lambda: jnp.asarray(value), dtype=jnp.bfloat16).dtype == jnp.bfloat16
    large = np.full(1 << 16, value)
    assert replicax.Variable(large).dtype == dtype
    assert replicax.Variable(large, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_trainable_and_name() -> None:
    assert replicax.Variable(1.0).trainable
    assert not replicax.Variable(1.0, trainable=False).trainable
    assert not replicax.Variable(1.0, synchronization="on_read").trainable
    assert replicax.Variable(1.0).name != replicax.Variable(1.0).name
    with pytest.raises(ValueError, match="on-read variable can't be trainable"):
        replicax.Variable(1.0, synchronization="on_read", trainable=True)


@pytest.mark.parametrize("option", ["synchronization", "aggregation"])
def test_unknown_options_are_listed(option) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*got 'sometimes'"):
        replicax.Variable(1.0, **{option: "sometimes"})


def test_options_as_enums_and_in_other_spellings() -> None:
    v = replicax.Variable(1.0, synchronization="ON-READ", aggregation=replicax.Aggregation.MEAN)
    assert v.synchronization is replicax.Synchronization.ON_READ
    assert v.aggregation is replicax.Aggregation.MEAN


def test_keys_can_not_be_combined() -> None:
    with pytest.raises(ValueError, match="random keys can't be combined"):
        replicax.Variable(jax.random.key(0), aggregation="sum")


def test_the_mean_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="mean of int32 values"):
        replicax.Variable(1, aggregation="mean")


# --- creation inside a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_step_creates_its_variables_once(strategy, executor) -> None:
    made = []

    def step(x):
        w = replicax.Variable(lambda: jax.random.normal(jax.random.key(len(made)), (2,)), name="w")
        count = replicax.Variable(0, name="count")
        made.append(w)
        count.assign_add(1)
        return count.value, w * x

    options = replicax.RunOptions(executor)
    for expected, x in enumerate([1.0, 2.0, 3, 4], start=1):  # the int makes another program
        count, value = strategy.run(step, args=(x,), options=options)
        assert int(count) == expected
        np.testing.assert_allclose(value, made[0].numpy() * x, rtol=1e-6)
    assert all(w is made[0] for w in made)
    assert made[0].strategy is strategy


def test_threads_share_what_a_step_creates(pair) -> None:
    def slow_zero():
        time.sleep(0.1)
        return jnp.zeros(())

    def step():
        count = replicax.Variable(slow_zero)
        count.assign_add(1.0)
        return count.value

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: pair.run(step), range(9)))
    assert float(pair.run(step)) == 10.0


def test_executors_share_what_a_step_creates(pair) -> None:
    def step():
        return replicax.Variable(0.0, name="total").assign_add(1.0).value

    assert float(pair.run(step)) == 1.0
    with replicax.debug():
        assert float(pair.run(step)) == 2.0
    assert float(pair.run(step)) == 3.0


def test_two_models_with_the_same_code_have_their_own(pair) -> None:
    def model(start):
        return lambda: replicax.Variable(start).assign_add(1.0).value

    first, second = model(10.0), model(20.0)
    assert [float(pair.run(f)) for f in (first, second, first, second)] == [11, 21, 12, 22]


def test_a_step_keeps_its_variables_when_a_number_that_it_captures_changes(pair) -> None:
    rate, numbers, settings = 1.0, np.zeros(2), {"scale": 1.0}

    def step():
        total = replicax.Variable(0.0, name="total")
        total.assign_add(rate * settings["scale"] + numbers[0])
        return total.value

    found = [float(pair.run(step))]
    rate = np.float32(2.0)
    found.append(float(pair.run(step)))
    settings["scale"] = 10.0
    found.append(float(pair.run(step)))
    with replicax.debug():
        numbers = np.ones(2)
        found.append(float(pair.run(step)))
    assert found == [1.0, 3.0, 23.0, 44.0]


def test_a_step_creates_other_variables_for_another_object_that_it_captures(pair) -> None:
    class Model:
        total = None

        def __call__(self):
            if self.total is None:
                self.total = replicax.Variable(0.0, name="total")
            return self.total.assign_add(1.0).value

    def step():
        return model()

    model = Model()
    assert [float(pair.run(step)) for _ in range(2)] == [1.0, 2.0]
    model = Model()
    assert float(pair.run(step)) == 1.0


def test_created_inside_a_gradient(pair) -> None:
    def step(x):
        def loss():
            stat = replicax.Variable(0.0, name="stat", aggregation="sum")
            stat.assign_add(x)
            return x * x + 0 * stat

        return replicax.value_and_grad(loss, [])()[0]

    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    for _ in range(2):
        assert [float(v) for v in pair.local_results(pair.run(step, args=(x,)))] == [1.0, 1.0]


def test_not_from_what_a_step_computes(pair) -> None:
    with pytest.raises(TypeError, match="initial value is computed by the step"):
        pair.run(lambda x: replicax.Variable(x), args=(1.0,))


def test_it_takes_no_part_in_its_initial_array(pair) -> None:
    initial = jax.device_put(jnp.ones(3), jax.NamedSharding(pair.extended.mesh, jax.P()))
    a, b = make(pair, initial), make(pair, initial)
    array = np.ones(3, np.float32)
    c = make(pair, array)
    array[:] = 7

    def step() -> None:
        for v in (a, b, c):
            v.assign_add(jnp.ones(3))

    pair.run(step)
    for v in (a, b, c):
        np.testing.assert_array_equal(v.numpy(), [2, 2, 2])
    np.testing.assert_array_equal(initial, [1, 1, 1])


def test_a_random_key_can_be_a_variable(pair) -> None:
    key = make(pair, jax.random.key(0))

    def step():
        ours, rest = jax.random.split(key.value)
        key.assign(rest)
        return jax.random.uniform(ours)

    first, second = float(pair.run(step)), float(pair.run(step))
    assert first != second
    assert "key" in repr(key)


# --- assigning ------------------------------------------------------------------------------------------


def test_another_shape_is_refused() -> None:
    v = replicax.Variable(jnp.zeros(3), name="v")
    with pytest.raises(ValueError, match=r"'v' \(float32\[3\]\) was assigned a value of shape \(2,\); expected \(3,\)"):
        v.assign(jnp.ones(2))


def test_a_dtype_of_another_kind_is_refused() -> None:
    v = replicax.Variable(1, name="v")
    with pytest.raises(TypeError, match="dtype float32, which does not cast to int32"):
        v.assign(jnp.float32(1.5))
    w = replicax.Variable(jnp.bfloat16(1), name="w")
    w.assign(jnp.float32(1.5))
    w.assign(2)
    assert w.dtype == jnp.bfloat16
    for assign in (w.assign, w.assign_add, lambda number: strategy_of(1).run(w.assign, args=(number,))):
        with pytest.raises(TypeError, match="dtype complex64, which does not cast to bfloat16"):
            assign(1 + 2j)
    with pytest.raises(TypeError, match="dtype key<fry>, which does not cast to bfloat16"):
        w.assign(jax.random.key(0))
    assert w.numpy() == 2
    with pytest.raises(TypeError) as error:
        replicax.Variable(1j, name="z", dtype=jnp.float32)
    assert error.value.__notes__ == ["(raised for variable 'z': the initial value)"]


def test_swapping_two_variables(pair) -> None:
    a, b = make(pair, 1.0), make(pair, 2.0)

    def swap() -> None:
        old = a.value
        a.assign(b)
        b.assign(old)

    for expected in ((2, 1), (1, 2), (2, 1)):
        pair.run(swap)
        assert (float(a), float(b)) == expected


def test_two_variables_never_share_a_buffer(pair) -> None:
    a, b = make(pair, 1.0), make(pair, 2.0)
    x = jnp.float32(5)

    def both(x) -> None:
        a.assign(x)
        b.assign(x)

    pair.run(both, args=(x,))
    pair.run(lambda: (a.assign_add(1.0), b.assign_add(2.0)))
    assert (float(a), float(b), float(x)) == (6, 7, 5)


def test_a_value_read_outside_stays_valid(strategy) -> None:
    v = make(strategy, jnp.ones(3))
    before = v.value
    strategy.run(lambda: v.assign_add(jnp.ones(3)))
    strategy.run(lambda: v.assign_add(jnp.ones(3)))
    np.testing.assert_array_equal(before, [1, 1, 1])
    np.testing.assert_array_equal(v.value, [3, 3, 3])


# --- acting like an array -------------------------------------------------------------------------------

OPERATORS = [
    lambda v: v + 2.0,
    lambda v: 2.0 - v,
    lambda v: v * v,
    lambda v: v / 2.0,
    lambda v: 2.0 / v,
    lambda v: v // 2.0,
    lambda v: v % 2.0,
    lambda v: v**2.0,
    lambda v: v @ v,
    lambda v: jnp.ones(3) @ v,
    lambda v: np.ones(3, np.float32) * v,
    lambda v: -v,
    lambda v: abs(v),
    lambda v: v > 1.0,
    lambda v: v == 2.0,
    lambda v: v != 2.0,
    lambda v: v[1:],
    lambda v: v[0],
    lambda v: v.sum(),
    lambda v: v.T,
    lambda v: v.astype(jnp.int32),
    lambda v: v.at[0].set(5.0),
    lambda v: jnp.exp(v),
    lambda v: jnp.dot(v, v),
    lambda v: jnp.stack([v, v]),
    lambda v: jnp.where(v > 1, v, 0.0),
    lambda v: jax.nn.relu(v),
    lambda v: jax.tree.map(lambda x: x * 2, {"v": v})["v"],
    lambda v: jax.grad(lambda x: jnp.sum(x * x))(v),
]


def test_it_acts_like_its_value() -> None:
    value = np.array([1.0, 2.0, 3.0], np.float32)
    pair, outside = strategy_of(2), replicax.Variable(value)
    v = make(pair, value)
    expected = [use(jnp.asarray(value)) for use in OPERATORS]
    *others, gradient = OPERATORS  # which is a step of its own: derivatives beside captured arrays are warned of
    inside = [*pair.run(lambda: [use(v) for use in others]), pair.run(lambda: gradient(v))]
    for number, (use, wanted) in enumerate(zip(OPERATORS, expected, strict=True)):
        np.testing.assert_allclose(use(outside), wanted, rtol=1e-6, err_msg=f"operator {number}")
        np.testing.assert_allclose(inside[number], wanted, rtol=1e-6, err_msg=f"operator {number}")


def test_conversions() -> None:
    v = replicax.Variable(2.0)
    assert (float(v), int(v), bool(v), v.shape, v.ndim, v.size) == (2.0, 2, True, (), 0, 1)
    assert np.asarray(v) == complex(v) == 2.0
    own = np.array(v)  # which NumPy lets its owner change
    own[...] = 5.0
    assert len(replicax.Variable(jnp.zeros(4))) == 4
    with pytest.raises(TypeError, match="has no len"):
        len(v)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = v.nonsense
    assert [10, 20, 30][replicax.Variable(1)] == 20


def test_it_ends_when_iterated() -> None:
    v = replicax.Variable([1.0, 2.0, 3.0])
    assert [float(x) for x in v] == [1, 2, 3]
    assert [float(x) for x in reversed(v)] == [3, 2, 1]
    a, _, c = v
    assert float(a + c) == 4.0
    assert f"{replicax.Variable(2.5):.2f}" == "2.50"


def test_a_counter_is_shared_out_exactly(pair) -> None:
    v = make(pair, 0, synchronization="on_read", aggregation="sum")
    v.assign(7)
    assert copies(v) == [4, 3]
    assert int(v) == 7
    pair.run(lambda: replicax.get_replica_context().merge_call(lambda s: v.assign(5)))
    assert copies(v) == [3, 2]
    with pytest.raises(replicax.errors.TraceError, match="variable 'v' .* was written inside a raw JAX transformation"):
        jax.vmap(lambda x: (v.assign(x), x)[1])(jnp.arange(2))


def test_on_read_variables_reduce_like_what_they_hold(pair) -> None:
    v = make(pair, synchronization="on_read", aggregation="mean")
    pair.run(lambda: v.assign(one_based()))
    assert float(pair.reduce("sum", {"v": v})["v"]) == 3.0
    with strategy_of(4).scope(), pytest.raises(replicax.errors.ContextError, match="mixing .* using variable 'v'"):
        v.read_value()
    assert [float(tree["v"]) for tree in pair.local_results({"v": v})] == [1.0, 2.0]


def test_an_initialiser_runs_once_and_may_read_variables(pair) -> None:
    calls = []
    w = make(pair, 3.0)
    v = make(pair, lambda: (calls.append(1), w.value * 2)[1])
    assert float(v) == 6.0
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [object, str, "datetime64[s]", "float33"])
def test_a_dtype_without_numbers_is_named(dtype) -> None:
    with pytest.raises(TypeError, match="variable 'v': there are no arrays of the dtype"):
        replicax.Variable(1.5, name="v", dtype=dtype)


def test_in_place_operators_say_what_to_use() -> None:
    v = replicax.Variable(2.0)
    with pytest.raises(TypeError, match="use assign, assign_add or assign_sub"):
        v += 1.0


def test_it_can_be_a_key_but_not_a_copy() -> None:
    v = replicax.Variable(2.0)
    assert {v: 1}[v] == 1
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"can't be copied or pickled, .*: make another .* variable.numpy\(\), or"):
            copier(v)


def test_what_belongs_to_one_process_is_not_pickled(pair) -> None:
    optimizer = replicax.Optimizer(optax.sgd(0.1))
    dataset = pair.distribute_dataset([np.ones(2)])
    for value, message in [
        (pair, r"MirroredStrategy\(.*: make another strategy in the other process"),
        (optimizer, r"Optimizer 'optimizer' can't be .*: save its state with replicax.Checkpoint\(opt"),
        (dataset, "a DistributedDataset can't be .*: distribute the dataset itself in the other process"),
        (iter(dataset), r"a DistributedIterator can't be .*: keep its place, iterator.get_state\(\)"),
        ({"mean": replicax.Mean("loss")}, "variable 'loss/total' .* can't be copied or pickled"),
    ]:
        with pytest.raises(TypeError, match=message):
            pickle.dumps(value)


def test_it_can_be_waited_for(pair) -> None:
    v = make(pair, 1.0)
    pair.run(lambda: v.assign_add(1.0))
    assert v.block_until_ready() is v
    assert float(v) == 2.0
    pair.run(lambda: v.assign_add(v.block_until_ready().value))
    assert float(v) == 4.0
    v.value.delete()
    with pytest.raises(replicax.errors.VariableLostError):
        v.block_until_ready()
    assert repr(v) == "<Variable 'v' float32[] mirrored on 2 replicas: no value any more>"


def test_in_notebooks(pair) -> None:
    shown = make(pair)._repr_html_()
    assert shown == "<code>Variable &#x27;v&#x27; float32[] mirrored on 2 replicas</code><pre>10.</pre>"


def test_repr(pair) -> None:
    assert repr(make(pair)) == "<Variable 'v' float32[] mirrored on 2 replicas: 10.>"
    assert repr(make(pair, np.eye(2))) == "<Variable 'v' float32[2,2] mirrored on 2 replicas:\n[[1. 0.]\n [0. 1.]]>"
    assert "a copy on each of 2 replicas: [10. 10.]" in repr(make(pair, synchronization="on_read"))
    assert "on one device" in repr(replicax.Variable(1.0))
    with pair.scope():
        empty = replicax.Variable(np.zeros((0, 2)), synchronization="on_read")
    pair.run(lambda: empty.assign(empty * 2))
    assert "float32[0,2] a copy on each of 2 replicas: []" in repr(empty)
    seen = []
    v = make(pair)
    pair.run(lambda: seen.append(repr(v)))
    assert "before the step" in seen[0]


def test_the_initial_value_is_one_for_all(pair) -> None:
    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    with pytest.raises(
        replicax.errors.LocalityError, match="variable 'v': the initial value must be the same on every replica"
    ):
        make(pair, x)


def test_a_random_key_is_assigned_from_across_too(pair) -> None:
    v = make(pair, jax.random.key(0))
    v.assign(jax.random.key(1))
    pair.run(lambda: v.assign(jax.random.split(v.value)[0]), options=replicax.RunOptions(executor="per_replica"))
    expected = jax.random.split(jax.random.key(1))[0]
    np.testing.assert_array_equal(jax.random.key_data(v.value), jax.random.key_data(expected))


def test_reading_while_other_threads_run_steps(pair) -> None:
    v = make(pair, jnp.zeros(2000))
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            pair.run(step)

    def step():
        v.assign_add(jnp.ones(2000))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = [v.numpy() for _ in range(300)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert all((value == value[0]).all() for value in found)
    assert [value[0] for value in found] == sorted(value[0] for value in found)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("where", ["cpu:0", "cpu:1", "both", "split"])
def test_an_array_that_was_assigned_stays_its_owners(replicas, where):
    """A step is given the memory of the variables that it changes, not that of what has been assigned to them."""
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    both, split = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("x",)))
    place = {"cpu:0": devices[0], "cpu:1": devices[1], "both": both, "split": split}[where]
    given = [jax.device_put(jnp.full(4, float(i)), place) for i in range(4)]
    with strategy.scope():
        a, b, c = (replicax.Variable(jnp.zeros(4)) for _ in range(3))
        made = replicax.Variable(given[3])
    a.assign(given[0])
    replicax.assign([b, c], given[1:3])
    strategy.run(lambda: [v.assign_add(jnp.ones(4)).value for v in (a, b, c, made)])
    assert [array.tolist() for array in given] == [[float(i)] * 4 for i in range(4)]
    assert [v.numpy().tolist() for v in (a, b, c, made)] == [[i + 1.0] * 4 for i in range(4)]
