from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.values import Components, PerReplica, regroup, unwrap
from tests.conftest import shared_strategy, strategy_of


def test_regroup_keeps_what_is_the_same_object() -> None:
    shared = object()
    merged = regroup([(shared, 1.5, [None]), (shared, 2.5, [None])])
    assert merged[0] is shared
    assert merged[1].values == (1.5, 2.5)
    assert merged[2] == [None]


def test_regroup_of_one_variable_is_that_variable(pair: replicax.Strategy) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    assert regroup([v, v]) is v
    assert isinstance(regroup([v, v], always_wrap=True), PerReplica)


def test_regroup_names_the_replica_that_differs() -> None:
    with pytest.raises(ValueError, match="replica 2 has"):
        regroup([[1], [2], [1, 2]])


def test_components_lie_on_their_replicas_devices(pair: replicax.Strategy) -> None:
    x = pair.distribute_values_from_function(lambda ctx: np.full(3, ctx.replica_id_in_sync_group))
    first, second = x.values
    assert first.devices() == {jax.devices()[0]}
    assert second.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(second, [1, 1, 1])


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: round(x, 3),
        lambda x: 1 in x,
        lambda x: 1 - x,
        lambda x: x @ x,
        lambda x: -x,
        lambda x: x[0],
        lambda x: x < 1,
        lambda x: x == 1,
        lambda x: x == 1j,
        lambda x: x != copy.copy(x),
        bool,
        float,
        len,
        iter,
        np.asarray,
        jnp.sin,
        lambda x: jnp.stack([x, x]),
    ],
)
def test_it_is_no_array(pair: replicax.Strategy, use) -> None:
    x = pair.distribute_values_from_function(lambda ctx: 1.0)
    with pytest.raises((TypeError, replicax.errors.LocalityError), match=r"^PerReplica\(.*strategy.local_results"):
        use(x)
    assert x == x
    assert x in ["mean", x]
    assert len({x, x}) == 1


def test_repr_says_what_it_holds(pair: replicax.Strategy) -> None:
    x = pair.distribute_values_from_function(lambda ctx: np.zeros((2, 3), np.int32))
    assert repr(x) == "PerReplica(int32[2,3], 2 replicas)"
    assert repr(PerReplica(Components(("a", "b")))) == "PerReplica('a', 'b')"


def each(strategy: replicax.Strategy, *values) -> PerReplica:
    return strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])


def test_repr_shows_small_values(pair: replicax.Strategy) -> None:
    x = each(pair, 0.5, 2.0)
    assert repr(x) == "PerReplica(float32[], 2 replicas: 0.5, 2.0)"
    assert repr(each(pair, np.array([1, 2]), np.array([3, 4]))) == "PerReplica(int32[2], 2 replicas: [1 2], [3 4])"
    assert repr(each(pair, *np.zeros((2, 9)))) == "PerReplica(float32[9], 2 replicas)"  # they are many
    assert "2 replicas)" in repr(each(pair, jax.random.key(0), jax.random.key(1)))
    here = PerReplica(Components((jnp.float32(1.5), jnp.float32(3)), (2, 3), 5))
    assert repr(here) == "PerReplica(2: float32[], 3: float32[]; 5 replicas: 1.5, 3.0)"
    with_repr = jax.make_jaxpr(lambda y: y if "0.5, 2.0" in repr(x) else None)
    assert len(with_repr(1.0).eqns) == 0  # nothing of it is traced
    assert x._repr_html_().count("<tr>") == 3
    x.form.array.delete()
    assert repr(x) == "PerReplica(float32[], 2 replicas)"
    assert x._repr_html_() == "<code>PerReplica(float32[], 2 replicas)</code>"


def test_each_replica_has_one_component_without_elements(pair: replicax.Strategy) -> None:
    x = pair.run(lambda x: x[:0], args=(each(pair, *np.zeros((2, 3))),))
    assert [component.shape for component in pair.local_results(x)] == [(0,), (0,)]
    assert repr(x) == "PerReplica(float32[0], 2 replicas: [], [])"


