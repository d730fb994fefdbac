from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of


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
    total = merged(pair, lambda s, x: s.extended.reduce_to("sum", x, v), ids(pair), options=options)
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


def test_reduce_to_has_the_rules_of_reduce(pair) -> None:
    with pytest.raises(ValueError, match="all 2 replicas share"):
        pair.extended.reduce_to("sum", 1.0, None)
    assert pair.extended.reduce_to("mean", 1.0, None) == 1.0
    with pytest.raises(ValueError, match="must be 'sum', 'mean'"):
        pair.extended.reduce_to("max", ids(pair), None)
    with pytest.raises(replicax.ContextError, match="belongs to"):
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


def test_group_false_gives_a_list_for_each_device(pair) -> None:
    v = make(pair)
    result = pair.extended.update(v, lambda v: {"v": v.assign(4.0), "n": 3}, group=False)
    assert result == {"v": [v, v], "n": [3, 3]}
    assert pair.extended.update_non_slot(pair.extended.non_slot_devices([v]), lambda x: x + 1, (1,), group=False) == [
        2,
        2,
    ]


@executors
def test_update_wants_values_that_all_share(pair, executor) -> None:
    v = make(pair)
    with pytest.raises(TypeError, match=r"argument \[0\]\[1\] is PerReplica.*reduce it first"):
        pair.extended.update(v, lambda v, x: v.assign(x), args=(ids(pair),))
    with pytest.raises(TypeError, match="reduce it first"):
        merged(
            pair,
            lambda s, x: s.extended.update(v, lambda v, x: v.assign(x), args=(x,)),
            ids(pair),
            options=replicax.RunOptions(executor),
        )
    assert float(v) == 1.0


def test_update_finds_what_differs_behind_its_back(pair) -> None:
    v = make(pair)
    held = []

    def step(x):
        held.append(x)
        return replicax.get_replica_context().merge_call(
            lambda s: s.extended.update_non_slot(s.extended.non_slot_devices([v]), lambda y: y + 1, args=(held[-1],))
        )

    with pytest.raises(replicax.LocalityError, match=r"update_non_slot: argument \[0\]\[0\] differs between replicas"):
        pair.run(step, args=(ids(pair),))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e, v: e.update(3, lambda v: v), TypeError, "expected a Variable, got 3"),
        (lambda e, v: e.update(v, lambda v: v), replicax.ContextError, "belongs to"),
        (lambda e, v: e.update_non_slot(["cpu:6"], lambda: 1), ValueError, "expected what non_slot_devices returned"),
        (lambda e, v: e.non_slot_devices([v]), replicax.ContextError, "belongs to"),
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
    with pytest.raises(replicax.ContextError, match="called inside one. Inside a step use .*merge_call"):
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
    with pytest.raises(ValueError, match="is not where"), pair.extended.colocate_vars_with("cpu:7"):
        pass
    with (
        pytest.raises(replicax.ContextError, match="belongs to"),
        pair.extended.colocate_vars_with(make(strategy_of(4))),
    ):
        pass


def test_read_var(pair) -> None:
    v = make(pair, 4.0, synchronization="on_read", aggregation="sum")
    assert float(pair.extended.read_var(v)) == 8.0


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
