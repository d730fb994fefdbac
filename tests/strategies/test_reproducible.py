"""The same bits on any number of devices: sums over replicas in a fixed order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax
from replicax import REPLICA_AXIS
from tests import processes
from tests.strategies import workers_reproducible
from tests.strategies.workers_reproducible import Training, on_devices


def reference(terms: list[Any]) -> Any:
    """The sum in pairs of neighbours, as NumPy does it."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = [*pairs, terms[-1]] if len(terms) % 2 else pairs
    return terms[0]


def sums(x: jax.Array) -> Any:
    replica = replicax.get_replica_context()
    assert replica is not None
    n = lax.axis_size(REPLICA_AXIS)
    ring = replicax.CommunicationOptions(implementation="ring", bytes_per_pack=16, timeout_seconds=60.0)

    def turn(total: Any, scale: Any) -> Any:  # a collective inside of a loop
        return total + lax.psum(x * scale + total, REPLICA_AXIS), None

    return {
        "sum": replica.all_reduce("sum", x),
        "mean": replica.all_reduce("mean", {"x": x * x, "half": x.astype(jnp.bfloat16), "none": x[:0]}, ring),
        "of jax": lax.psum(x, REPLICA_AXIS),
        "of one value": lax.psum(jnp.full(3, 0.1) / 3, REPLICA_AXIS),
        "used twice": (lax.psum(x, REPLICA_AXIS), x),
        "extremes": lax.pmax(x, REPLICA_AXIS),
        "part": lax.psum_scatter(jnp.outer(jnp.arange(n, dtype=x.dtype) + 1, x), REPLICA_AXIS),
        "parts": lax.psum_scatter(jnp.tile(x, n), REPLICA_AXIS, tiled=True),
        "in groups": lax.psum(x, REPLICA_AXIS, axis_index_groups=np.arange(n).reshape(2, -1).tolist()),
        "in a loop": lax.scan(turn, jnp.zeros_like(x), jnp.arange(3, dtype=x.dtype))[0],
        "counts": replica.all_reduce("sum", x > 0.5),
    }


@pytest.mark.parametrize(("replicas", "devices"), [(8, [8, 2, 1]), (12, [4, 2]), (5, [5, 1])])
def test_sums_have_the_same_bits(replicas: int, devices: list[int]) -> None:
    data = np.random.default_rng(0).normal(size=(replicas, 7)).astype(np.float32)
    # Sums in groups are for groups of one size.
    step = sums if replicas % 2 == 0 else lambda x: lax.psum(x, REPLICA_AXIS)
    results = []
    for count in devices:
        strategy = on_devices(replicas, count)
        x = strategy.distribute_values_from_function(lambda ctx: data[ctx.replica_id_in_sync_group])
        found = strategy.run(step, args=(x,))
        results.append([np.asarray(v) for leaf in jax.tree.leaves(found) for v in strategy.local_results(leaf)])
    per_replica = len(results[0])
    for found in results[1:]:
        assert len(found) == per_replica
        for a, b in zip(found, results[0], strict=True):
            assert a.tobytes() == b.tobytes()
    whole = results[0] if replicas == 5 else [np.asarray(strategy.run(lambda x: lax.psum(x, REPLICA_AXIS), args=(x,)))]
    assert whole[0].tobytes() == reference(list(data)).tobytes()


def test_bytes_are_those_of_a_ring() -> None:
    strategy = on_devices(8, 4)
    x = strategy.distribute_values_from_function(lambda ctx: np.ones(1024, np.float32))
    step = lambda x: replicax.get_replica_context().all_reduce("sum", [x, x * 2])  # noqa: E731
    found = strategy.extended.trace(step, args=(x,)).collectives()
    assert {c.kind: c.bytes for c in found} == {"all-to-all": 8192, "all-gather": 8192}


def test_training_goes_on_elsewhere_with_the_same_bits(tmp_path: Any) -> None:
    undisturbed = Training.of(on_devices(8, 8)).go(0, 6)
    for devices in (4, 2, 1):
        begun = Training.of(on_devices(8, devices)).go(0, 3)
        begun.checkpoint.save(tmp_path / str(devices))
        goes_on = Training.of(on_devices(8, {4: 1, 2: 8, 1: 2}[devices]), seed=1)
        goes_on.checkpoint.restore(tmp_path / str(devices))
        assert goes_on.go(3, 6).bits() == undisturbed.bits(), devices


def test_two_workers_have_the_same_bits_as_one() -> None:
    ours, theirs = processes.run(workers_reproducible.train_on_workers, workers=2, devices=1, timeout=100)
    assert ours == theirs == Training.of(on_devices(8, 4)).go(0, 3).bits()


def test_several_steps_in_one_call() -> None:
    one_by_one = Training.of(on_devices(4, 2)).go(0, 4)
    at_once = Training.of(on_devices(4, 4))
    with jax.numpy_dtype_promotion("standard"):
        at_once.strategy.run_steps(lambda _, x, y: at_once.step(x, y), iter(at_once.data(0, 4)), 4)
    for a, b in zip(at_once.variables, one_by_one.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_what_can_not_be_reproducible() -> None:
    with pytest.raises(ValueError, match=r"replicas of a device run one after the other, but 2 of them"):
        replicax.MirroredStrategy(["cpu:0"], num_replicas=4, replicas_at_once=2, reproducible=True)
    with pytest.raises(ValueError, match="each has 2 logical devices"):
        replicax.MirroredStrategy(["cpu:0", "cpu:1"], num_logical_devices=2, reproducible=True)
    with pytest.raises(TypeError, match="reproducible must be True or False, got 1"):
        replicax.MirroredStrategy(["cpu:0"], reproducible=1)  # type: ignore[arg-type]


def test_one_replica_needs_no_order() -> None:
    strategy = replicax.MirroredStrategy(["cpu:0"], reproducible=True)
    assert float(strategy.run(lambda: replicax.get_replica_context().all_reduce("sum", jnp.float32(3)))) == 3.0
