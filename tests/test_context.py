from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.machinery
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import replicax
from replicax.system import registry
from tests.conftest import strategy_of


def test_outside_every_scope_there_is_a_default_replica_context() -> None:
    replica = replicax.get_replica_context()
    assert replica is not None
    assert replica.num_replicas_in_sync == 1
    assert replica.replica_id_in_sync_group == 0
    assert replica.strategy is replicax.get_strategy()
    assert not replicax.in_cross_replica_context()
    assert not replicax.has_strategy()
    assert float(replica.all_reduce("sum", 3.0)) == 3.0
    assert replica.all_gather(jnp.ones(2), axis=0).shape == (2,)


def test_merge_call_works_in_the_default_context() -> None:
    def merge(strategy: replicax.Strategy, x: float) -> float:
        assert replicax.in_cross_replica_context()
        assert replicax.get_replica_context() is None
        return strategy.reduce("sum", x) + 1

    replica = replicax.get_replica_context()
    assert replica is not None
    assert replica.merge_call(merge, args=(2.0,)) == 3.0


def test_scope_enters_cross_replica_context_and_nests(pair: replicax.Strategy) -> None:
    with pair.scope() as entered:
        assert entered is pair
        assert replicax.has_strategy()
        assert replicax.in_cross_replica_context()
        assert replicax.get_replica_context() is None
        with pair.scope():
            assert replicax.get_strategy() is pair
    assert not replicax.has_strategy()


def test_another_strategys_scope_does_not_nest(pair: replicax.Strategy) -> None:
    other = strategy_of(4)
    with pair.scope():
        with pytest.raises(replicax.errors.ContextError, match="mixing different Strategy objects"), other.scope():
            pass
        with pytest.raises(replicax.errors.ContextError, match="mixing different Strategy objects"):
            other.run(lambda: 1)
        assert replicax.get_strategy() is pair


