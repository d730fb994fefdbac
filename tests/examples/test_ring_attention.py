"""Ring attention computes what dense attention does on one device, and a device has less the more of them there are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from examples import ring_attention
from tests.programs.programs import third_party

dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)


def spread_over(devices: int, replicas: int = 1) -> replicax.Strategy:
    return replicax.MirroredStrategy([f"cpu:{i}" for i in range(devices * replicas)], num_logical_devices=devices)


@pytest.mark.parametrize("devices", [1, 8])
@third_party
def test_values_and_gradients_are_those_of_dense_attention(devices: int) -> None:
    strategy = spread_over(devices)
    axes = strategy.extended.mesh.axis_names[1:]
    arrays = np.random.default_rng(devices).normal(size=(3, 2, 32, 4, 8)).astype(np.float32)
    weights = np.cos(np.arange(arrays[0].size, dtype=np.float32)).reshape(arrays[0].shape)

    def value_and_gradients(attention: Any, query: Any, key: Any, value: Any) -> Any:
        def weighted(*arrays: Any) -> Any:
            result = attention(*arrays)
            return (result * weights).sum(), result

        return jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    ring = functools.partial(ring_attention.ring_attention, axes)
    (_, found), gradients = strategy.run(functools.partial(value_and_gradients, ring), args=tuple(arrays))
    (_, expected), dense_gradients = jax.jit(functools.partial(value_and_gradients, dense))(*arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients, dense_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@third_party
def test_losses_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "LENGTH", 64)
    losses, variables, program = ring_attention.train(spread_over(4, replicas=2), steps=3)
    expected, plain, _ = ring_attention.train(replicax.OneDeviceStrategy("cpu:0"), steps=3, attention=dense)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(variables), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # Pieces go around, gradients are summed, and nothing is gathered.
    assert {c.kind for c in program.collectives()} == {"collective-permute", "all-reduce"}


@third_party
def test_what_comes_later_is_not_seen() -> None:
    strategy = spread_over(4)
    axes = strategy.extended.mesh.axis_names[1:]
    arrays = np.random.default_rng(0).normal(size=(3, 1, 16, 2, 4)).astype(np.float32)
    changed = arrays.copy()
    changed[1:, :, 10:] = 7.0  # keys and values on the last two devices

    def attention(*arrays: Any) -> Any:
        return ring_attention.ring_attention(axes, *arrays)

    before, after = (strategy.run(attention, args=tuple(given)) for given in (arrays, changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.allclose(before[:, 10:], after[:, 10:])


def used(strategy: replicax.Strategy, **size: int) -> tuple[int, replicax.planning.Plan]:
    """The bytes on a device beside its variables and its batch, by the compiler."""
    size = {"batch": 4, "length": 512, "width": 64, "heads": 2, "layers": 1, "letters": 64, **size}
    step, args = ring_attention.plan(strategy, **size)
    plan = replicax.plan(strategy, step, args)
    return plan.memory.temporaries, plan


@pytest.mark.soak
@third_party
def test_a_device_has_less_the_more_of_them_there_are() -> None:
    one, four = (used(spread_over(devices))[0] for devices in (1, 4))
    assert four < 0.3 * one


@third_party
@pytest.mark.soak  # tests/cli/test_plan.py compiles another example for TPUs
def test_on_tpus() -> None:
    resolver = replicax.TPUClusterResolver(topology="v5e:2x4")

    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[2, 2, 1, 1], num_replicas=2)
    _, plan = used(replicax.TPUStrategy(resolver, assignment), batch=1, length=1024, width=256)
    assert plan.fits
    assert {(c.kind, c.participants) for c in plan.collectives} >= {("collective-permute", 4), ("all-reduce", 4)}


@third_party
def test_a_text_that_does_not_divide_is_refused() -> None:
    strategy = spread_over(4)
    with strategy.scope():
        _, step = ring_attention.build(strategy, layers=0)
    text = np.zeros((2, 30), np.int32)
    with pytest.raises(ValueError, match="dim 1 of size 30 does not divide into 4 parts"):
        strategy.run(step, args=((text, text),))