def test_it_is_formatted_as_a_number_where_there_is_one(pair: replicax.Strategy) -> None:
    same, differ = each(pair, 0.25, 0.25), each(pair, 0.25, 0.5)
    assert (f"{same:.3f}", f"{same:>8.2%}") == ("0.250", "  25.00%")
    assert f"{each(pair, np.nan, np.nan):.1f}" == "nan"
    assert f"{differ}" == str(differ) == "PerReplica(float32[], 2 replicas: 0.25, 0.5)"
    with pytest.raises(TypeError, match=r"0.5\) has a value for each replica, so '.3f' .*strategy.reduce\('mean'"):
        f"{differ:.3f}"
    with pytest.raises(TypeError, match=r"so '.3f' can't format it as one number"):
        f"{each(pair, np.ones(2), np.ones(2)):.3f}"
    with pytest.raises(TypeError, match="so '.3f' can't format it as one number"):  # other workers may have others
        f"{PerReplica(Components((1.0,), (0,), 2)):.3f}"
    assert f"{PerReplica(Components((1.0,))):.3f}" == "1.000"
    with pytest.raises(TypeError, match="can't be formatted as '.3f' inside a step"):
        pair.run(lambda: replicax.get_replica_context().merge_call(lambda s, v: f"{v:.3f}", args=(jnp.zeros(()),)))


def test_repr_is_short_whatever_it_holds(pair: replicax.Strategy) -> None:
    uneven = pair.distribute_values_from_function(lambda ctx: np.zeros(2000 + ctx.replica_id_in_sync_group))
    assert repr(uneven) == "PerReplica(float32[2000], float32[2001])"
    some = PerReplica(Components((np.zeros((9, 9)), jnp.float32(3)), (2, 3), 5))
    assert repr(some) == "PerReplica(2: float64[9,9], 3: float32[]; 5 replicas)"
    objects = PerReplica(Components(("x" * 1000, 1.5)))
    assert repr(objects) == f"PerReplica('{'x' * 58}…, 1.5)"
    many = PerReplica(Components(tuple(range(100))))
    assert repr(many) == "PerReplica(0, 1, 2, 3, …, 98, 99)"
    with replicax.debug():
        shown = pair.run(
            lambda: replicax.get_replica_context().merge_call(lambda s, v: repr(v), args=(jnp.zeros(999),))
        )
    assert shown == "PerReplica(float32[999] on this replica)"


def test_values_from_function_wraps_a_single_replica_too() -> None:
    one = replicax.OneDeviceStrategy("cpu:0")
    x = one.distribute_values_from_function(lambda ctx: {"n": ctx.num_replicas_in_sync})
    assert isinstance(x["n"], PerReplica)
    assert int(one.run(lambda x: x["n"] + 1, args=(x,))) == 2


def test_values_from_function_of_different_sizes(pair: replicax.Strategy) -> None:
    x = pair.distribute_values_from_function(lambda ctx: jnp.arange(1.0 + ctx.replica_id_in_sync_group)[None])
    assert [v.tolist() for v in pair.local_results(x)] == [[[0]], [[0, 1]]]
    assert repr(x) == "PerReplica(float32[1,1], float32[1,2])"
    assert (x.count, x.replicas) == (2, (0, 1))
    assert [next(iter(v.devices())).id for v in x.values] == [0, 1]
    assert pair.extended.value_container(x.values[1]) is x


def test_values_from_function_of_different_numbers_of_keys(pair: replicax.Strategy) -> None:
    keys = [jax.random.split(jax.random.key(7), 1 + i) for i in range(2)]
    for got, expected in zip(pair.local_results(each(pair, *keys)), keys, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(expected))


def test_values_from_function_of_different_dtypes_keep_them(pair: replicax.Strategy) -> None:
    x = each(pair, np.array([1.5], np.float32), np.array([2, 3], np.int32))
    assert [(v.dtype.name, v.tolist()) for v in pair.local_results(x)] == [("float32", [1.5]), ("int32", [2, 3])]


def test_values_from_function_of_different_ranks(pair: replicax.Strategy) -> None:
    x = pair.distribute_values_from_function(lambda ctx: jnp.zeros((2,) * (1 + ctx.replica_id_in_sync_group)))
    assert [v.shape for v in pair.local_results(x)] == [(2,), (2, 2)]
    problem = r"args\[0\] can't run as one compiled program.*float32\[2\], float32\[2, 2\]"
    with pytest.raises(ValueError, match=problem):
        pair.run(lambda x: x, args=(x,), options=replicax.RunOptions(executor="compiled"))
    with pytest.warns(
        replicax.errors.ExecutorWarning, match=problem + ".* So it does now, and so will others"
    ) as caught:
        result = pair.run(lambda x: x + 1, args=(x,))
    pair.run(lambda x: x + 2, args=(x,))  # said once
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [v.tolist() for v in pair.local_results(result)] == [[1, 1], [[1, 1], [1, 1]]]


