from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import logical_strategy, strategy_of


def ids(strategy):
    return strategy.distribute_values_from_function(lambda ctx: np.float32(1 + ctx.replica_id_in_sync_group))


def merged(strategy, fn, *args, options=None):
    """Call ``fn(strategy, *args)`` in a merge_fn, inside a step."""
    return strategy.run(lambda *a: replicax.get_replica_context().merge_call(fn, args=a), args=args, options=options)


executors = pytest.mark.parametrize("executor", ["compiled", "per_replica"])


def make(strategy, value=1.0, **options):
    with strategy.scope():
        return replicax.Variable(value, name="v", **options)


# --- reduce_to, batch_reduce_to, broadcast_to -----------------------------------------------------------


@pytest.mark.parametrize(
    ("destinations", "devices"),
    [(None, [0, 1]), ("cpu:3", [3]), (["cpu:5", "cpu:2"], [2, 5]), (["cpu:1", "cpu:0"], [0, 1])],
)
def test_reduce_to_devices(pair, destinations, devices) -> None:
    result = pair.extended.reduce_to("sum", {"x": ids(pair)}, destinations)["x"]
    assert float(result) == 3.0
    assert sorted(d.id for d in result.devices()) == devices
    assert sorted(d.id for d in pair.extended.broadcast_to(2.0, destinations).devices()) == devices


def test_reduce_to_where_something_is(pair) -> None:
    v = make(pair)
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[4])
    for destinations, devices in ((v, [0, 1]), (ids(pair), [0, 1]), (elsewhere, [4])):
        result = pair.extended.reduce_to("mean", ids(pair), destinations)
        assert float(result) == 1.5
        assert sorted(d.id for d in result.devices()) == devices


@executors
def test_reduce_to_inside_a_step(pair, executor) -> None:
    v = make(pair)
    options = replicax.RunOptions(executor)
    for where in (v, jnp.ones(2), ["cpu:1", "cpu:0"], pair.extended.worker_devices):
        total = merged(
            pair, lambda s, x, where=where: s.extended.reduce_to("sum", x, where), ids(pair), options=options
        )
        assert float(total) == 3.0
    with pytest.raises(ValueError, match="inside a step a result is on all replicas' devices.*id=3"):
        merged(pair, lambda s, x: s.extended.reduce_to("sum", x, "cpu:3"), ids(pair), options=options)


def test_batch_reduce_to_is_one_all_reduce(pair) -> None:
    def step(x):
        def merge(strategy, x):
            return strategy.extended.batch_reduce_to("sum", [({"a": x}, None), ([x, x], None)])

        return replicax.get_replica_context().merge_call(merge, args=(x,))

    first, second = pair.run(step, args=(ids(pair),))
    assert (float(first["a"]), [float(v) for v in second]) == (3.0, [3.0, 3.0])
    assert [c.kind for c in pair.extended.trace(step, args=(ids(pair),)).collectives()] == ["all-reduce"]
    assert pair.extended.batch_reduce_to("sum", []) == []


@pytest.mark.parametrize("op", ["only_first_replica", replicax.Aggregation.ONLY_FIRST_REPLICA])
def test_reduce_to_the_first_replicas_value(strategy, op) -> None:
    value = {"x": ids(strategy), "shared": 7.0}
    result = strategy.extended.reduce_to(op, value)  # destinations may be left out
    assert (float(result["x"]), result["shared"]) == (1.0, 7.0)
    assert result["x"].devices() == set(strategy.extended.worker_devices)
    [there] = strategy.extended.batch_reduce_to(op, [(ids(strategy), "cpu:5")])
    assert (float(there), [d.id for d in there.devices()]) == (1.0, [5])


@executors
def test_the_first_replicas_value_inside_a_step(pair, executor) -> None:
    def merge(strategy, x):
        return strategy.extended.batch_reduce_to("only_first_replica", [(x,), ([x, x], None)])

    first, [second, third] = merged(pair, merge, ids(pair), options=replicax.RunOptions(executor))
    assert [float(v) for v in (first, second, third)] == [1.0, 1.0, 1.0]


def test_the_first_replicas_value_of_different_shapes(pair) -> None:
    x = pair.distribute_values_from_function(lambda ctx: np.arange(3.0 + ctx.replica_id_in_sync_group))
    assert pair.extended.reduce_to("Only_First_Replica", x).shape == (3,)
    rows = replicax.IndexedSlices(ids_of_rows(pair, [[1.0], [2.0]]), ids_of_rows(pair, [3, 4]), (5,))
    first = pair.extended.reduce_to("only_first_replica", rows)
    assert (first.values.tolist(), first.indices.tolist()) == ([1.0], [3])