def test_scopes_left_in_the_wrong_order(pair: replicax.Strategy) -> None:
    outer, inner = pair.scope(), pair.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(replicax.errors.ContextError, match="wrong order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def test_inside_run_there_is_a_replica_context(strategy: replicax.Strategy) -> None:
    seen = []

    def step() -> None:
        replica = replicax.get_replica_context()
        assert replica is not None
        seen.append((replica.num_replicas_in_sync, replica.strategy, replicax.in_cross_replica_context()))
        assert replica.devices == strategy.extended.worker_devices

    strategy.run(step)
    assert seen == [(strategy.num_replicas_in_sync, strategy, False)]


def test_scope_inside_a_step(pair: replicax.Strategy) -> None:
    def step() -> None:
        with pair.scope():
            pass

    with pytest.raises(replicax.errors.ContextError, match="entered inside a step.*merge_call"):
        pair.run(step)


@pytest.mark.parametrize(
    "call",
    [
        lambda s, x: s.reduce("sum", x),
        lambda s, x: s.gather(x, 0),
        lambda s, x: s.local_results(x),
        lambda s, x: s.distribute_dataset([x]),
        lambda s, x: s.distribute_values_from_function(lambda ctx: 1),
    ],
)
def test_cross_replica_calls_inside_a_step(pair: replicax.Strategy, call) -> None:
    with pytest.raises(replicax.errors.ContextError, match="inside a replica. Inside a step use .*merge_call"):
        pair.run(lambda x: call(pair, x), args=(1.0,))


def test_run_inside_run(pair: replicax.Strategy) -> None:
    with pytest.raises(replicax.errors.ContextError, match="A step can't run another"):
        pair.run(lambda: pair.run(lambda: 1))
    with pytest.raises(replicax.errors.ContextError, match="in a merge_fn"):
        pair.run(lambda: replicax.get_replica_context().merge_call(lambda s: s.run(lambda: 1)))


def test_a_stale_replica_context_says_so(pair: replicax.Strategy) -> None:
    kept = []
    pair.run(lambda: kept.append(replicax.get_replica_context()))
    for call in (
        lambda: kept[0].all_reduce("sum", 1.0),
        lambda: kept[0].all_gather(jnp.ones(1), 0),
        lambda: kept[0].merge_call(lambda s: None),
        lambda: kept[0].replica_id_in_sync_group,
        lambda: kept[0].random_key(jax.random.key(0)),
        lambda: kept[0].example_mask,
    ):
        with pytest.raises(replicax.errors.ContextError, match="no longer current.*in its own thread"):
            call()
        with pair.scope(), pytest.raises(replicax.errors.ContextError, match="in cross-replica context"):
            call()


def test_the_default_replica_context_is_not_that_of_a_step(pair: replicax.Strategy) -> None:
    outside = replicax.get_replica_context()
    for call in (lambda: outside.replica_id_in_sync_group, lambda: outside.example_mask):
        with pytest.raises(replicax.errors.ContextError, match="in another replica context"):
            pair.run(call)


def test_collectives_in_a_thread_that_a_step_starts(pair: replicax.Strategy) -> None:
    def step(x: float) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(lambda: replicax.get_replica_context().all_reduce("sum", x)).result()

    with pytest.raises(replicax.errors.ContextError, match="a thread that a step starts is outside the step"):
        pair.run(step, args=(1.0,))


def test_a_replica_context_inside_merge_fn_says_so(pair: replicax.Strategy) -> None:
    def step() -> None:
        replica = replicax.get_replica_context()
        replica.merge_call(lambda s: replica.all_reduce("sum", 1.0))

    with pytest.raises(replicax.errors.ContextError, match="in cross-replica context"):
        pair.run(step)


def test_the_replicas_number_inside_merge_fn(pair: replicax.Strategy) -> None:
    def step() -> Any:
        replica = replicax.get_replica_context()
        return replica.merge_call(lambda s: (replica.replica_id_in_sync_group, replica.example_mask))

    number, mask = pair.run(step)
    assert [int(x) for x in pair.local_results(number)] == [0, 1]
    assert mask is None


def test_merge_call_wraps_traced_values_only(pair: replicax.Strategy) -> None:
    with pair.scope():
        v = replicax.Variable(2.0)

    def merge(strategy, x, name, variable):
        assert isinstance(x["x"], replicax.PerReplica)
        assert name == "name"
        assert variable is v
        return strategy.reduce("sum", x), x, strategy.local_results(x["x"])

    def step():
        x = {"x": jnp.float32(1 + replicax.get_replica_context().replica_id_in_sync_group)}
        return replicax.get_replica_context().merge_call(merge, args=(x,), kwargs={"name": "name", "variable": v})

    total, mine, everyone = pair.run(step)
    assert float(total["x"]) == 3.0
    assert [float(x) for x in pair.local_results(mine["x"])] == [1.0, 2.0]
    assert [float(x) for x in everyone] == [1.0, 2.0]


def test_set_strategy(pair: replicax.Strategy) -> None:
    replicax.set_strategy(pair)
    try:
        assert replicax.get_strategy() is pair
        assert replicax.in_cross_replica_context()
        assert replicax.Variable(1.0).strategy is pair
        with pair.scope(), pytest.raises(replicax.errors.ContextError, match="outside every"):
            replicax.set_strategy(None)
        with pytest.raises(replicax.errors.ContextError, match="mixing"), strategy_of(4).scope():
            pass
        with pytest.raises(replicax.errors.ContextError, match="mixing"):
            strategy_of(4).run(lambda: 1)
        assert pair.run(lambda: 1) == 1
    finally:
        replicax.set_strategy(None)
    assert not replicax.has_strategy()


@pytest.mark.parametrize("wrong", ["mirrored", 2, replicax.MirroredStrategy, replicax.get_replica_context])
def test_set_strategy_wants_a_strategy(pair: replicax.Strategy, wrong) -> None:
    with pytest.raises(TypeError, match=r"expected a strategy, such as replicax.MirroredStrategy\(\), or None, got"):
        replicax.set_strategy(wrong)
    assert not replicax.has_strategy()
    assert float(replicax.Variable(1.0)) == 1.0


def test_each_thread_has_its_own_contexts(pair: replicax.Strategy) -> None:
    seen = []
    with pair.scope():
        thread = threading.Thread(target=lambda: seen.append(replicax.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_each_task_has_its_own_contexts(pair: replicax.Strategy) -> None:
    """But those that it was made in, which it goes on to have."""
    other = replicax.MirroredStrategy(["cpu:0"])
    seen: dict[str, object] = {}

    async def inside() -> None:
        await asyncio.sleep(0)
        seen["inside"] = replicax.get_strategy()

    async def task(name: str, strategy: replicax.Strategy) -> None:
        with strategy.scope(), replicax.debug() if name == "one" else contextlib.nullcontext():
            await asyncio.sleep(0)
            seen[name] = replicax.get_strategy()
            seen[f"{name} traces"] = strategy.run(lambda x: isinstance(x, jax.core.Tracer), args=(1.0,))
            made = asyncio.create_task(inside())
            await asyncio.sleep(0)
        await made

    async def main() -> None:
        await asyncio.gather(task("one", pair), task("two", other))
        seen["main"] = replicax.has_strategy()

    asyncio.run(main())
    assert (seen["one"], seen["two"], seen["main"]) == (pair, other, False)
    assert (seen["one traces"], seen["two traces"]) == (False, True)
    assert seen["inside"] is other


def test_a_library_that_a_scope_imports_first_is_told(pair: replicax.Strategy, monkeypatch) -> None:
    """As Keras is, whose models would train on one device."""
    adapted: list[str] = []
    monkeypatch.setitem(registry.scoped_libraries, "library_of_models", lambda: adapted.append("library_of_models"))
    library = types.ModuleType("library_of_models")
    library.__spec__ = importlib.machinery.ModuleSpec("library_of_models", None)
    scope = pair.scope()
    scope.__enter__()
    monkeypatch.setitem(sys.modules, "library_of_models", library)
    assert adapted == []
    with pytest.warns(UserWarning, match="library_of_models was first imported inside a strategy's scope") as warned:
        scope.__exit__(None, None, None)
    assert adapted == ["library_of_models"]
    assert warned[0].filename == __file__
    with pair.scope():
        pass
    assert adapted == ["library_of_models"]