def test_values_from_function_of_python_objects(pair: replicax.Strategy) -> None:
    x = pair.distribute_values_from_function(lambda ctx: f"replica {ctx.replica_id_in_sync_group}")
    assert pair.local_results(x) == ("replica 0", "replica 1")
    with pytest.raises(TypeError, match="component of replica 0 is not an array: 'replica 0'"):
        pair.reduce("sum", x)


def test_components_may_be_numbers_beside_arrays(pair: replicax.Strategy) -> None:
    device = jax.devices()[1]
    for components in ([1, 2.5], [np.float32(1), jax.device_put(2.5, device)]):
        assert float(pair.reduce("sum", regroup(components))) == 3.5
    assert pair.reduce("sum", regroup(components)).devices() == {device}


def test_value_context_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"below num_replicas_in_sync \(2\), got 2"):
        replicax.ValueContext(2, 2)
    with pytest.raises(ValueError, match="of at least 0 .*, got -1"):
        replicax.ValueContext(-1, 2)
    assert replicax.ValueContext(1, 2).replica_id == 1


def test_a_worker_has_the_components_of_its_own_replicas() -> None:
    value = regroup([{"a": 1}, {"a": 2}], always_wrap=True, replicas=(2, 3), count=5)["a"]
    assert (value.values, value.replicas, value.count) == ((1, 2), (2, 3), 5)
    assert repr(value) == "PerReplica(2: 1, 3: 2; 5 replicas)"
    assert unwrap({"x": value}, replica=3) == {"x": 2}
    with pytest.raises(ValueError, match=r"one of this worker's, \(2, 3\), got 0"):
        unwrap({"x": value}, replica=0)
    with pytest.raises(ValueError, match=r"replica 2 has PyTreeDef\(\{'a': \*\}\), replica 3 has PyTreeDef\(\*\)"):
        regroup([{"a": 1}, 2], replicas=(2, 3), count=5)


def test_components_of_other_replicas_are_refused(pair) -> None:
    x = regroup([1.0, 2.0], always_wrap=True, replicas=(2, 3), count=4)
    with pytest.raises(ValueError, match="of another strategy, with 4 components; this one has 2 replica"):
        pair.run(lambda x: x, args=(x,), options=replicax.RunOptions(executor="per_replica"))


@pytest.mark.parametrize(("rows", "partial"), [(4, "exact"), (3, "exact"), (3, "pad")])
def test_components_that_a_program_of_jax_asks_for_first_are_values(pair, rows, partial) -> None:
    x = np.arange(rows, dtype=np.int32)
    [batch] = pair.distribute_dataset([x], replicax.InputOptions(partial_batch=partial))
    jax.make_jaxpr(lambda y: pair.local_results(batch)[1] + pair.local_results(y)[0])(1)
    assert [v.tolist() for v in pair.local_results(batch)] == [x[:2].tolist(), x[2:].tolist()]


def test_components_of_replicas_that_share_a_device_have_no_implicit_transfer() -> None:
    strategy = shared_strategy(4, 2)
    value = strategy.distribute_values_from_function(lambda ctx: np.full(2, ctx.replica_id_in_sync_group))
    value = strategy.run(lambda x: x + 1, args=(value,))
    with jax.transfer_guard("disallow"):
        found = strategy.local_results(value)
    assert [x.tolist() for x in found] == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_values_of_replicas_do_not_all_wait_on_the_first_device(monkeypatch) -> None:
    put, beside = jax.device_put, []

    def counted(*args):
        beside.append(sum(a.shape in ((54_321,), (1, 54_321)) and a.devices() == first for a in jax.live_arrays()))
        return put(*args)

    strategy, first = strategy_of(8), {jax.devices()[0]}
    monkeypatch.setattr(jax, "device_put", counted)
    strategy.distribute_values_from_function(lambda ctx: np.zeros(54_321, np.float32))
    assert 0 < max(beside) <= 4