@pytest.mark.parametrize("options", [None, replicax.RunOptions("per_replica")], ids=["compiled", "per replica"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_first_replicas_random_keys_can_be_had_but_no_sum_of_keys(pair, shape, options) -> None:
    def keys(ctx):
        return jax.random.split(jax.random.key(ctx.replica_id_in_sync_group), shape)

    value = pair.distribute_values_from_function(keys)

    def inside(keys):
        ctx = replicax.get_replica_context()
        return ctx.merge_call(lambda s, v: s.extended.reduce_to("only_first_replica", v), args=(keys,))

    for first in (pair.extended.reduce_to("only_first_replica", value), pair.run(inside, (value,), options=options)):
        expected = jax.random.key_data(jax.random.split(jax.random.key(0), shape))
        np.testing.assert_array_equal(jax.random.key_data(first), expected)
    for op in ("sum", "mean"):
        with pytest.raises(TypeError, match="random keys can't be added up or averaged .*'only_first_replica'"):
            pair.reduce(op, value)


def ids_of_rows(strategy, rows):
    return strategy.distribute_values_from_function(lambda ctx: np.atleast_1d(rows[ctx.replica_id_in_sync_group]))


def test_reduce_to_has_the_rules_of_reduce(pair) -> None:
    with pytest.raises(ValueError, match=r"extended.reduce_to\('sum', …\) adds up.*all 2 replicas share"):
        pair.extended.reduce_to("sum", 1.0, None)
    with pytest.raises(ValueError, match="extended.reduce_to: the components have different shapes"):
        pair.extended.reduce_to(
            "sum", pair.distribute_values_from_function(lambda ctx: np.zeros(1 + ctx.replica_id_in_sync_group))
        )
    with pytest.raises(TypeError, match=r"value_destination_pairs\[1\] must be a pair \(value, destinations\), got 3"):
        pair.extended.batch_reduce_to("sum", [(ids(pair), None), 3])
    with pytest.raises(TypeError, match=r"batch_reduce_to: expected a list of pairs \(value, destinations\), got 3"):
        pair.extended.batch_reduce_to("sum", 3)
    with pytest.raises(TypeError, match="extended.reduce_to: destinations must be .* got 3"):
        pair.extended.reduce_to("sum", ids(pair), 3)
    assert pair.extended.reduce_to("mean", 1.0, None) == 1.0
    with pytest.raises(ValueError, match="must be 'sum', 'mean'"):
        pair.extended.reduce_to("max", ids(pair), None)
    with pytest.raises(replicax.errors.ContextError, match="belongs to"):
        pair.extended.reduce_to("sum", ids(pair), make(strategy_of(4)))
    with pytest.raises(TypeError, match="options must be CommunicationOptions or None"):
        pair.extended.reduce_to("sum", ids(pair), None, options={})


@executors
def test_broadcast_of_what_differs(pair, executor) -> None:
    with pytest.raises(TypeError, match=r"extended.broadcast_to: the value is PerReplica.*reduce it first"):
        pair.extended.broadcast_to(ids(pair))
    with pytest.raises(TypeError, match="reduce it first"):
        merged(pair, lambda s, x: s.extended.broadcast_to(x), ids(pair), options=replicax.RunOptions(executor))
    assert float(merged(pair, lambda s, x: s.extended.broadcast_to(s.reduce("sum", x)), ids(pair))) == 3.0
    assert merged(pair, lambda s: s.extended.broadcast_to(2.0), options=replicax.RunOptions(executor)).shape == ()


# --- update, update_non_slot ----------------------------------------------------------------------------


def test_update_outside_a_step(pair) -> None:
    v = make(pair)
    result = pair.extended.update(v, lambda v, x, *, y: v.assign_add(x * y), args=(2.0,), kwargs={"y": 3.0})
    assert result is v
    assert [float(x) for x in pair.local_results(v)] == [7.0, 7.0]


@executors
def test_the_pattern_of_the_documents(pair, executor) -> None:
    """Reduce the gradients to where the variables are, then update each."""
    a, b = make(pair, 1.0), make(pair, 2.0)

    def merge(strategy, grads):
        reduced = strategy.extended.batch_reduce_to("sum", list(zip(grads, (a, b), strict=True)))
        for v, g in zip((a, b), reduced, strict=True):
            strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(g,))

    def step(x):
        return replicax.get_replica_context().merge_call(merge, args=([x, 2 * x],))

    pair.run(step, args=(ids(pair),), options=replicax.RunOptions(executor))
    assert (float(a), float(b)) == (-2.0, -4.0)


@executors
@pytest.mark.parametrize("method", ["update", "update_non_slot", "merge_call"])
@pytest.mark.parametrize("args", [np.ones(1), np.float32(1), jnp.ones((1,)), {"x": 1}, "x", 3, {1}], ids=repr)
def test_args_are_a_tuple_or_a_list(pair, args, method, executor) -> None:
    """What merely can be gone through is not taken apart without a word."""
    v, called = make(pair), []

    def merge(strategy):
        call = getattr(strategy.extended, method)
        return call(v if method == "update" else None, lambda *a: called.append(a), args)

    def step():
        replica = replicax.get_replica_context()
        return (
            replica.merge_call(lambda *a: called.append(a), args)
            if method == "merge_call"
            else replica.merge_call(merge)
        )

    with pytest.raises(TypeError, match=rf"{method}\(.*\): args must be a tuple of arguments, got .*args=\(x,\)"):
        pair.run(step, options=replicax.RunOptions(executor))
    assert not called
    if method != "merge_call":
        with pytest.raises(TypeError, match="args must be a tuple"):
            merge(pair)


@pytest.mark.parametrize("method", ["run", "call_for_each_replica", "trace", "update", "update_non_slot", "merge_call"])
def test_functions_and_kwargs_are_checked_by_whoever_takes_them(pair, method) -> None:
    v = make(pair)
    calls = {
        "run": pair.run,
        "call_for_each_replica": pair.extended.call_for_each_replica,
        "trace": pair.extended.trace,
        "update": lambda *a: pair.extended.update(v, *a),
        "update_non_slot": lambda *a: pair.extended.update_non_slot(None, *a),
        "merge_call": replicax.get_replica_context().merge_call,
    }
    for kwargs in ([1], {1: 2}, np.ones(3)):
        with pytest.raises(TypeError, match=rf"{method}\(.*\): kwargs must be a dict from names to arguments"):
            calls[method](lambda *a: None, (), kwargs)
    with pytest.raises(TypeError, match=rf"{method}\(.*\): (merge_)?fn must be callable, got 3"):
        calls[method](3)


def test_update_lays_what_it_takes_and_gives_where_the_variable_is(pair) -> None:
    v = make(pair)
    elsewhere = jax.device_put(jnp.float32(2.0), jax.devices()[3])
    made, total = pair.extended.update(v, lambda v, x: (jnp.ones(2), v + x), args=(elsewhere,))
    assert float(total) == 3.0
    assert made.devices() == total.devices() == set(pair.extended.worker_devices)
    [counted, _] = pair.extended.update_non_slot(None, lambda x: x + 1, (elsewhere,), group=False)
    assert counted.devices() == set(pair.extended.worker_devices)
    central = replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:5")
    at_home = central.extended.update(make(central), lambda v, x: v + x, args=(elsewhere,))
    assert [d.id for d in at_home.devices()] == [5]


def test_group_false_gives_a_list_for_each_device(pair) -> None:
    v = make(pair)
    result = pair.extended.update(v, lambda v: {"v": v.assign(4.0), "n": 3}, group=False)
    assert result == {"v": [v, v], "n": [3, 3]}
    assert pair.extended.update_non_slot(pair.extended.non_slot_devices([v]), lambda x: x + 1, (1,), group=False) == [
        2,
        2,
    ]
    assert pair.extended.update_non_slot(v, lambda: 1, group=False) == [1, 1]
    central = replicax.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with central.scope():
        of_each = replicax.Variable(0.0, synchronization="on_read", aggregation="sum")
    assert central.extended.update(of_each, lambda v: 1, group=False) == [1, 1]
    of_four = make(logical_strategy(2, 2))
    assert of_four.strategy.extended.update(of_four, lambda v: 1, group=False) == [1, 1, 1, 1]


@executors
def test_update_wants_values_that_all_share(pair, executor) -> None:
    v = make(pair)
    with pytest.raises(TypeError, match=r"args\[0\] is PerReplica.*reduce it first"):
        pair.extended.update(v, lambda v, x: v.assign(x), args=(ids(pair),))
    with pytest.raises(TypeError, match="reduce it first"):
        merged(
            pair,
            lambda s, x: s.extended.update(v, lambda v, x: v.assign(x), args=(x,)),
            ids(pair),
            options=replicax.RunOptions(executor),
        )
    assert float(v) == 1.0


@executors
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda e, x: e.update_non_slot(e.parameter_devices, lambda y: y + 1, args=(x,)), r"args\[0\]"),
        (lambda e, x: e.broadcast_to(x), "the value"),
    ],
    ids=["update_non_slot", "broadcast_to"],
)
def test_what_differs_is_found_behind_the_back(pair, executor, call, what) -> None:
    def step(x):
        return replicax.get_replica_context().merge_call(lambda s: call(s.extended, x))

    with pytest.raises(replicax.errors.LocalityError, match=rf"{what} differs between replicas"):
        pair.run(step, args=(ids(pair),), options=replicax.RunOptions(executor))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e, v: e.update(3, lambda v: v), TypeError, "expected a Variable, got 3"),
        (lambda e, v: e.update(v, lambda v: v), replicax.errors.ContextError, "belongs to"),
        (lambda e, v: e.update_non_slot(["cpu:6"], lambda: 1), ValueError, "expected the result of non_slot_devices"),
        (lambda e, v: e.update_non_slot(v, lambda: 1), replicax.errors.ContextError, "belongs to"),
        (lambda e, v: e.non_slot_devices([v]), replicax.errors.ContextError, "belongs to"),
        (lambda e, v: e.non_slot_devices(v), TypeError, r"expected a list of variables, got .*of one: \[v\]"),
        (lambda e, v: e.non_slot_devices([3]), TypeError, "expected variables, got 3"),
    ],
)
def test_updates_that_are_off(pair, call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(pair.extended, make(strategy_of(4)))


@pytest.mark.parametrize("method", ["reduce_to", "batch_reduce_to", "broadcast_to", "update", "update_non_slot"])
def test_inside_a_replica_they_say_where_to_go(pair, method) -> None:
    v = make(pair)
    calls = {
        "reduce_to": lambda e, x: e.reduce_to("sum", x, None),
        "batch_reduce_to": lambda e, x: e.batch_reduce_to("sum", [(x, None)]),
        "broadcast_to": lambda e, x: e.broadcast_to(x),
        "update": lambda e, x: e.update(v, lambda v: v),
        "update_non_slot": lambda e, x: e.update_non_slot(None, lambda: 1),
    }
    with pytest.raises(replicax.errors.ContextError, match="called inside a replica. Inside a step use .*merge_call"):
        pair.run(lambda x: calls[method](pair.extended, x), args=(ids(pair),))


# --- the rest -------------------------------------------------------------------------------------------


def test_call_for_each_replica_is_run(pair) -> None:
    x = pair.extended.call_for_each_replica(lambda x, *, y: x + y, args=(ids(pair),), kwargs={"y": 1.0})
    assert [float(v) for v in pair.local_results(x)] == [2.0, 3.0]


def test_colocate_vars_with(pair) -> None:
    v = make(pair)
    with pair.scope(), pair.extended.colocate_vars_with(v):
        slot = replicax.Variable(0.0)
    with pair.scope(), pair.extended.colocate_vars_with(pair.extended.non_slot_devices([v])):
        count = replicax.Variable(0)
    assert slot.slot.array.sharding == count.slot.array.sharding == v.slot.array.sharding


def test_colocated_variables_lie_as_the_other_does() -> None:
    grid = logical_strategy(2, 4)
    with grid.scope():
        on_one = replicax.Variable(jnp.zeros(6), name="on one", logical_device=2)
        in_parts = replicax.Variable(jnp.zeros((4, 8)), name="in parts", partition_dimensions=[2, 2])
        with grid.extended.colocate_vars_with(on_one):
            number, own = replicax.Variable(0), replicax.Variable(0.0, synchronization="on_read", aggregation="sum")
        with grid.extended.colocate_vars_with(in_parts):
            same, wide, other = (replicax.Variable(jnp.zeros(s)) for s in ((4, 8), (8, 2), (3, 8)))
            with grid.extended.colocate_vars_with(on_one):  # the innermost counts
                inner = replicax.Variable(jnp.zeros((4, 8)))
        after = replicax.Variable(jnp.zeros((4, 8)))
    assert [v.layout.logical_device for v in (number, own, inner, after)] == [2, 2, 2, None]
    assert (own.is_stacked, number.slot.array.devices()) == (True, on_one.slot.array.devices())
    assert same.slot.array.sharding == in_parts.slot.array.sharding
    assert [v.layout.axes for v in (wide, other, after)] == [in_parts.layout.axes, (), ()]


def test_colocated_variables_are_in_pieces_as_the_other_is() -> None:
    sharded = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    large = np.zeros((512, 4), np.float32)
    with sharded.scope():
        v = replicax.Variable(large, name="v")
        with sharded.extended.colocate_vars_with(v):
            rows, step = replicax.Variable(np.zeros(512, np.float32)), replicax.Variable(0)
            short = replicax.Variable(np.ones((5, 4), np.float32))
            vector = replicax.Variable(np.ones(1, np.float32))
        with sharded.extended.colocate_vars_with(sharded.extended.non_slot_devices([v])):
            whole = replicax.Variable(large, name="whole")
        with sharded.extended.colocate_vars_with(step):
            also_whole = replicax.Variable(large)
    assert rows.layout == v.layout
    assert [type(u.layout).__name__ for u in (step, vector, whole, also_whole)] == ["Mirrored"] * 4
    assert (short.layout.dim, short.layout.piece) == (0, 3)
    np.testing.assert_array_equal(short.numpy(), np.ones((5, 4)))
    assert float(sharded.run(lambda: rows.assign(rows + 1).sum())) == 512.0


def test_colocated_variables_are_at_home_with_the_other() -> None:
    central = replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:5")
    with central.scope():
        v = replicax.Variable(1.0)
        with central.extended.colocate_vars_with(v):
            slot = replicax.Variable(jnp.zeros(3))
            copies = replicax.Variable(jnp.zeros(3), synchronization="on_read")
    assert [d.id for d in slot.slot.array.devices()] == [5]
    assert copies.is_stacked


@executors
def test_variables_colocated_inside_a_step(executor) -> None:
    sharded = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    with sharded.scope():
        v = replicax.Variable(jnp.zeros((512, 4)))
    slots = []

    def step():
        with sharded.extended.colocate_vars_with(v):
            slots.append(replicax.Variable(lambda: jnp.zeros((512, 600))))
        return replicax.Variable(lambda: jnp.zeros((512, 600))).layout.dim

    assert sharded.run(step, options=replicax.RunOptions(executor)) == 1  # by itself it is split by its larger dim
    assert slots[0].layout == v.layout


def test_colocating_in_the_wrong_place(pair) -> None:
    v, other = make(pair), make(strategy_of(4))
    with pytest.raises(replicax.errors.ContextError, match="colocate_vars_with of .* was called outside its scope"):
        pair.extended.colocate_vars_with(v)
    with pair.scope():
        with pytest.raises(ValueError, match="its variables are not on .*cpu:7'"):
            pair.extended.colocate_vars_with("cpu:7")
        with pytest.raises(ValueError, match="create it outside"), pair.extended.colocate_vars_with(v):
            replicax.variables.ShardedVariable(jnp.zeros((4, 4)))
        with pytest.raises(replicax.errors.ContextError, match="belongs to"):
            pair.extended.colocate_vars_with(other)
        assert replicax.Variable(0.0, logical_device=0).layout.logical_device is None


def test_read_var(pair) -> None:
    with pytest.raises(TypeError, match=r"read_var\(v\): expected a Variable, got 3.0"):
        pair.extended.read_var(3.0)
    v = make(pair, 4.0, synchronization="on_read", aggregation="sum")
    assert float(pair.extended.read_var(v)) == 8.0


@pytest.mark.usefixtures("young_heap")
def test_value_container(pair) -> None:
    x = ids(pair)
    first, second = pair.local_results(x)
    assert pair.extended.value_container(first) is x
    assert pair.extended.value_container(second) is x
    assert pair.extended.value_container(x) is x
    v = make(pair)
    assert pair.extended.value_container(v) is v
    del x
    gc.collect()
    assert pair.extended.value_container(first) is first


def test_hints(pair) -> None:
    extended = pair.extended
    assert extended.should_init
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert not extended.between_graph
    assert extended.experimental_should_init


def test_a_traced_step_is_shown_in_a_screenful(pair) -> None:
    with pair.scope():
        variables = [replicax.Variable(0.0, name=f"w{i}") for i in range(40)]

    def step(x, y):
        total = replicax.get_replica_context().all_reduce("sum", y)
        for variable in variables:
            variable.assign_add(total)
        return x * y, [total] * 20

    traced = pair.extended.trace(step, args=(jnp.ones(3), ids(pair)))
    shown = repr(traced).splitlines()
    assert shown[0] == "Executable of Program 'step' on 2 replica(s)"
    assert "  takes float32[3] (mirrored), float32[] (per_replica)" in shown
    assert f"  returns float32[3]{', float32[]' * 9}, and 11 more" in shown
    assert f"  localities of the results: per_replica{', mirrored' * 9}, and 11 more" in shown
    assert "  writes w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, and 30 more" in shown
    assert shown[-1] == "All operations: program.jaxpr; what each device runs: compiled_text(), collectives()"
    assert repr(traced.program).splitlines() == [shown[0].removeprefix("Executable of "), *shown[1:5]]
