"""CommunicationOptions mean what they say."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import CommunicationOptions
from replicax.execution import deadline
from tests.conftest import strategy_of
from tests.soaking import soak_except

PER_REPLICA = replicax.RunOptions(executor="per_replica")
ALL = [
    CommunicationOptions(bytes_per_pack=100),
    CommunicationOptions(implementation="ring"),
    CommunicationOptions(timeout_seconds=60),
    CommunicationOptions(bytes_per_pack=64, timeout_seconds=60, implementation="RING"),
]


def here() -> replicax.ReplicaContext:
    context = replicax.get_replica_context()
    assert context is not None
    return context


def arrays(strategy: replicax.Strategy) -> Any:
    def make(ctx: Any) -> Any:
        rng = np.random.default_rng(ctx.replica_id_in_sync_group)
        return [rng.normal(size=(3, i + 1)).astype(np.float32) for i in range(5)] + [np.arange(7) % 3]

    return strategy.distribute_values_from_function(make)


@pytest.mark.parametrize("replicas", soak_except([1, 2, 3], 3))
@pytest.mark.parametrize("options", soak_except(ALL, ALL[3]), ids=repr)
def test_they_change_nothing_in_the_results(options: CommunicationOptions, replicas: int) -> None:
    strategy = strategy_of(replicas)
    x = arrays(strategy)

    def step(x: Any, options: Any) -> Any:
        def loss(x: Any) -> Any:
            total = here().all_reduce("sum", [jnp.sin(a) for a in x], options)
            whole = here().all_gather(x[0], 1, options)
            return sum(jnp.sum(t * t) for t in total) + jnp.sum(whole * jnp.arange(1.0, whole.shape[1] + 1)[None])

        floats, ints = x[:3], x[5]
        return (
            here().all_reduce("mean", floats, options),
            here().all_reduce("sum", ints, options),
            jax.grad(loss)(floats),
        )

    expected = strategy.run(step, args=(x, None))
    for how in (None, PER_REPLICA):
        found = strategy.run(step, args=(x, options), options=how)
        is_leaf = lambda v: isinstance(v, replicax.PerReplica)  # noqa: E731
        for a, b in zip(*(jax.tree.leaves(t, is_leaf=is_leaf) for t in (found, expected)), strict=True):
            assert is_leaf(a) == is_leaf(b)
            for mine, theirs in zip(strategy.local_results(a), strategy.local_results(b), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def kinds(strategy: replicax.Strategy, options: Any) -> list[tuple[str, int]]:
    program = strategy.extended.trace(lambda x: here().all_reduce("sum", x[:5], options), args=(arrays(strategy),))
    return [(c.kind, c.bytes) for c in program.collectives()]


def test_a_pack_is_an_all_reduce_of_at_most_so_many_bytes() -> None:
    pair = strategy_of(2)
    assert [kind for kind, _ in kinds(pair, None)] == ["all-reduce"]
    # 12 + 24 + 36 | 48 | 60 bytes
    assert sorted(kinds(pair, CommunicationOptions(bytes_per_pack=90))) == [
        ("all-reduce", 48),
        ("all-reduce", 60),
        ("all-reduce", 72),
    ]
    assert len(kinds(pair, CommunicationOptions(bytes_per_pack=1))) == 5


def test_a_ring_sends_to_the_neighbour_only() -> None:
    found = kinds(strategy_of(4), CommunicationOptions(implementation="ring"))
    assert {kind for kind, _ in found} == {"collective-permute"}


def test_options_reach_the_lower_level() -> None:
    strategy = strategy_of(2)
    x = arrays(strategy)
    options = CommunicationOptions(implementation="ring")
    [total] = strategy.extended.batch_reduce_to("sum", [(x, None)], options)
    np.testing.assert_allclose(total[1], sum(np.asarray(v) for v in x[1].values), rtol=1e-6)
    assert float(strategy.extended.reduce_to("mean", x, None, options)[5][2]) == 2.0


def test_options_made_anew_are_the_same_program() -> None:
    pair = strategy_of(2)
    traced = []

    def make() -> Any:
        options = CommunicationOptions(bytes_per_pack=10)

        def step(x: Any) -> Any:
            traced.append(1)
            return here().all_reduce("sum", x, options)

        return step

    for _ in range(3):
        pair.run(make(), args=(1.0,))
    assert len(traced) == 1


@pytest.mark.parametrize(("options", "sums"), [(None, 1), (CommunicationOptions(bytes_per_pack=1), 5)])
def test_they_hold_for_values_that_are_reduced_outside_of_a_step(options, sums: int) -> None:
    strategy = strategy_of(2)
    strategy.extended.batch_reduce_to("sum", [(x, None) for x in arrays(strategy)[:5]], options)
    [(_, executable)] = strategy.extended.programs._entries.values()
    assert executable.lowered().as_text().count("stablehlo.all_reduce") == sums


def test_a_timeout_names_who_is_missing() -> None:
    strategy = strategy_of(3)
    release = threading.Event()

    def late(replica: Any) -> Any:
        if replica == 2:
            release.wait(20)
        return np.float32(1)

    def step(x: Any) -> Any:
        one = jax.pure_callback(late, jax.ShapeDtypeStruct((), jnp.float32), here().replica_id_in_sync_group)
        return here().all_reduce("sum", x + one, CommunicationOptions(timeout_seconds=0.3))

    start = time.monotonic()
    with pytest.raises(
        replicax.errors.DeadlockError, match=r"replica\(s\) \[0, 1\] have waited for more than 0.3 s .* \[2\], wh"
    ):
        strategy.run(step, args=(1.0,))
    assert time.monotonic() - start < 15
    release.set()
    assert float(strategy.run(step, args=(1.0,))) == 6.0


def test_a_timeout_in_the_per_replica_executor() -> None:
    strategy = strategy_of(2)

    def step(pause: float) -> Any:
        if here().replica_id_in_sync_group == 1:
            time.sleep(float(pause))
        return here().all_reduce("sum", 1.0, CommunicationOptions(timeout_seconds=0.2 if float(pause) else 60))

    with pytest.raises(
        replicax.errors.DeadlockError,
        match=r"timed out: replica 0 is, for at most 0.2 s, in all_reduce of 1 arrays at .*; replica 1 has not come",
    ):
        strategy.run(step, args=(1.0,), options=PER_REPLICA)
    assert float(strategy.run(step, args=(0.0,), options=PER_REPLICA)) == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be an int of at least 0, got -1"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack must be an int of at least 0, got 1.5"),
        ({"timeout_seconds": 0}, "timeout_seconds must be a positive number or None: 0"),
        ({"timeout_seconds": "soon"}, "timeout_seconds must be a positive number or None: 'soon'"),
        ({"implementation": "pigeons"}, "implementation must be one of 'auto', 'ring', 'nccl' or a .*got 'pigeons'"),
    ],
)
def test_bad_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**arguments)


@pytest.mark.parametrize("method", ["all_reduce", "all_gather", "batch_reduce_to"])
def test_what_is_refused_where_it_is_used(method: str) -> None:
    pair = strategy_of(2)
    x = pair.distribute_values_from_function(lambda ctx: jnp.ones(2))

    def use(options: Any) -> Any:
        if method == "batch_reduce_to":
            return pair.extended.batch_reduce_to("sum", [(x, None)], options)
        if method == "all_reduce":
            return pair.run(lambda x: here().all_reduce("sum", x, options), args=(x,))
        return pair.run(lambda x: here().all_gather(x, 0, options), args=(x,))

    with pytest.raises(ValueError, match=f"{method}: implementation='nccl' is for NVIDIA GPUs, but .* run on cpu"):
        use(CommunicationOptions(implementation="nccl"))
    with pytest.raises(TypeError, match=f"{method}: options must be CommunicationOptions or None, got 3"):
        use(3)


def test_empty_arrays_and_packs_of_other_dtypes() -> None:
    pair = strategy_of(2)
    x = [jnp.zeros((0, 3)), jnp.ones(5, jnp.int32), jnp.zeros(0), jnp.ones(2, jnp.complex64), jnp.ones(3, bool)]
    for options in (CommunicationOptions(bytes_per_pack=4), CommunicationOptions(bytes_per_pack=4, timeout_seconds=60)):
        found = pair.run(lambda x: here().all_reduce("sum", x, options), args=(x,))  # noqa: B023
        assert [f.shape for f in found] == [a.shape for a in x]
        assert [np.asarray(f).sum() for f in found] == [0, 10, 0, 4, 6]


@pytest.mark.parametrize("options", soak_except(ALL, ALL[0], ALL[3]), ids=repr)
def test_under_vmap(options: CommunicationOptions) -> None:
    pair = strategy_of(2)
    x = pair.distribute_values_from_function(lambda ctx: jnp.ones((4, 3)) * (1 + ctx.replica_id_in_sync_group))

    def step(x: Any) -> Any:
        return jax.vmap(lambda v: (here().all_gather(v, 0, options), here().all_reduce("sum", v, options)))(x)

    whole, total = pair.run(step, args=(x,))
    assert whole.tolist() == [[1, 1, 1, 2, 2, 2]] * 4
    assert total.tolist() == [[3, 3, 3]] * 4


def test_a_step_has_the_longest_timeout_of_its_collectives(pair: replicax.Strategy) -> None:
    def step(x: Any) -> Any:
        for seconds in (20.0, 60.0, 40.0):
            x = here().all_reduce("sum", x, CommunicationOptions(timeout_seconds=seconds))
        return x

    assert pair.extended.trace(step, args=(1.0,)).program.timeout == 60.0


def late_sum(late: tuple[int, ...], seconds: float, timeout: float) -> Any:
    """A step that adds up, for which the replicas ``late`` come ``seconds`` later than others."""

    def sleep(replica: Any) -> Any:
        time.sleep(seconds if int(replica) in late else 0)
        return np.float32(0)

    def step(x: Any) -> Any:
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), here().replica_id_in_sync_group)
        return here().all_reduce("sum", x + zero, CommunicationOptions(timeout_seconds=timeout))

    return step


def test_after_a_timeout_another_strategy_waits_for_the_step_left_behind() -> None:
    three, two = strategy_of(3), replicax.MirroredStrategy(["cpu:3", "cpu:4"])
    with pytest.raises(replicax.errors.DeadlockError, match=r"for replica\(s\) \[2\], which have not come"):
        three.run(late_sum((2,), 1.0, 0.2), args=(1.0,))
    with pytest.raises(
        replicax.errors.DeadlockError, match="has timed out before is still running after another 0.1 s"
    ):
        two.run(late_sum((), 0.0, 0.1), args=(1.0,))
    assert float(two.run(late_sum((0, 1), 0.3, 20.0), args=(1.0,))) == 2.0
    assert not deadline._left_behind


def test_an_interrupt_while_workers_are_asked_leaves_the_step_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(deadline, "_of_all_workers", interrupted)
    two = strategy_of(2)
    with pytest.raises(KeyboardInterrupt):
        two.run(late_sum((1,), 1.0, 0.2), args=(1.0,))
    assert len(deadline._left_behind) == 1
    assert float(two.run(late_sum((), 0.0, 20.0), args=(1.0,))) == 2.0
    assert not deadline._left_behind
